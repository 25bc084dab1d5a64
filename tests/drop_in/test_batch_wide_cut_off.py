"""Calls with batch-wide code that are cut off: nothing is left of them."""

import sys

import pytest
import torch
from transformers import LogitsProcessor

from tests.drop_in.test_batch_wide import NEW, ROWS, SMALL, Matchers, block, generate
from tests.support import signals, zoo
from tests.support.drop_in import patched
from tinyspec import EngineConfig

WIDTH = max(map(len, ROWS))


def same(one, other):
    """Whether all that two calls returned has the same bits."""
    pairs = zip((one.sequences, *one.scores), (other.sequences, *other.scores), strict=True)
    return all(map(torch.equal, *zip(*pairs, strict=True)))


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


@pytest.mark.crossed(2.0)
@pytest.mark.parametrize(
    ("what", "error"),
    [(raises, Mine), (signals.interrupt, KeyboardInterrupt), (lambda: sys.exit(3), SystemExit)],
    ids=["raises", "ctrl-c", "exit"],
)
@pytest.mark.parametrize(
    ("place", "kind"), [("logits_processor", AtStep), ("stopping_criteria", EndsAtStep)]
)
def test_nothing_is_left_of_a_call_that_is_cut_off(place, kind, what, error, sigint):
    """In its first step and later ones; the next call has the bits of any other."""
    model, given = zoo.tiny("llama"), block(ROWS)
    asked_for = {"deterministic": True, "seed": 3, "do_sample": True}
    with patched(model, SMALL):
        before = generate(model, given, logits_processor=[Matchers(5)], **asked_for)
        for steps in (0, 5):
            with pytest.raises(error):
                generate(model, given, **asked_for, **{place: [kind(steps, what)]})
            engine = model.generate._engine
            assert engine.pool.num_held == 0 and not len(engine.admission.table)
            assert not engine.admission.waiting and not engine.has_unfinished()
        after = generate(model, given, logits_processor=[Matchers(5)], **asked_for)
    assert same(before, after)


@pytest.mark.parametrize("deterministic", [False, True])
def test_weights_that_the_code_changes(deterministic):
    """Plain rows go on with what is computed anew, deterministic ones end."""
    model, given = zoo.tiny("llama"), block(ROWS)

    def negated():
        with torch.no_grad():
            model.lm_head.weight.mul_(-1)

    given |= {"logits_processor": [AtStep(4, negated)], "deterministic": deterministic}
    with patched(model, SMALL):
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
    with patched(
        model, EngineConfig(reference_rows=16, page_size=8, max_rows=16, prefix_cache=False)
    ):
        for passes in (-1, 2, -1):
            matchers, left[0] = Matchers(5), passes
            settings = {"deterministic": deterministic, "max_new_tokens": 2}
            generate(model, given, logits_processor=[matchers], **settings)
            found.append(matchers.scores[0])
    before, changed, after = found
    assert torch.allclose(before, -after, atol=1e-4)
    assert (torch.equal if deterministic else torch.allclose)(changed, after)
