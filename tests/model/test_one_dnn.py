"""Prepacked weights: the bits of the weight itself, and never those of a weight that has changed.

``often``: weights of every size are prepacked at their second product.
"""

import random

import pytest
import torch
from torch import nn

from tests.support import zoo
from tests.support.budget import first
from tests.support.cases import HYBRIDS, bits_of, drain, engine_of, greedy, one_by_one, run
from tests.support.mixes import crowd, needles
from tests.support.tiny import prompts, tiny
from tinyspec import SamplingParams
from tinyspec.model import cpu_linears
from tinyspec.model import one_dnn as module
from tinyspec.model.one_dnn import PREPACKED_ROWS, REPAID, PrepackedWeights, one_dnn, works

pytestmark = pytest.mark.skipif(not works(), reason="torch has no oneDNN here")
SIZES = (512, 512), (1408, 512), (512, 1408), (97, 2048)
PLAIN = SamplingParams(max_new_tokens=24, logprobs=True, ignore_eos=True)


@pytest.fixture
def often(monkeypatch):
    """Counts products by prepacked weights."""
    monkeypatch.setattr(module, "PREPACKED_ELEMENTS", 0)
    monkeypatch.setattr(module, "REPAID", 2)
    monkeypatch.setattr(cpu_linears, "_mkl_rows", lambda elements: 0)
    calls, own = [], PrepackedWeights.product

    def product(self, x, weight, bias):
        out = own(self, x, weight, bias)
        calls.extend([] if out is None else [x.shape])
        return out

    monkeypatch.setattr(PrepackedWeights, "product", product)
    return calls


def prepacked(weight, rows=8, room=1 << 40):
    """Weights of which this one has its copy."""
    made = PrepackedWeights(lambda: room)
    x = torch.randn(rows, weight.shape[1])
    with torch.inference_mode():
        for _ in range(REPAID - 1):
            assert made.product(x, weight, None) is None
        assert torch.equal(made.product(x, weight, None), one_dnn(x, weight))
    return made


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_bits(size, bias):
    """At every number of rows that it serves, and at no other."""
    linear = nn.Linear(size[1], size[0], bias)
    made = prepacked(linear.weight)
    with torch.inference_mode():
        for rows in (*PREPACKED_ROWS[:33], *PREPACKED_ROWS[33::5], PREPACKED_ROWS[-1]):
            for x in torch.randn(2, 1, rows, size[1]):  # the first is compared
                found = made.product(x, linear.weight, linear.bias)
                assert torch.equal(found, one_dnn(x, linear.weight, linear.bias))
        for rows in (1, PREPACKED_ROWS[-1] + 1):
            assert made.product(torch.randn(rows, size[1]), linear.weight, linear.bias) is None
    assert all(made._same.values())


def written(weight):
    weight.detach().mul_(2)


def through_data(weight):
    weight.data.mul_(2)


def moved(weight):
    weight.data = weight.data * 2


@pytest.mark.parametrize("change", [written, moved, through_data], ids=lambda f: f.__name__)
def test_a_changed_weight_has_another_copy(change):
    """Control: what is written through ``.data`` is missed until it is told."""
    weight = nn.Parameter(torch.randn(512, 512))
    made, x = prepacked(weight), torch.randn(8, 512)
    before = one_dnn(x, weight).detach()
    change(weight)
    with torch.inference_mode():
        if change is through_data:
            assert torch.equal(made.product(x, weight, None), before)
            made.forget()
        found = [made.product(x, weight, None) for _ in range(REPAID)]
        assert found[:-1] == [None] * (REPAID - 1)
        assert torch.equal(found[-1], one_dnn(x, weight)) and not torch.equal(found[-1], before)


