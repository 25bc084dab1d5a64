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
from tinyspec.model.one_dnn import COPIED_ROWS, REPAID, PrepackedWeights, one_dnn, serves

pytestmark = pytest.mark.skipif(not serves(torch.float32), reason="torch has no oneDNN here")
SIZES = (512, 512), (1408, 512), (512, 1408), (97, 2048)
DTYPES = [dtype for dtype in module.DTYPES if serves(dtype)]
ROWS = (*range(2, 35), 48, 64, 100, COPIED_ROWS)
PLAIN = SamplingParams(max_new_tokens=24, logprobs=True, ignore_eos=True)


@pytest.fixture
def often(monkeypatch):
    """Counts products by prepacked weights, by whether they have to be exact."""
    monkeypatch.setattr(cpu_linears, "SMALL_ELEMENTS", 0)
    monkeypatch.setattr(module, "REPAID", 2)
    monkeypatch.setattr(cpu_linears, "few_rows", lambda threads: 0)
    calls, whole, own = [], PrepackedWeights.product, one_dnn

    def product(self, x, weight, bias, exact):
        def counted(x, weight, bias):
            calls.extend([exact] if weight.is_mkldnn else [])
            return own(x, weight, bias)

        with monkeypatch.context() as patches:
            patches.setattr(module, "one_dnn", counted)
            return whole(self, x, weight, bias, exact)

    monkeypatch.setattr(PrepackedWeights, "product", product)
    return calls


def laid_out(weight, room=1 << 40):
    """Weights of which this one has its copy, if there is room."""
    made = PrepackedWeights(lambda: room)
    made.proven = ROWS
    x = torch.randn(8, weight.shape[1], dtype=weight.dtype)
    with torch.inference_mode():
        for _ in range(REPAID):
            assert not copies(made)
            assert torch.equal(made.product(x, weight, None, True), one_dnn(x, weight))
    return made


def copies(made):
    return [use.copy for use in made._uses.values() if use.copy is not None]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits(dtype, size, bias):
    """At every number of rows. One row in fp32 is none that is proven: copies have other bits."""
    linear = nn.Linear(size[1], size[0], bias, dtype=dtype)
    made = laid_out(linear.weight)
    assert len(copies(made)) == 1 and made.most_bytes == linear.weight.nbytes
    with torch.inference_mode():
        for rows in ROWS:
            x = torch.randn(1, rows, size[1], dtype=dtype)
            own = one_dnn(x, linear.weight, linear.bias)
            for exact in (True, False):
                assert torch.equal(made.product(x, linear.weight, linear.bias, exact), own)
            assert made.keeps_bits(x, linear.weight, linear.bias)
        x = torch.randn(1, 1, size[1], dtype=dtype)
        own = one_dnn(x, linear.weight, linear.bias)
        assert torch.equal(made.product(x, linear.weight, linear.bias, True), own)


def test_large_passes_have_no_copies():
    weight = torch.randn(512, 512)
    made, x = PrepackedWeights(lambda: 1 << 40), torch.randn(COPIED_ROWS + 1, 512)
    for _ in range(2 * REPAID):
        assert torch.equal(made.product(x, weight, None, False), one_dnn(x, weight))
    assert not made._uses


def test_exact_passes_use_copies_of_proven_row_counts_alone():
    weight, x = torch.randn(512, 512), torch.randn(8, 512)
    made = laid_out(weight)
    (use,) = made._uses.values()
    use.copy = module.prepacked(2 * weight)
    with torch.inference_mode():
        own, other = one_dnn(x, weight), one_dnn(x, 2 * weight)
        for proven in (ROWS, ()):
            made.proven = proven
            assert torch.equal(made.product(x, weight, None, True), other if proven else own)
            assert torch.equal(made.product(x, weight, None, False), other)


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
    made, x = laid_out(weight), torch.randn(8, 512)
    before = one_dnn(x, weight).detach()
    change(weight)
    with torch.inference_mode():
        own = one_dnn(x, weight)
        assert not torch.equal(own, before)
        if change is through_data:
            assert torch.equal(made.product(x, weight, None, True), before)
            made.forget()
        for _ in range(2 * REPAID):
            assert torch.equal(made.product(x, weight, None, True), own)
        assert len(copies(made)) == 1


