"""Attention of rows that need not be canonical: right, and nothing but the right rows take it."""

import pytest
import torch

from tests.kernels.test_twin_attention import (
    DTYPES,
    LENGTHS,
    SHAPES,
    dense,
    run,
    sdpa_error,
    sequences,
)
from tests.support.tiny import prompts, tiny
from tinyspec import Engine, EngineConfig, SamplingParams

SCORES = (
    {},
    {"window": 50},
    {"window": 140},
    {"chunk": 50},
    {"chunk": 140},
    {"softcap": 20.0},
    {"sinks": True},
)
# Rows of each length that the pass holds: prompts, parts of prompts, decode rows, two by two.
ROWS = (
    [(n, length) for n, length in enumerate(LENGTHS)],
    [(n, 1) for n in range(len(LENGTHS))],
    [(5, 300), (1, 1), (4, 3), (2, 1), (5, 40), (3, 128), (0, 1)],
    [(4, 129)],
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("scores", SCORES, ids=str)
def test_matches_reference(dtype, shape, scores):
    """Error against fp64 (2-norm) at most twice torch's own in the dtype, written out or SDPA."""
    for chosen in ROWS:
        for page_size, scattered in ((16, True), (128, True), (128, False), (256, True)):
            outs = run(dtype, shape, chosen, scores, page_size, len(chosen), scattered, exact=False)
            for out, (n, rows) in zip(outs, chosen, strict=True):
                q, k, v = sequences(dtype, shape)[n]
                exact = dense(q, k, v, torch.float64, **scores)[len(q) - rows :]
                same = (dense(q, k, v, dtype, **scores)[len(q) - rows :].double() - exact).norm()
                if rows == len(q):
                    same = max(same, sdpa_error(q, k, v, scores))
                floor = torch.finfo(dtype).eps * exact.norm()
                assert (out.double() - exact).norm() <= 2 * max(same, floor)


def test_other_bits():
    """Control: were the two the same, nothing would tell who takes which."""
    for dtype in DTYPES:
        exact, quick = (
            run(dtype, SHAPES[0], [(5, 300)], {}, exact=exact)[0] for exact in (True, False)
        )
        assert not torch.equal(exact, quick)


def test_who_takes_it(monkeypatch):
    """Passes that hold a deterministic row take it for drafts only."""
    engine = Engine(tiny(), config=EngineConfig(reference_rows=16, verify="always"))
    greedy = [SamplingParams(max_new_tokens=12, deterministic=d) for d in (False, True)]
    with engine:
        engine.generate(prompts(2), greedy)  # whatever is probed, is probed now
        seen = []
        attend = engine._runner._context.kernels.paged_attention

        def spy(*args, **kwargs):
            seen.append(args[3].exact)
            return attend(*args, **kwargs)

        kernels = engine._runner._context.kernels
        monkeypatch.setattr(
            engine._runner._context,
            "kernels",
            kernels.__class__(**{**vars(kernels), "paged_attention": spy}),
        )
        for params, expected in ((greedy[0], {False}), (greedy[1], {True, False})):
            del seen[:]
            engine.generate(prompts(2), params)
            assert set(seen) == expected
        layers = len(engine._runner._layers)
        passes = []
        run_pass = engine._runner.run

        def watch(work_pass, *args):
            del seen[:]
            out = run_pass(work_pass, *args)
            passes.append((work_pass.canonical, list(seen)))
            return out

        monkeypatch.setattr(engine._runner, "run", watch)
        engine.generate(prompts(2), greedy)
        assert {canonical for canonical, _ in passes} == {True, False}
        assert all(exact == [canonical] * layers for canonical, exact in passes)
