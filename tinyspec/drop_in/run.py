"""A call's requests in an engine: made, run to their end, streamed.

Processors and criteria that a call is given for all its rows at once are called once for every step
of all, as transformers calls them. ``generate_batch`` takes lists of token ids and gives
transformers' ``GenerationOutput``, with the requests that ``generate`` makes of the same rows;
managers of continuous batching are transformers' own. Knows no model.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from tinyspec.drafts.drafter import Drafter
from tinyspec.drop_in.call import Call
from tinyspec.drop_in.prepare import is_per_request
from tinyspec.drop_in.prompts import Streamers
from tinyspec.engine.engine import Engine
from tinyspec.engine.results import EventStream
from tinyspec.errors import refuse
from tinyspec.model.torch_state import callers_modes
from tinyspec.runner.processors import BatchWide
from tinyspec.runner.sampler import NOT_FINITE, NUMBERS, SampleBatch, SpecialResult
from tinyspec.scheduler.request import Request, Sequence

if TYPE_CHECKING:
    from transformers.generation.continuous_batching.requests import GenerationOutput

_HOW = "with processors or criteria for all rows, which may also be a list for each prompt"


def run(engine: Engine, call: Call, drafter: Drafter | PreTrainedModel | None) -> list[Sequence]:
    """The sequences of ``call``, run to their end; none where it has become unserved. Raises what a
    processor or a criterion raised."""
    wide = wide_rows(call)
    requests = new_requests(engine, call, drafter, wide)
    sequences = [sequence for request in requests for sequence in request.sequences]
    if call.unserved:
        return []
    streamers = call.streamers()
    try:
        if wide is not None:
            wide.run(engine, requests, streamers, call.pad)
        elif streamers is None:
            engine.tracker.submit(requests)
            engine.tracker.run(requests, bool, until_abort=True)
        else:
            engine.tracker.submit(requests)
            places = {(s.request.request_id, s.index): n for n, s in enumerate(sequences)}
            for event in EventStream(requests, None, engine.tracker, engine):
                if event.finish_reason == "abort":
                    break
                place, ended = places[event.request_id, event.index], bool(event.finish_reason)
                streamers.put(place, event.token_ids, ended, call.pad)
        aborted = [(s, n) for n, s in enumerate(sequences) if s.finish_reason == "abort"]
        for failed, n in sorted(aborted, key=lambda pair: pair[0].error is None)[:1]:
            raise failed.cause or RuntimeError(f"completion {n}: {failed.error}")
    finally:
        try:
            engine.tracker.cancel(requests)
        finally:
            if streamers is not None:  # who reads them in another thread waits for it
                streamers.end()
    return sequences


def new_requests(
    engine: Engine,
    call: Call,
    drafter: Drafter | PreTrainedModel | None,
    wide: WideRows | None = None,
) -> list[Request]:
    """The engine's requests, with pages reserved for all that may run at once; none where ``wide``
    rows do not all fit. drafter: theirs."""
    size = engine.config.page_size or 1
    pages = []
    for prompt, params in zip(call.prompts.each, call.params, strict=True):
        first = -(-(len(prompt) + params.most_new_tokens) // size)
        # Completions share the prompt's full pages, unless each computes them.
        further = first - (len(prompt) // size if wide is None else 0)
        pages += [first] + [further] * (params.num_return_sequences - 1)
    most = engine.config.max_sequences
    needed = sum(sorted(pages)[-most:])
    if wide is not None:
        needed = sum(pages) + len(pages)  # that admission may ask for one more of each
    with engine.driver.turn("generate"):
        inputs = engine.ready(needed)
        if wide is not None and (len(pages) > most or needed > engine.pool.num_pages):
            call.unserved.append(
                f"user code for all of {len(pages)} rows ({needed} pages) at once, where there are "
                f"max_sequences={most} and {engine.pool.num_pages} pages"
            )
            return []
        call.draw_seeds()
        ids = [p.ids or [0] * len(p) for p in call.prompts.each]
        requests = inputs.of_ids(ids, call.params)
    for request, prompt in zip(requests, call.prompts.each, strict=True):
        request.embeds, request.num_hidden = prompt.embeds, len(prompt) - len(prompt.ids)
        request.keeps, request.supplied = call.keeps, wide is not None
        request.drafter = drafter
    return requests


@dataclass(eq=False)
class WideRows:
    """B rows of one call that get their tokens in step, each with its own engine request or
    completion. A row that has ended goes on behind its end, as in transformers, until all have.

    prompts [B][W]: ids as the call was given them, pads included. pad: what follows in a row that
    has ended; -1: what it would have. criteria: called with [B, W + t] ids and the scores of every
    step, or None; [B] answers, or one for all. done: the rows that have ended. scores: [B, V] of
    every step, where they are kept.
    """

    prompts: list[list[int]]
    pad: int
    criteria: list[Callable[..., Any]]
    done: list[bool] = field(default_factory=list)
    scores: list[Tensor] = field(default_factory=list)

    def run(
        self, engine: Engine, requests: list[Request], streamers: Streamers | None, pad: int
    ) -> None:
        """Run ``requests``, whose completions are the rows, to their end, or to the first abort.
        Raises what the user's code raised."""
        sequences = [sequence for request in requests for sequence in request.sequences]
        self.done, tracker = [False] * len(sequences), engine.tracker

        def wait() -> bool:
            return all(s.next_logits is not None or s.finished for s in sequences)

        def step() -> None:
            if not any(sequence.finished for sequence in sequences):
                self._step(engine, sequences)

        tracker.submit(requests)
        while not any(sequence.finished for sequence in sequences):
            tracker.drive("generate", wait, step)
            if streamers is not None:
                for n, sequence in enumerate(sequences):
                    streamers.put(n, sequence.tokens[-1:], sequence.finished, pad)

    def _step(self, engine: Engine, sequences: list[Sequence]) -> None:
        """One token for every row."""
        tokens, special = self._sample(engine, sequences)
        for n, token in enumerate(tokens):
            if token < 0:
                result = special.get(n, SpecialResult())
                raise result.cause or RuntimeError(f"completion {n}: {result.error or NOT_FINITE}")
        engine.core.committer.supply(sequences, tokens)
        for n, sequence in enumerate(sequences):
            engine.core.committer.keep(sequence, special[n])
        if "scores" in sequences[0].request.keeps:
            self.scores.append(torch.stack([s.scores[-1] for s in sequences]))
        self._note_ends(engine, sequences)
        ended = all(self.done) or any(sequence.remaining == 0 for sequence in sequences)
        reasons = [("stop" if done else "length") if ended else "" for done in self.done]
        engine.tracker.end(sequences, reasons)

    def _sample(
        self, engine: Engine, sequences: list[Sequence]
    ) -> tuple[list[int], dict[int, SpecialResult]]:
        """A token for each row, by the logits that it waits with; -1 for none."""
        batch = SampleBatch.of(
            {name: np.array([one.sampling[name] for one in sequences]) for name in NUMBERS},
            np.arange(len(sequences)),
            np.array([sequence.length for sequence in sequences]),
            dict(enumerate(sequences)),
            forced={n: self.pad for n, done in enumerate(self.done) if done},
            together=self._ids(sequences),
        )
        logits = torch.stack([sequence.next_logits for sequence in sequences])
        sampled = engine.core.sampler.sample(logits, batch)
        tokens = sampled.tokens.cpu().numpy()
        return tokens.tolist(), sampled.special_results(tokens, None)

    def _ids(self, sequences: list[Sequence]) -> list[list[int]]:
        """[B][W + t]: all tokens so far."""
        return [
            prompt + sequence.ids(sequence.request.num_prompt, sequence.length)
            for prompt, sequence in zip(self.prompts, sequences, strict=True)
        ]

    def _note_ends(self, engine: Engine, sequences: list[Sequence]) -> None:
        """Which rows have ended by their newest tokens, a row by itself and all together."""
        for n, sequence in enumerate(sequences):
            if not self.done[n]:
                (newest,) = sequence.ids(sequence.length - 1, sequence.length)
                by_token = newest in sequence.params.stop_ids
                self.done[n] = by_token or engine.core.committer.stops(sequence)
        if not self.criteria:
            return
        ids = torch.tensor(self._ids(sequences), dtype=torch.int64, device=engine.runner.device)
        scores = tuple(self.scores) or None
        with callers_modes():
            answers = [_answer(criterion(ids, scores), len(ids)) for criterion in self.criteria]
        self.done = [any(answer) for answer in zip(self.done, *answers, strict=True)]


