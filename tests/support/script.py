"""Models that say what they are told, as far as grammars let them: for clients that need a model
which calls tools and answers."""

import json
from dataclasses import replace

import torch

from tinyspec.serve import protocol


class Recites:
    """A processor that leaves one text to say, behind a prompt of ``start`` tokens."""

    stateless = True

    def __init__(self, token_ids, start):
        self.token_ids, self.start = token_ids, start

    def __call__(self, ids, scores):
        forced = torch.full_like(scores, -torch.inf)
        forced[0, self.token_ids[(ids.shape[1] - self.start) % len(self.token_ids)]] = 0.0
        return forced


class Script:
    """A processor by which a model says ``token_ids`` and then ``end``, as far as masks let it."""

    def __init__(self, token_ids, end):
        self.token_ids, self.end, self.start = token_ids, end, None

    def __call__(self, ids, scores):
        self.start = ids.shape[1] if self.start is None else self.start
        place, said = ids.shape[1] - self.start, self.token_ids
        scores = scores.clone()
        scores[0, said[place] if place < len(said) else self.end] += 1e4
        return scores


def saying(server, monkeypatch, text):
    """Let the model say ``text``, or what it returns for a request's body; a client of it. Markup
    is by its tokens."""
    tokenizer, params = server.engine.tokenizer, protocol.TextRequest.params

    def scripted(body, **given):
        said = text if isinstance(text, str) else text(body)
        token_ids = tokenizer(said, add_special_tokens=False).input_ids
        own, end = params(body, **given), tokenizer.eos_token_id
        return replace(own, logits_processors=lambda: [Script(token_ids, end)])

    monkeypatch.setattr(protocol.TextRequest, "params", scripted)
    return server.client()


def agent(form, values, answer, text):
    """What an agent's model says: a call of the first tool, with those of ``values`` that it takes,
    ``text`` once that has a result, and ``answer`` where a form is asked for."""

    def said(body):
        dumped = body.model_dump(mode="json")
        last = (dumped.get("messages") or dumped["input"])[-1]
        result = isinstance(last, dict) and "tool" in (last.get("role"), last.get("type", "")[-4:])
        result |= isinstance(last, dict) and last.get("type") == "function_call_output"
        if dumped.get("tools") and not result:
            function = dumped["tools"][0].get("function", dumped["tools"][0])
            taken = function["parameters"]["properties"]
            given = {name: value for name, value in values.items() if name in taken}
            name = json.dumps(function["name"])
            inner = f'{{"name": {name}, "{form.arguments}": {json.dumps(given)}}}'
            return f"{form.before}{inner}{form.behind}"
        return json.dumps(answer) if body.form else text

    return said