def test_what_is_not_prepacked():
    """Weights for which there is no room, that are small, or that count no writes."""
    with torch.inference_mode():
        countless = torch.randn(512, 512)
    large, small = torch.randn(512, 512), torch.randn(256, 256)
    for weight, room in ((countless, 1 << 40), (small, 1 << 40), (large, 4 * large.nbytes - 4)):
        made = PrepackedWeights(lambda room=room: room)
        with torch.inference_mode():
            x = torch.randn(8, weight.shape[1])
            assert [made.product(x, weight, None) for _ in range(2 * REPAID)] == [None] * 2 * REPAID
    made = prepacked(large, room=4 * large.nbytes)
    other = torch.randn(512, 512)  # the room is taken
    with torch.inference_mode():
        assert [made.product(x, other, None) for _ in range(2 * REPAID)] == [None] * 2 * REPAID
        made.forget()
        assert [made.product(x, other, None) for _ in range(REPAID)][-1] is not None


def test_other_bits_are_never_used(monkeypatch):
    """Control: nor are equal ones of zeros taken for a proof."""
    weight, x = torch.randn(512, 512), torch.randn(8, 512)
    made, zeros = prepacked(weight), torch.zeros(512, 512)
    monkeypatch.setattr(
        module, "one_dnn", lambda a, b, bias=None: one_dnn(a, b, bias) + 1e-6 * b.is_mkldnn
    )
    with torch.inference_mode():
        assert torch.equal(made.product(x[:4], weight, None), one_dnn(x[:4], weight))
        assert made.product(x[:4], weight, None) is None
        assert not torch.equal(made.product(x, weight, None), one_dnn(x, weight))
        known = dict(made._same)
        monkeypatch.setattr(module, "one_dnn", one_dnn)
        found = [made.product(x[:2], zeros, None) for _ in range(2 * REPAID)]
        assert found[-1].count_nonzero() == 0 and made._same == known


@pytest.mark.parametrize("kind", first(2, ["as is", *HYBRIDS], 2))
def test_an_engine_has_the_bits_of_one_without(kind, often, monkeypatch):
    """Alone and in a crowd; and nothing is held when no request is left."""
    requests = [*needles()[::2], *crowd(random.Random(0), 8)]
    model = zoo.tiny(HYBRIDS[kind]) if kind in HYBRIDS else tiny()
    with engine_of(model, max_rows=64) as engine:
        found = bits_of(run(engine, requests))[: len(needles()[::2])]
        assert often and not engine.runner.prepacked._uses
        alone = one_by_one(engine, needles()[::2])
        del often[:]
        monkeypatch.setattr(module, "PREPACKED_ROWS", ())
        without = one_by_one(engine, needles()[::2])
    assert found == alone == without and not often


@pytest.mark.parametrize("params", [PLAIN, greedy(24)], ids=["plain", "deterministic"])
def test_writes_through_data_between_calls(often, params):
    """They are seen by every pass of the next call: no copy outlives the requests of one."""
    model, asked = tiny(), prompts(5)
    settings = {"prefix_cache": False, "verify_weights": params.deterministic}
    with engine_of(model, **settings) as engine:
        before = bits_of(engine.generate(asked, params))
        assert often
        model.lm_head.weight.data.mul_(1.5)
        model.model.layers[0].mlp.up_proj.weight.data.mul_(1.5)
        after = bits_of(engine.generate(asked, params))
        with engine_of(model, **settings) as other:
            assert after == bits_of(other.generate(asked, params)) != before


def test_writes_through_data_that_are_told(often, monkeypatch):
    """While requests run. Control: untold, they are missed."""
    found = {}
    for way in ("told", "untold", "without"):
        model = tiny()
        if way == "without":
            monkeypatch.setattr(module, "PREPACKED_ROWS", ())
        with engine_of(model, prefix_cache=False) as engine:
            names = [engine.add_request(prompt, PLAIN) for prompt in prompts(5)]
            for _ in range(8):
                engine.step()
            assert bool(engine.runner.prepacked._uses) == (way != "without")
            model.lm_head.weight.data.neg_()
            if way != "untold":
                engine.weights_changed()
            done = drain(engine)
            found[way] = [done[name].completions[0].token_ids for name in names]
    assert found["told"] == found["without"] != found["untold"]
