"""Processors and criteria written for a batch see and give what they do in transformers. What they
raise: tests/drop_in/test_streamers.py."""

import copy
import random
from dataclasses import replace

import pytest
import torch
from transformers import LogitsProcessor, StoppingCriteria

from tests.support import zoo
from tests.support.drop_in import PAD, SMALL, patched
from tests.support.hooks import AttentionRecorder

NEW = 16
ROWS = zoo.prompts(5)
ENDS = {5, 17, 33, 40, 21}


class UntilSequences(StoppingCriteria):
    """As evaluation harnesses end rows: one tracker a row, behind the padded prompts' length."""

    def __init__(self, width, rows):
        self.width, self.done, self.seen = width, [False] * rows, []

    def __call__(self, input_ids, scores, **_):
        self.seen.append((input_ids.tolist(), input_ids.dtype, [s.shape for s in scores]))
        for n, tokens in enumerate(input_ids[:, self.width :].tolist()):
            self.done[n] = self.done[n] or bool(ENDS & set(tokens[2:]))
        return torch.tensor(self.done)


class Matchers(LogitsProcessor):
    """As grammars exclude tokens: one matcher a row, moved on once a step."""

    def __init__(self, rows):
        self.states, self.seen, self.scores = [0] * rows, [], []

    def __call__(self, input_ids, scores):
        self.seen.append(input_ids.tolist())
        self.scores.append(scores.clone())
        for n, tokens in enumerate(input_ids.tolist()):
            self.states[n] = (3 * self.states[n] + tokens[-1]) % 7
            scores[n, self.states[n] :: 7] = -torch.inf
        return scores


def block(rows, width=None):
    width = width or max(map(len, rows))
    ids = torch.tensor([[PAD] * (width - len(row)) + row for row in rows])
    return {"input_ids": ids, "attention_mask": (ids != PAD).long()}


def generate(model, given, **settings):
    settings = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": PAD} | settings
    return model.generate(**given, return_dict_in_generate=True, output_scores=True, **settings)


@pytest.mark.crossed(0.7)
@pytest.mark.parametrize("eos", [None, [9, 13, 54]], ids=["no eos", "eos"])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_as_in_transformers(count, eos):
    """Ids and scores that the code sees, finished rows included, and what comes out."""
    own = zoo.tiny("llama")
    width = max(map(len, ROWS[:count])) + (count == 1)
    given, found = block(ROWS[:count], width), []
    with patched(copy.deepcopy(own), SMALL) as model:
        for each in (own, model):
            criterion, matchers = UntilSequences(width, count), Matchers(count)
            code = {"stopping_criteria": [criterion], "logits_processor": [matchers]}
            found.append((generate(each, given, eos_token_id=eos, **code), criterion, matchers))
        assert model.generate.stats().committed > 0
    (theirs, *judged), (ours, *called) = found
    assert torch.equal(ours.sequences, theirs.sequences)
    assert [one.seen for one in called] == [one.seen for one in judged]
    scores = zip(
        (*called[1].scores, *ours.scores), (*judged[1].scores, *theirs.scores), strict=True
    )
    assert all(torch.allclose(mine, expected, atol=1e-4) for mine, expected in scores)


class RowWise(LogitsProcessor):
    """Row i's answer from row i alone."""

    def __call__(self, input_ids, scores):
        return scores.scatter(1, input_ids[:, -1:] % 60 + 2, -5.0)


class OfOthers(LogitsProcessor):
    """Every row's answer from all rows."""

    def __call__(self, input_ids, scores):
        return scores.index_fill(1, input_ids[:, -1] % 60 + 2, -5.0)


@pytest.mark.parametrize(("kind", "kept"), [(RowWise, True), (OfOthers, False)])
def test_rows_keep_their_bits_whatever_the_others_are(kind, kept):
    """At an equal number of rows and an equal length; the control is code that reads others."""
    model, width, rng = zoo.tiny("llama"), max(map(len, ROWS)), random.Random(0)
    found = []
    with patched(model, SMALL):
        for place in (0, 4, 2):
            rows = [[rng.randrange(2, 60) for _ in range(rng.randint(3, width))] for _ in ROWS]
            rows[place], seeds = ROWS[0], list(range(len(rows)))
            seeds[place] = 7
            asked = {"deterministic": True, "do_sample": True, "seed": seeds}
            out = generate(model, block(rows, width), logits_processor=[kind()], **asked)
            scores = torch.stack([step[place] for step in out.scores])
            found.append(torch.cat([out.sequences[place].float(), scores.flatten()]))
    equal = [torch.equal(found[0], other) for other in found[1:]]
    assert all(equal) if kept else not all(equal)


