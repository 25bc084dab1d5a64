"""Calls with batch-wide code whose rows take turns, cut off or refused: nothing is left of them."""

import sys

import pytest
import torch
from transformers import LogitsProcessor

from tests.drop_in.test_batch_wide import ROWS, Matchers, block, generate
from tests.drop_in.test_batch_wide_tight import FEW_PAGES, NEW, ROOMY, TIGHT, WIDTH, same
from tests.support import signals, zoo
from tests.support.drop_in import patched
from tinyspec import EngineConfig


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
        assert f"with {FEW_PAGES - 3} in all" in caplog.text
        assert model.generate.stats().committed == 0
    assert torch.equal(own.sequences, out.sequences)