def _answer(given: Any, count: int) -> list[bool]:
    """One answer for each of ``count`` rows."""
    answer = torch.as_tensor(given)
    if answer.shape not in ((), (1,), (count,)):
        raise ValueError(f"it answered with shape {tuple(answer.shape)} for {count} rows")
    return [bool(each) for each in answer.expand(count).tolist()]


def wide_rows(call: Call) -> WideRows | None:
    """What all rows of a call share, and ``call.params`` [B] changed to it; None where each row is
    by itself: one row without pads, or code that is transformers' own, ``stateless``, or a
    prompt's.

    Raises ValueError for values that would have to be one for all.
    """
    params, first, prompts = call.params, call.prepared[0], call.prompts
    processors = _of_all_rows(call, "logits_processor", params[0].functions["logits_processors"])
    criteria = _of_all_rows(call, "stopping_criteria", params[0].stopping_criteria)
    spare = prompts.width - max(map(len, prompts.each))  # pads of the longest prompt
    single = len(params) * params[0].num_return_sequences == 1
    if not (processors or criteria) or (single and not spare):
        return None
    asked = [p.deterministic for p in params]
    if len({*asked}) > 1:
        raise refuse("deterministic", asked, f"one value {_HOW}")
    # As many new tokens as given, or up to a length that counts pads.
    new = [p.most_new_tokens for p in params]
    if len({*new}) > 1 < len({prepared.config.max_length for prepared in call.prepared}):
        raise refuse("max_new_tokens", new, f"one value {_HOW}")
    most = new[0] if len({*new}) == 1 else max(min(new) - spare, 1)
    wide = {id(p): BatchWide(p) for p in processors}
    call.params = [
        one.resolve(
            max_new_tokens=most,
            min_new_tokens=min(one.min_new_tokens, most),
            logits_processors=[wide.get(id(p), p) for p in one.functions["logits_processors"]],
            stopping_criteria=[c for c in one.stopping_criteria if c not in criteria],
        )
        for one in params
    ]
    pad = first.pad if first.eos and first.pad is not None else -1
    return WideRows(call.padded().tolist(), pad, criteria)