def test_more_rows_than_a_canonical_pass_and_called_once_a_step():
    """Deterministic rows wait for each other over several passes; nothing is called for a draft,
    and a streamer gets a token of its row a step."""
    model = zoo.tiny("llama")
    rows = [row[:17] for row in zoo.prompts(24)]
    given, matchers, streamers = block(rows), Matchers(24), [AttentionRecorder() for _ in rows]
    with patched(model, SMALL):
        code = {"logits_processor": [matchers], "streamer": streamers}
        out = generate(model, given, deterministic=True, **code)
        few = generate(model, given, deterministic=True, logits_processor=[Matchers(24)])
    assert [len(ids[0]) for ids in matchers.seen] == list(range(17, 17 + NEW))
    assert matchers.seen[-1] == out.sequences[:, :-1].tolist()
    assert torch.equal(out.sequences, few.sequences)
    for streamer, made in zip(streamers, out.sequences[:, -NEW:].tolist(), strict=True):
        assert streamer.puts[-1] == "end" and streamer.tokens[-NEW:] == made


class Alone(Matchers):
    """Refuses to be called for several rows."""

    def __call__(self, input_ids, scores):
        assert input_ids.shape[0] == 1 and input_ids[0, 0] != PAD
        return super().__call__(input_ids, scores)


def test_a_list_for_each_prompt_and_stateless_code_see_one_row():
    model, given = zoo.tiny("llama"), block(ROWS)
    with patched(model, SMALL):
        each = [[Alone(1)] for _ in ROWS]
        out = generate(model, given, logits_processor=each)
        assert all(processor.seen for (processor,) in each)
        alone = generate(model, {"input_ids": [ROWS[1]]}, logits_processor=[Alone(1)])
        assert torch.equal(out.sequences[1, -NEW:], alone.sequences[0, -NEW:])
        stateless = Alone(1)
        stateless.stateless = True  # it says so itself
        generate(model, given, logits_processor=[stateless])
        with pytest.raises(AssertionError):
            generate(model, given, logits_processor=[Alone(1)])


def misshapen(ids, scores):
    return torch.zeros(3, dtype=torch.bool) if scores is None else scores[:2]


REFUSED = {
    "^deterministic": {"deterministic": [True, *[False] * 4]},
    r"^max_new_tokens=.*one value": {"max_new_tokens": [1, 2, 3, 4, 5]},
    r"max_new_tokens=.*one value": {"max_length": [66, 67, 67, 67, 67], "max_new_tokens": None},
}


def test_refusals_by_name_and_lengths_by_default():
    model, given = zoo.tiny("llama"), block(ROWS, 64)
    asked = {"max_new_tokens": None, "pad_token_id": PAD}
    own = model.generate(**given, **asked, logits_processor=[Matchers(5)])
    with patched(model, SMALL):
        for message, wrong in REFUSED.items():
            with pytest.raises(ValueError, match=message):
                generate(model, given, logits_processor=[RowWise()], **wrong)
        assert model.generate.stats().committed == 0
        with pytest.raises(ValueError, match="scores of shape"):
            generate(model, given, logits_processor=[misshapen])
        with pytest.raises(ValueError, match=r"shape \(3,\) for 5 rows"):
            model.generate(**given, max_new_tokens=2, stopping_criteria=[misshapen])
        assert torch.equal(model.generate(**given, **asked, logits_processor=[Matchers(5)]), own)


PAGES = -(-(max(map(len, ROWS)) + NEW) // 8)
TIGHT = {
    "places": ({"max_sequences": 4}, "max_sequences=4"),
    "pages": ({"num_pages": 3 * PAGES}, f"{3 * PAGES} pages"),
    "a row's pages": ({"num_pages": PAGES - 1}, f"{PAGES - 1} pages"),
}


@pytest.mark.parametrize(("limits", "named"), TIGHT.values(), ids=TIGHT)
def test_rows_that_do_not_all_fit(limits, named, caplog):
    """They are handed back, or refused where they are deterministic, before the first token."""
    model, given, code = zoo.tiny("llama"), block(ROWS), {"logits_processor": [Matchers(5)]}
    own = generate(model, given, logits_processor=[Matchers(5)])
    with patched(model, replace(SMALL, **limits)):
        with pytest.raises(NotImplementedError, match=rf"all of 5 rows .*{named}"):
            generate(model, given, deterministic=True, **code)
        assert not code["logits_processor"][0].seen
        out = generate(model, given, **code)
        assert named in caplog.text and model.generate.stats().committed == 0
    assert torch.equal(own.sequences, out.sequences)
    with patched(model, replace(SMALL, max_sequences=5)):
        generate(model, given, deterministic=True, logits_processor=[Matchers(5)])
        assert model.generate.stats().committed == 5 * NEW


def test_weights_that_change_while_rows_wait_for_others():
    """No logits of the weights before are among the first ones that the code of deterministic rows
    sees."""
    model, given, found, left = zoo.tiny("llama"), block(ROWS), [], [-1]

    def negate(module, args, output):
        left[0] -= 1
        if left[0] == 0:
            with torch.no_grad():
                module.weight.mul_(-1)

    model.lm_head.register_forward_hook(negate)
    with patched(model, replace(SMALL, max_rows=16, prefix_cache=False)):
        for passes in (-1, 2, -1):
            matchers, left[0] = Matchers(5), passes
            settings = {"deterministic": True, "max_new_tokens": 2}
            generate(model, given, logits_processor=[matchers], **settings)
            found.append(matchers.scores[0])
    before, changed, after = found
    assert torch.allclose(before, -after, atol=1e-4)
    assert torch.equal(changed, after)