def test_what_is_not_prepacked():
    """Weights for which there is no room, or that count no writes: the products are the same."""
    with torch.inference_mode():
        countless = torch.randn(512, 512)
    large, other = torch.randn(512, 512), torch.randn(512, 512)
    x = torch.randn(8, 512)
    for weight, room in ((countless, 1 << 40), (large, 4 * large.nbytes - 4)):
        made = PrepackedWeights(lambda room=room: room)
        with torch.inference_mode():
            for _ in range(2 * REPAID):
                assert torch.equal(made.product(x, weight, None, False), one_dnn(x, weight))
        assert not copies(made) and made.most_bytes == 0
        assert made.keeps_bits(x, weight, None) == (weight is countless)
    made = laid_out(large, room=4 * large.nbytes)
    with torch.inference_mode():  # the room is taken
        for _ in range(2 * REPAID):
            made.product(x, other, None, False)
        assert len(copies(made)) == 1
        made.forget()
        for _ in range(REPAID):
            made.product(x, other, None, False)
        assert len(copies(made)) == 1 and made.most_bytes == large.nbytes


def test_copies_of_other_bits_are_used_by_no_exact_pass(often, monkeypatch, no_results_on_disk):
    """The proof compares one of every shape. Control: where they have the same bits, exact passes
    use them."""
    found, whole = [], module.prepacked
    for name, copied in (("same", whole), ("other", lambda weight: whole(weight * (1 + 1e-6)))):
        monkeypatch.setattr(module, "prepacked", copied)
        with engine_of(tiny(), max_rows=64) as engine:
            results = engine.contract.probe(fresh=True)
            assert len(results.canonical) > 6
            assert results.copied == (results.canonical if name == "same" else [])
            del often[:]
            found.append(bits_of(run(engine, [*needles()[::2], *crowd(random.Random(0), 8)])))
            assert (True in often) == (name == "same") and False in often
            assert engine.stats().prepacked_bytes > 0
    assert found[0][: len(needles()[::2])] == found[1][: len(needles()[::2])]


@pytest.mark.parametrize("kind", first(2, ["as is", *HYBRIDS], 2))
def test_an_engine_has_the_bits_of_one_without(kind, often):
    """Alone and in a crowd; and nothing is held when no request is left."""
    requests = [*needles()[::2], *crowd(random.Random(0), 8)]
    model = zoo.tiny(HYBRIDS[kind]) if kind in HYBRIDS else tiny()
    with engine_of(model, max_rows=64) as engine:
        found = bits_of(run(engine, requests))[: len(needles()[::2])]
        assert True in often and not engine.runner.prepacked._uses
        own = one_by_one(engine, needles()[::2])
    del often[:]
    with engine_of(model, max_rows=64, prepack="never") as engine:
        assert found == own == one_by_one(engine, needles()[::2])
        assert not often and engine.stats().prepacked_bytes == 0


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


def test_writes_through_data_that_are_told(often):
    """While requests run. Control: untold, they are missed."""
    found = {}
    for way in ("told", "untold", "without"):
        model = tiny()
        prepack = "never" if way == "without" else "auto"
        with engine_of(model, prefix_cache=False, prepack=prepack) as engine:
            names = [engine.add_request(prompt, PLAIN) for prompt in prompts(5)]
            for _ in range(8):
                engine.step()
            assert bool(copies(engine.runner.prepacked)) == (way != "without")
            model.lm_head.weight.data.neg_()
            if way != "untold":
                engine.weights_changed()
            done = drain(engine)
            found[way] = [done[name].completions[0].token_ids for name in names]
    assert found["told"] == found["without"] != found["untold"]
