"""Probes run what passes run: sinks, far bounds, contexts beyond a split, every output.

Each broken stand-in is one that a probe did not see before.
"""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.support import zoo
from tests.support.tiny import config_of, tiny
from tinyspec import Engine, EngineConfig
from tinyspec.determinism.probes import attention, model, row_functions
from tinyspec.determinism.probes.attention import LENGTH, probe_attention, probe_rows
from tinyspec.determinism.probes.model import segments
from tinyspec.determinism.probes.proof import FIRST_PASSES
from tinyspec.determinism.probes.row_functions import probe_function, probe_pool
from tinyspec.kernels import backend as kernels
from tinyspec.kernels import launch
from tinyspec.kernels.twins import attention as twin
from tinyspec.model.attention_calls import LayerShape, Reach

CONFIG = EngineConfig(reference_rows=8)
TWINS = kernels.load("torch")
AS_ON_A_GPU = replace(TWINS, backend="triton")
CPU = torch.device("cpu")


def broken(when, whole=AS_ON_A_GPU):
    """Attention of single rows is another where ``when(metadata, scores)``."""

    def attend(q, k, v, metadata, **scores):
        out = whole.paged_attention(q, k, v, metadata, **scores)
        return out * (1 + (len(q) == 1 and when(metadata, scores)))

    return replace(whole, paged_attention=attend)


def test_sinks():
    bad = broken(lambda metadata, scores: scores.get("sinks") is not None)
    for sinks in (False, True):
        shape = LayerShape(4, 2, 16, sinks=sinks)
        whole, found = (probe_rows(k, shape, torch.float32, CPU) for k in (TWINS, bad))
        assert whole and bool(found) != sinks
        assert ("sinks" in found.name) == sinks


@pytest.mark.parametrize("keys", [32, 64, 96])
def test_keys_that_are_left_out(keys, monkeypatch):
    """Calls over so many keys of a tile have other bits, unlike what was compared before use."""
    shape = LayerShape(4, 2, 64)
    monkeypatch.setattr(twin, "cut_keeps_bits", lambda *_: True)
    flash = twin.flash_attention

    def other(q, k, *args, **more):
        out, lse = flash(q, k, *args, **more)
        return out * (1 + (k.shape[2] == keys)), lse

    monkeypatch.setattr(twin, "flash_attention", other)
    assert not probe_rows(TWINS, shape, torch.float32, CPU)
    monkeypatch.setattr(twin, "cut_keeps_bits", lambda *_: False)
    assert probe_rows(TWINS, shape, torch.float32, CPU)


def test_sinks_of_a_model():
    with Engine(zoo.tiny("gpt_oss"), config=CONFIG) as engine:
        assert all(layer.sinks for layer in engine.runner.layers)
        assert all(probe_attention(engine.runner))
        engine.served.context.kernels = broken(lambda _, scores: "sinks" in scores, TWINS)
        assert not any(kind for kind in probe_attention(engine.runner) if kind.checked)
    with Engine(tiny(), config=CONFIG) as engine:
        assert not any(layer.sinks for layer in engine.runner.layers)


@pytest.mark.parametrize(
    ("name", "bound"),
    [
        ("window", 8192 + 100),
        pytest.param("chunk", LENGTH, marks=pytest.mark.slow("crosses", 1)),
    ],
)
def test_far_bounds(name, bound):
    """On a GPU before the first token, on a CPU later."""
    bad = broken(lambda metadata, scores: scores[name] > 0)
    with Engine(tiny(), config=CONFIG) as engine:
        context = engine.served.context
        layers = [layer._replace(reach=Reach(**{name: bound})) for layer in context.layers]
        context.layers[:] = layers
        near = {LENGTH: 88, 8192 + 100: 100}[bound]
        for given in (bad, replace(bad, backend="torch")):
            context.kernels = given
            unbounded, bounded = probe_attention(engine.runner)
            assert unbounded and unbounded.checked > 1000 and f"{name} {near}" in bounded.name
            assert bool(bounded.checked) == (given is bad) == (not bounded)
        context.kernels = bad
        (_, later), _ = attention.summary(probe_attention(engine.runner))
        fresh = replace(later, checked=0, differing=0)
        _, unsound = attention.compare_more(engine.runner, fresh, 1)
        assert [later.name] == [wrong.name for wrong in unsound]


FAR = [*range(LENGTH, LENGTH + 3 * 512, 7)]
FAR += [2**n + d for n in range(10, 18) for d in (0, 1, 37)]


def ends(bound: int, rows: range) -> set[tuple[int, int]]:
    """Where in a split the rows' windows of this length begin and end."""
    return {((row - bound + 1) % 512, row % 512) for row in rows if row >= bound}


