"""Batch-wide code where not all rows of a call fit at once: those that wait are preempted and
computed again, and nobody can tell by the results.
"""

import sys
from itertools import chain

import pytest
import torch
from transformers import LogitsProcessor

from tests.drop_in.test_batch_wide import Matchers, UntilSequences, block, generate
from tests.support import signals, zoo
from tests.support.drop_in import patched
from tinyspec import EngineConfig

ROWS = zoo.prompts(5)
WIDTH = max(map(len, ROWS))
NEW = 16
ROOMY = {"reference_rows": 16, "page_size": 8}
FEW_PAGES = -(-(WIDTH + NEW) // 8) + 2
TIGHT = {
    "two places": {"max_sequences": 2},
    "one place": {"max_sequences": 1},
    "few pages": {"num_pages": FEW_PAGES},
    "a row's pages": {"num_pages": -(-(WIDTH + NEW) // 8)},
    "no prefix cache": {"max_sequences": 2, "prefix_cache": False},
    "small passes": {"num_pages": FEW_PAGES, "max_rows": 16, "reference_rows": 8},
}


def asked(model, limits, count=5, **settings):
    """What comes out, what the user's code was given, and preemptions."""
    settings = {"deterministic": True, "do_sample": True, "seed": 3} | settings
    criterion, matchers = UntilSequences(WIDTH, count), Matchers(count)
    code = {"stopping_criteria": [criterion], "logits_processor": [matchers]}
    given = settings.pop("given", block(ROWS))
    with patched(model, EngineConfig(**ROOMY | limits)):
        out = generate(model, given, output_logits=True, **settings, **code)
        engine = model.generate._engine
        assert engine.pool.num_held == 0 and not engine.admission.waiting
        assert model.generate.stats().committed > 0
        return out, criterion, matchers, model.generate.stats().preemptions


def tensors(out):
    """All that a call returned."""
    layers = [(layer.keys, layer.values) for layer in out.past_key_values.layers]
    states = out.hidden_states or ()
    return [out.sequences, *out.scores, *(out.logits or ()), *chain(*layers), *chain(*states)]


def same(one, other):
    pairs = zip(tensors(one), tensors(other), strict=True)
    return all(a.shape == b.shape and torch.equal(a, b) for a, b in pairs)


@pytest.mark.crossed(1.0)
@pytest.mark.parametrize("eos", [None, [9, 13, 54]], ids=["no eos", "eos"])
@pytest.mark.parametrize("limits", TIGHT.values(), ids=TIGHT)
def test_bits_are_those_of_rows_that_all_fit(limits, eos):
    """Tokens, scores, logits, caches and hidden states, and every value that the code saw."""
    model, more = zoo.tiny("llama"), {"eos_token_id": eos, "output_hidden_states": True}
    reference = {key: limits[key] for key in ("reference_rows",) if key in limits}
    roomy, criterion, matchers, none = asked(model, reference, **more)
    tight, *ours, preempted = asked(model, limits, **more)
    assert none == 0 and preempted > len(ROWS)
    assert same(roomy, tight)
    assert ours[0].seen == criterion.seen and ours[1].seen == matchers.seen
    assert all(map(torch.equal, ours[1].scores, matchers.scores))


def test_the_comparison_can_fail():
    """The control: other chunks and passes than canonical ones give other bits."""
    model = zoo.tiny("llama").bfloat16()
    found = {}
    for name, deterministic in (("canonical", True), ("plain", False)):
        calls = [
            asked(model, limits, deterministic=deterministic)[0]
            for limits in ({}, {"max_sequences": 2, "max_rows": 16})
        ]
        found[name] = same(*calls)
    assert found == {"canonical": True, "plain": False}


@pytest.mark.parametrize("limits", TIGHT.values(), ids=TIGHT)
def test_plain_rows_are_those_of_transformers(limits):
    model, given = zoo.tiny("llama"), block(ROWS)
    criterion, matchers = UntilSequences(WIDTH, 5), Matchers(5)
    own = generate(
        model, given, stopping_criteria=[criterion], logits_processor=[matchers], eos_token_id=9
    )
    plain = {"deterministic": False, "do_sample": False, "seed": None, "eos_token_id": 9}
    out, *ours, preempted = asked(model, limits, **plain)
    assert preempted > 0
    assert torch.equal(own.sequences, out.sequences)
    assert ours[0].seen == criterion.seen and ours[1].seen == matchers.seen
    for mine, theirs in zip(out.past_key_values.layers, own.past_key_values.layers, strict=True):
        real = block(ROWS)["attention_mask"].bool()
        keys = mine.keys.transpose(1, 2), theirs.keys.transpose(1, 2)
        assert torch.allclose(*(k[:, :WIDTH][real] for k in keys), atol=1e-4)
        assert torch.allclose(*(k[:, WIDTH:] for k in keys), atol=1e-4)


@pytest.mark.parametrize("name", ["two places", "few pages"])
def test_several_completions_of_a_prompt(name):
    model, more = zoo.tiny("llama"), {"num_return_sequences": 3, "given": block(ROWS[:2], WIDTH)}
    roomy, *_, none = asked(model, {}, count=6, **more)
    tight, *_, preempted = asked(model, TIGHT[name], count=6, **more)
    assert none == 0 and preempted > 0 and same(roomy, tight)
    assert len({tuple(row.tolist()) for row in tight.sequences}) == 6


def test_the_prefix_cache_helps():
    """A row that comes back starts from the pages that it left, where others did not need them."""
    model, rows = zoo.tiny("llama"), {}
    for cached in (False, True):
        with patched(model, EngineConfig(**ROOMY, max_sequences=2, prefix_cache=cached)):
            generate(model, block(ROWS), deterministic=True, logits_processor=[Matchers(5)])
            rows[cached] = sum(model.generate.stats().rows.values())
    assert rows[True] < rows[False] / 2


class Streamer:
    def __init__(self):
        self.tokens, self.ended = [], False

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.ended = True


def test_streamers_get_a_token_of_every_row_a_step():
    model = zoo.tiny("llama")
    streamers = [Streamer() for _ in ROWS]
    with patched(model, EngineConfig(**ROOMY, max_sequences=2)):
        out = generate(
            model,
            block(ROWS),
            deterministic=True,
            logits_processor=[Matchers(5)],
            streamer=streamers,
        )
        assert model.generate.stats().preemptions > 0
    for n, streamer in enumerate(streamers):
        assert streamer.ended and streamer.tokens[-NEW:] == out.sequences[n, -NEW:].tolist()


class AtStep(LogitsProcessor):
    """Does something in the step after ``steps`` others."""

    def __init__(self, steps, what):
        self.left, self.what = steps, what

    def __call__(self, input_ids, scores):
        self.left -= 1
        if self.left < 0:
            self.what()
        return scores


class EndsAtStep(AtStep):
    """The same as a criterion."""

    def __call__(self, input_ids, scores, **_):
        return super().__call__(input_ids, False)


class Mine(Exception):
    pass


def raises():
    raise Mine


@pytest.mark.parametrize("name", ["two places", "few pages", "a row's pages"])
@pytest.mark.parametrize(
    ("what", "error"),
    [(raises, Mine), (signals.interrupt, KeyboardInterrupt), (lambda: sys.exit(3), SystemExit)],
    ids=["raises", "ctrl-c", "exit"],
)
@pytest.mark.parametrize(
    ("place", "kind"), [("logits_processor", AtStep), ("stopping_criteria", EndsAtStep)]
)
def test_nothing_is_left_of_a_call_that_is_cut_off(place, kind, what, error, name, sigint):
    """In its first step and later ones; the next call has the bits of any other."""
    model, given = zoo.tiny("llama"), block(ROWS)
    asked_for = {"deterministic": True, "seed": 3, "do_sample": True}
    with patched(model, EngineConfig(**ROOMY | TIGHT[name])):
        before = generate(model, given, logits_processor=[Matchers(5)], **asked_for)
        for steps in (0, 5):
            with pytest.raises(error):
                generate(model, given, **asked_for, **{place: [kind(steps, what)]})
            engine = model.generate._engine
            assert engine.pool.num_held == 0 and not len(engine.admission.table)
            assert not engine.admission.waiting and not engine.has_unfinished()
        after = generate(model, given, logits_processor=[Matchers(5)], **asked_for)
        assert model.generate.stats().preemptions > 0
    assert same(before, after)


@pytest.mark.parametrize("deterministic", [False, True])
def test_weights_that_the_code_changes(deterministic):
    """Plain rows go on with what is computed anew, deterministic ones end."""
    model, given = zoo.tiny("llama"), block(ROWS)

    def negated():
        with torch.no_grad():
            model.lm_head.weight.mul_(-1)

    given |= {"logits_processor": [AtStep(4, negated)], "deterministic": deterministic}
    with patched(model, EngineConfig(**ROOMY, max_sequences=2)):
        if deterministic:
            with pytest.raises(RuntimeError, match="changed while it was running"):
                generate(model, given)
        else:
            assert generate(model, given).sequences.shape == (5, WIDTH + NEW)
        engine = model.generate._engine
        assert engine.pool.num_held == 0 and not engine.admission.waiting


@pytest.mark.parametrize("deterministic", [False, True])
def test_weights_that_change_while_rows_wait_for_others(deterministic):
    """No logits of the weights before are among the first ones that the code sees."""
    model, given, found, left = zoo.tiny("llama"), block(ROWS), [], [-1]

    def negate(module, args, output):
        left[0] -= 1
        if left[0] == 0:
            with torch.no_grad():
                module.weight.mul_(-1)

    model.lm_head.register_forward_hook(negate)
    with patched(model, EngineConfig(**ROOMY, max_sequences=1)):
        for passes in (-1, 3, -1):
            matchers, left[0] = Matchers(5), passes
            settings = {"deterministic": deterministic, "max_new_tokens": 2}
            generate(model, given, logits_processor=[matchers], **settings)
            found.append(matchers.scores[0])
    before, changed, after = found
    assert torch.allclose(before, -after, atol=1e-4)
    assert (torch.equal if deterministic else torch.allclose)(changed, after)


def test_a_row_that_can_never_fit(caplog):
    """It is handed back or refused before the first token, by the pages that it needs."""
    model, given, code = zoo.tiny("llama"), block(ROWS), {"logits_processor": [Matchers(5)]}
    limits = {"num_pages": FEW_PAGES - 3}
    own = generate(model, given, logits_processor=[Matchers(5)])
    with patched(model, EngineConfig(**ROOMY | limits)):
        with pytest.raises(NotImplementedError, match=f"rows of {FEW_PAGES - 2} pages"):
            generate(model, given, deterministic=True, **code)
        assert not code["logits_processor"][0].seen
        out = generate(model, given, **code)
        assert f"where there are {FEW_PAGES - 3}" in caplog.text
        assert model.generate.stats().committed == 0
    assert torch.equal(own.sequences, out.sequences)
