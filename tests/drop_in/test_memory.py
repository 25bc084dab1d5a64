"""Memory of a patched model: no copy of a weight; pages for what a call asks, kept, grown, given
back; and one pass."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import tinyspec
from tests.support.budget import first
from tests.support.cases import cost
from tests.support.drop_in import SMALL, greedy, own, patched, random_ids
from tests.support.memory import PROMPTS, generate, needed, page_bytes, pool_of, watched
from tests.support.tiny import FAMILIES, tiny
from tinyspec import EngineConfig
from tinyspec.model.positions import RopeTable


def large_tensors(least: int) -> set[int]:
    """Storages of ``least`` bytes and more that Python knows of."""
    gc.collect()
    found = set()
    for thing in gc.get_objects():
        if torch.Tensor in type(thing).__mro__ and thing.layout == torch.strided:
            storage = thing.untyped_storage()
            if storage.nbytes() >= least:
                found.add(storage.data_ptr())
    return found


def tables_of(model) -> set[int]:
    """Storages of the RoPE tables that stand in for the model's own rotary modules, and of the
    memory in which passes lie."""
    found = []
    for *_, module in model.generate._engine.served.swapped:
        if isinstance(module, RopeTable):
            found.append(module.tinyspec_positions)
            for made in module.tinyspec_tables.values():
                found += [made] if isinstance(made, torch.Tensor) else made
    of_passes = model.generate._engine.runner.memory.addresses
    return {*of_passes, *(table.untyped_storage().data_ptr() for table in found)}


@pytest.fixture
def only_new():
    """What is there already is out of sight of the collector, so that looking is quick."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.crossed(0.5)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", first(2, FAMILIES, 1))
def test_no_weight_is_copied(family, dtype, only_new):
    model = tiny(family, dtype)
    weights = {name: p.data_ptr() for name, p in model.named_parameters()}
    least = min(p.nbytes for p in model.parameters() if p.ndim > 1)
    before = large_tensors(least)
    assert {p.data_ptr() for p in model.parameters() if p.ndim > 1} <= before
    with patched(model):
        # As large as a small weight, and nobody's copy.
        tables = tables_of(model)
        assert large_tensors(least) - tables == before
        greedy(model, PROMPTS[0], deterministic=True)
        model.generate.release()
        assert large_tensors(least) - tables == before
        assert {name: p.data_ptr() for name, p in model.named_parameters()} == weights
    assert large_tensors(least) == before
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == weights
    kept = model.lm_head.weight.detach().clone()
    assert large_tensors(least) - before == {kept.data_ptr()}, "control"


def test_patching_takes_no_pages_and_calls_give_them_back():
    """Each call where ``release`` asks for it, else ``release()``. Control: until then they are
    kept."""
    model = tiny()
    watch, _ = watched(lambda: tinyspec.patch(model, SMALL))
    assert pool_of(model) == (0, 0)
    # RoPE's tables, and what it takes to see whether oneDNN works.
    assert watch.most < sum(p.nbytes for p in model.parameters())
    tinyspec.unpatch(model)
    gc.collect()
    assert watch.live == 0
    with patched(model, release=True):
        expected = generate(model, deterministic=True)
        assert pool_of(model)[1] == 0
    with patched(model):
        for _ in range(2):
            assert torch.equal(generate(model, deterministic=True), expected)
            assert pool_of(model)[1] > 0
            pools = [weakref.ref(t) for t in model.generate._engine.runner._cache.k]
            model.generate.release()
            gc.collect()
            assert pool_of(model) == (0, 0) and all(ref() is None for ref in pools)
        generate(model)
        pools = [weakref.ref(t) for t in model.generate._engine.runner._cache.k]
        engine = weakref.ref(model.generate._engine)
    gc.collect()
    assert all(ref() is None for ref in (*pools, engine))


@pytest.mark.parametrize("case", first(1, [(64, False), (256, True)], 5), ids=str)
def test_the_peak_of_a_call(case):
    """The pages that its requests need and one pass, and 10 % of that: nothing is there twice,
    nothing grows with the steps."""
    rows, deterministic = case
    config = EngineConfig(reference_rows=16, max_rows=rows)
    prompts = [random_ids(400, n) for n in range(4)]
    with patched(tiny(), config) as model:
        # Probes have a pool and passes of their own, once.
        greedy(model, [1, 2, 3], 2, deterministic=deterministic)
        cost(model.generate._engine)

        def peak(tokens):
            model.generate.release()
            asked = {"tokens": tokens, "deterministic": deterministic}
            watch, _ = watched(lambda: generate(model, prompts, **asked))
            assert watch.live <= pool_of(model)[1] + len(prompts) * (400 + tokens) * 8
            return watch.most + pool_of(model)[1]  # which no operator makes

        pages = needed(prompts, 4, page_size=128) * page_bytes(model, 128)
        short = peak(4)
        assert pages <= pool_of(model)[1] <= pages + page_bytes(model, 128)
        one_pass = short - pool_of(model)[1]
        assert peak(60) <= 1.1 * (pages + one_pass)
        # The pool is there by now.
        again, _ = watched(lambda: generate(model, prompts, deterministic=deterministic))
        assert again.most <= 1.5 * one_pass
        # The twins' passes, in fp32: a small multiple of transformers' own of as many rows.
        ids = torch.tensor([random_ids(rows)])
        with torch.no_grad():
            plain, _ = watched(lambda: own()(ids, use_cache=False).logits.shape)
        assert one_pass <= 5 * plain.most
