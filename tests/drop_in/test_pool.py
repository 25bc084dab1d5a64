"""The page pool behind ``model.generate``: as large as its calls need, kept, grown, given back."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from tests.support.drop_in import greedy, own, patched
from tests.support.memory import PROMPTS, generate, needed, page_bytes, pool_of, watched
from tests.support.tiny import tiny
from tinyspec import EngineConfig


@pytest.mark.parametrize("copies", [1, 3])
@pytest.mark.parametrize("count", [1, 4])
def test_the_pool_has_the_pages_that_a_call_needs(count, copies):
    prompts = PROMPTS[:count]
    with patched(tiny()) as model:
        generate(model, prompts, do_sample=True, seed=1, num_return_sequences=copies)
        pages = needed(prompts, 20, copies)
        # One page is read by probes and belongs to nobody's budget.
        assert pages <= pool_of(model)[0] <= pages + 1
        assert pool_of(model)[1] == pool_of(model)[0] * page_bytes(model)


def test_lengths_differ():
    """By rows, each with a budget of its own."""
    with patched(tiny()) as model:
        budgets = [3, 60, 9, 1]
        generate(model, PROMPTS, budgets)
        pages = sum(needed([p], n) for p, n in zip(PROMPTS, budgets, strict=True))
        assert pages <= pool_of(model)[0] <= pages + 1


def test_the_pool_stays_grows_and_keeps_its_values():
    with patched(tiny()) as model:
        engine = model.generate._engine
        first = generate(model, PROMPTS[:1], deterministic=True)
        small = pool_of(model)
        storage = engine.runner._cache.k[0].data_ptr()
        assert torch.equal(generate(model, PROMPTS[:1], deterministic=True), first)
        assert pool_of(model) == small and engine.runner._cache.k[0].data_ptr() == storage
        shorter = engine.stats().cached_prompt_tokens
        assert shorter > 0
        asked = {"return_dict_in_generate": True, "output_scores": True, "deterministic": True}
        found = generate(model, PROMPTS, 60, **asked)
        assert pool_of(model)[0] > small[0]
        # The first row started from pages that were filled before the pool grew.
        assert engine.stats().cached_prompt_tokens >= shorter + 96
        with patched(tiny()) as other:
            expected = generate(other, PROMPTS, 60, **asked)
        assert torch.equal(found.sequences, expected.sequences)
        assert all(torch.equal(*pair) for pair in zip(found.scores, expected.scores, strict=True))
        assert model.generate._engine is engine


def test_growing_takes_no_second_pool():
    """Layer by layer: at no time are all old pages there beside all new ones."""
    with patched(tiny()) as model:
        generate(model, PROMPTS[:2])
        small = pool_of(model)[1]
        watch, _ = watched(lambda: model.generate._engine.reserve(400))
        large = pool_of(model)[1]
        assert large == 400 * page_bytes(model) > small
        # Beside the new pool, what it takes to copy the kept pages of one layer.
        assert watch.most <= large + small


def test_the_pool_is_given_back():
    model = tiny()
    gc.collect()
    with patched(model):
        first = greedy(model, PROMPTS[0])
        pools = [weakref.ref(t) for t in (*model.generate._engine.runner._cache.k,)]
        model.generate.release()
        gc.collect()
        assert pool_of(model) == (0, 0)
        assert all(ref() is None for ref in pools)
        assert greedy(model, PROMPTS[0]) == first
        pools = [weakref.ref(t) for t in (*model.generate._engine.runner._cache.k,)]
        engine = weakref.ref(model.generate._engine)
    gc.collect()
    assert all(ref() is None for ref in pools)
    assert engine() is None


@pytest.mark.parametrize("how", ["raises", "interrupted", "refused"])
def test_a_failed_call_holds_nothing(how):
    def fails(ids, scores):
        raise KeyboardInterrupt if how == "interrupted" else KeyError("raised")

    with patched(tiny()) as model:
        generate(model)
        pool = model.generate._engine.pool
        before = pool_of(model)
        for _ in range(3):
            asked = {"temperature": -1.0} if how == "refused" else {"logits_processor": [[fails]]}
            with pytest.raises((KeyError, KeyboardInterrupt, ValueError)):
                generate(model, do_sample=True, **asked)
            assert pool.num_held == 0
            assert pool_of(model) == before
        assert greedy(model, PROMPTS[0]) == greedy(own(), PROMPTS[0])


def test_a_pool_of_a_fixed_size_does_not_grow():
    config = EngineConfig(reference_rows=16, page_size=8, num_pages=20)
    with patched(tiny(), config) as model:
        found = generate(model)
        assert pool_of(model)[0] == 20 < needed(PROMPTS, 20)
        longest = [greedy(own(), prompt, 20) for prompt in PROMPTS]
        assert found[:, 100:].tolist() == longest
        with pytest.raises(ValueError, match="pages"):
            generate(model, [PROMPTS[0] * 2])


def test_growth_that_fails_on_the_way(monkeypatch):
    with patched(tiny()) as model:
        generate(model, [[1, 2, 3]], 6)
        cache = model.generate._engine.runner.cache
        before = len(cache.k[0])
        new_empty, calls = torch.Tensor.new_empty, []

        def fails(self, *size, **settings):
            if self.ndim == 4:
                calls.append(size)
                if len(calls) % 2 == 0:
                    raise MemoryError
            return new_empty(self, *size, **settings)

        monkeypatch.setattr(torch.Tensor, "new_empty", fails)
        for _ in range(2):
            with pytest.raises(MemoryError):
                generate(model, PROMPTS[:3], 6)
        monkeypatch.undo()
        grown = {len(pool) for pool in (*cache.k, *cache.v)}
        assert len(grown) == 2 and min(grown) == before
        expected = [greedy(own(), prompt, 6) for prompt in PROMPTS[:3]]
        assert generate(model, PROMPTS[:3], 6)[:, -6:].tolist() == expected


def test_release_gives_the_size_back_as_well():
    with patched(tiny()) as model:
        generate(model)
        large = model.generate._engine.pool.num_pages
        model.generate.release()
        generate(model, [[1, 2, 3]])
        assert model.generate._engine.pool.num_pages < large