def test_near_bounds_meet_the_same_boundaries():
    """Whole windows that the probe sees are whole windows of the far bound, in every launch's
    splits; of chunks as well."""
    splits = {entry.split for entry in launch._ATTENTION.values()}
    splits |= {e.split for table in launch._ATTENTION_OF.values() for e in table.values()}
    assert all(attention.SPLIT % split == 0 for split in splits)
    for bound in FAR:
        near = attention._nearer(Reach(window=bound)).window
        assert attention._nearer(Reach(chunk=bound)).chunk == near < LENGTH - 20
        assert near >= 64 and near % 512 == bound % 512
    for bound in (1000, 4096, 4096 + 37, 131072 + 1):
        near = attention._nearer(Reach(window=bound)).window
        seen = ends(near, range(LENGTH))
        assert seen and seen <= ends(bound, range(bound, bound + 512))
    # As it was, for half of all bounds.
    assert not ends(256 + 4096 % 256, range(LENGTH)) & ends(4096, range(4096, 4608))


@pytest.mark.slow("crosses", 3)
def test_far_bounds_are_compared_later_on_a_cpu(no_results_on_disk, proven_on_demand):
    """With the first further bucket."""
    with Engine(tiny(), config=CONFIG) as engine:
        context = engine.served.context
        context.layers[:] = [layer._replace(reach=Reach(window=5000)) for layer in context.layers]
        engine.contract.ensure()
        unbounded, bounded = engine.contract.results.attention
        assert unbounded.checked > 1000 and bounded.checked == 0
        results = engine.contract._prove_more([16])
        assert results.attention[1].checked > 1000 and not results.unsound
        again = engine.contract._prove_more([32])
        assert again.attention == results.attention


def test_contexts_beyond_a_split():
    """The model probe's, on a GPU."""
    split = launch.attention(torch.float32, 16, torch.device("cpu")).split
    assert max(s.position + s.end - s.first for s in segments(96, 16, 4096)) < split
    found = segments(96, 16, 4096, split)
    beyond = [s for s in found if s.position >= split]
    assert len(beyond) == 1 and len(beyond[0].pages) * 16 > split
    assert [s.end for s in found] == [*(s.first for s in found[1:]), 96]
    assert all(s.position + s.end - s.first <= 64 for s in segments(96, 16, 64, split))


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_difference_beyond_a_split(backend):
    """In the passes end to end that a first token waits for."""
    split = launch.attention(torch.float32, 16, torch.device("cpu")).split
    config = EngineConfig(reference_rows=8, max_model_len=1024)
    shape = config_of("llama")
    shape.update({"max_position_embeddings": 1024})

    def attend(q, k, v, metadata, **scores):
        out = TWINS.paged_attention(q, k, v, metadata, **scores)
        return out * (1 + (metadata.max_seqlen_q == 6 and metadata.max_seqlen_k > split))

    engine = Engine(LlamaForCausalLM(shape).eval(), config=config)
    with engine, engine.runner.torch_state():
        context = engine.served.context
        context.kernels = replace(TWINS, backend=backend)
        probe = model.ModelProbe(engine.runner, engine.config, 1)
        probe.compute_reference()
        passes = range(1, FIRST_PASSES + 1)
        assert [probe.difference(8, number) for number in passes] == [None] * FIRST_PASSES
        context.kernels = replace(TWINS, backend=backend, paged_attention=attend)
        assert any(probe.difference(8, number) for number in passes) == (backend == "triton")


# 64 outputs can cancel.
FEATURES, WIDE = 512, 64 * 64 * 3


def summed_in_halves(weight, tile):
    """Products rounded once, of whose outputs ``tile`` adds two halves in fp32 where a pass has few
    rows."""
    wide = weight.double()

    def product(x):
        out = (x.double() @ wide.T).float()
        if len(x) < 8:
            halves = zip(x.double().chunk(2, 1), wide[tile].chunk(2, 1), strict=True)
            first, second = ((a @ b.T).float() for a, b in halves)
            out[:, tile] = first + second
        return out.to(x)

    return product


@pytest.mark.slow("crosses", 1)
@pytest.mark.parametrize("number", [0, 31, 62])
def test_every_output(number, monkeypatch):
    """Of a tile of 64 outputs between two of those that every needle cancels on a CPU."""
    torch.manual_seed(0)
    weight = torch.randn(WIDE, FEATURES).bfloat16()
    first = round((WIDE - 1) / 63 * number) + 1
    product = summed_in_halves(weight, slice(first, first + 64))

    def seen() -> bool:
        pool = probe_pool(FEATURES, torch.bfloat16, "cpu", weight)
        found = probe_function(product, pool, [4, 16], reference=16)
        assert found.position
        return not found.canonical(4)

    assert not seen(), "control"
    monkeypatch.setattr(row_functions, "TILED", ("cpu",))
    assert seen()


def test_cancelled_outputs(monkeypatch):
    """On a GPU about one in 64, by needles that each cancel some."""
    torch.manual_seed(0)
    weight = torch.randn(WIDE, FEATURES)

    def cancelled() -> list[int]:
        pool = probe_pool(FEATURES, torch.float32, "cpu", weight)[::2].double()
        small = (pool @ weight.double().T).abs() < 1e-6 * (pool.abs() @ weight.double().abs().T)
        return small.any(dim=0).nonzero().flatten().tolist()

    few = cancelled()
    monkeypatch.setattr(row_functions, "TILED", ("cpu",))
    many = cancelled()
    assert 32 <= len(few) < 100 and len(many) > 2 * len(few)
    assert max(b - a for a, b in pairwise(many)) < 2 * 64 < max(b - a for a, b in pairwise(few))