def _of_all_rows(call: Call, name: str, code: Iterable[Any]) -> list[Any]:
    """What of ``code`` of a row is the user's for all rows at once."""
    if is_per_request(name, call.arguments.get(name)):
        return []
    users = [one for one in code if not type(one).__module__.startswith("transformers.")]
    return [one for one in users if not getattr(one, "stateless", False)]


def batch_arguments(
    inputs: Any, generation_config: GenerationConfig | None, settings: dict[str, Any]
) -> dict[str, Any]:
    """Those of ``generate`` for the same rows; the user's processors and criteria are called for
    each row alone. Raises ValueError for settings that this has not."""
    arguments = {name: value for name, value in settings.items() if value is not None}
    if arguments.pop("cache_implementation", None) == "paged":  # what led here from ``generate``
        generation_config = copy.deepcopy(generation_config)
        setattr(generation_config, "cache_implementation", None)  # noqa: B010
        arguments.pop("input_ids", None)
    for name in {"streamer", "input_ids"} & arguments.keys():
        raise refuse(name, arguments[name], "left out: inputs are lists of token ids")
    arguments |= {"input_ids": inputs, "generation_config": generation_config}
    for name in {"logits_processor", "stopping_criteria"} & arguments.keys():
        if not is_per_request(name, arguments[name]):
            arguments[name] = [list(arguments[name])] * len(inputs)
    return arguments


def batch_outputs(
    call: Call, sequences: list[Sequence], begun: float
) -> dict[str, GenerationOutput]:
    """Of what ran from ``begun`` on, by id. Of each prompt the first completions are children of
    the last, which has its id, as transformers orders them."""
    from transformers.generation.continuous_batching import requests as theirs

    outputs: dict[str, GenerationOutput] = {}
    numbers = [n for n, p in enumerate(call.params) for _ in range(p.num_return_sequences)]
    for number, sequence in zip(numbers, sequences, strict=True):
        last = sequence.params.num_return_sequences - 1
        child = "" if sequence.index == last else f"__child#{sequence.index}"
        output = theirs.GenerationOutput(
            request_id=f"req_{number}{child}",
            prompt_ids=call.prompts.each[number].ids,
            generated_tokens=sequence.generated,
            logprobs=sequence.logprobs,
            status=theirs.RequestStatus.FINISHED,
            created_time=begun,
            lifespan=(begun, time.perf_counter()),
        )
        setattr(output, "seed", sequence.params.seed)  # noqa: B010 not one of its fields
        outputs[output.request_id] = output
    return outputs
