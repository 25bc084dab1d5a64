"""Attention of a row alone and in its prompt: head sizes, softcaps, and a probe that tells; what
the other probes see. Each broken stand-in is one that a probe did not see before."""

import re
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.support import zoo
from tests.support.budget import first
from tests.support.tiny import config_of, tiny
from tinyspec import Engine, EngineConfig
from tinyspec.determinism import attention_probe, rows
from tinyspec.determinism.attention_probe import (
    LENGTH,
    MANY_ROWS,
    AttentionKind,
    attention_kinds,
    compare_attention,
)
from tinyspec.determinism.model_probe import ModelProbe
from tinyspec.determinism.proof import FIRST_PASSES, Prober, Subject
from tinyspec.determinism.rows import agree, keeps_places, probe_pool
from tinyspec.errors import UnsupportedModelError
from tinyspec.kernels import backend as kernels
from tinyspec.kernels import launch
from tinyspec.kernels.twins import attention as twin
from tinyspec.kernels.twins import attention_plan
from tinyspec.kernels.twins.attention import flash_attention
from tinyspec.kernels.twins.attention_plan import CausalMask
from tinyspec.model.attention import LayerShape
from tinyspec.model.linears import linear_shape
from tinyspec.model.positions import RopeTable
from tinyspec.model.recurrent import RecurrentLayer
from tinyspec.model.scratch_weights import ScratchModel
from tinyspec.model.supported import SERVED

TWINS = kernels.load("torch")
CONFIG = EngineConfig(reference_rows=8)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


# Query heads, KV heads and head size, in groups that are no power of two: Llama 3.2 3B, Qwen2 0.5B,
# 1.5B and 7B, and others.
ODD_GROUPS = (
    *((24, 8, 128), (14, 2, 64), (12, 2, 128), (28, 4, 128), (40, 8, 128)),
    *((3, 1, 96), (9, 1, 128), (6, 2, 112), (15, 5, 80), (11, 1, 72), (13, 1, 40), (10, 2, 256)),
    *((6, 1, 48), (7, 1, 144), (21, 3, 64), (25, 5, 16), (36, 3, 80), (18, 1, 32)),
)
EVEN_GROUPS = ((8, 2, 128), (4, 4, 64), (8, 1, 256), (16, 1, 80))


def probe(dtype, dim, softcap=0.0, heads=(8, 2), kernels=TWINS, **more):
    """One kind of calls, by one round or more."""
    shape = LayerShape(*heads, dim, softcap, sinks=more.pop("sinks", False))
    kind = AttentionKind(shape, CausalMask())
    runner = {"kernels": kernels, "dtype": dtype, "kv_dtype": more.pop("kv_dtype", dtype)}
    runner = SimpleNamespace(**runner, device=torch.device("cpu"))
    (found,) = compare_attention(runner, [kind], **more)
    return found


def of_engine(engine):
    """One round of every kind of a model's calls, by the kernels that its passes call."""
    return compare_attention(engine.runner, attention_kinds(engine.runner))


def broken(when, whole=TWINS):
    """Attention of single rows is another where ``when(scores)``."""

    def attend(q, k, v, metadata, **scores):
        out = whole.paged_attention(q, k, v, metadata, **scores)
        return out * (1 + (len(q) == 1 and when(scores)))

    return replace(whole, paged_attention=attend)


WIDTHS = [(8, 2, dim) for dim in (16, 40, 72, 80, 112, 128, 256)]


@pytest.mark.crossed(0.5)
@pytest.mark.parametrize("softcap", [0.0, 50.0])
@pytest.mark.parametrize("heads", first(10, (*WIDTHS, *ODD_GROUPS), 0.5), ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_alone_and_in_their_prompt(dtype, heads, softcap):
    found = probe(dtype, heads[2], softcap, heads[:2])
    assert found and found.checked > 1000


def rest_of_a_cut_differs():
    """Whether torch gives rows of a block of 4, behind 32 others, other bits here than among 32."""
    for _ in range(300):
        row, k, v = (torch.randn(1, 1, n, 96) for n in (1, 128, 128))
        out, _ = flash_attention(row.expand(1, 1, 36, 96).contiguous(), k, v, 0.0)
        if not torch.equal(out, out[:, :, :1].expand_as(out)):
            return True
    return False


def test_control_other_heights(monkeypatch):
    """As it was: 12 rows of three heads were cut into 32 query rows and 4."""
    monkeypatch.setattr(
        attention_plan,
        "padded_queries",
        lambda rows, group, least: -(-max(rows * group, least) // 12) * 12,
    )
    found = probe(torch.float32, 96, heads=(3, 1))
    assert bool(found) is not rest_of_a_cut_differs()
    assert found.differing < found.checked / 10


@pytest.mark.slow("crosses", 10)
@pytest.mark.parametrize("heads", [*ODD_GROUPS, *EVEN_GROUPS], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_rows(dtype, heads):
    """A difference in one row of 10,000 shows with 99 %."""
    found = probe(dtype, heads[2], heads=heads[:2], rows=MANY_ROWS)
    assert found and found.checked >= 50_000


def test_one_row_of_many_is_found():
    """More rows find what few do not, and the result says how many it took."""
    calls = []

    def rarely(q, *args, **kwargs):
        out = TWINS.paged_attention(q, *args, **kwargs)
        calls.append(len(out))
        if sum(calls) > 30_000 and len(calls) % 50 == 49:
            out[-1, 0, 0] += 1
        return out

    small = partial(
        probe, torch.float32, 16, heads=(2, 1), kernels=replace(TWINS, paged_attention=rarely)
    )
    few = small()
    assert few and few.checked < 10_000
    del calls[:]
    many = small(rows=MANY_ROWS)
    assert many.checked >= MANY_ROWS and 0 < many.differing < 20


def shows(*call):
    """A probe of these calls finds rows that differ; or random rows do not differ either, as on a
    CPU that multiplies few and many alike."""
    if not probe(*call):
        return
    dtype, dim, softcap, heads = call
    q, k, v = (torch.randn(2, 128, n, dim).to(dtype) for n in (heads[0], *heads[1:] * 2))

    def attend(first, end):
        metadata = kernels.AttentionMetadata.of([(first, end)], [range(2)], 128, q.device)
        scores = {"scale": dim**-0.5, "softcap": softcap}
        return TWINS.paged_attention(q.flatten(0, 1)[first:end], k, v, metadata, **scores)

    prompt = attend(0, 256)
    assert all(torch.equal(attend(n, n + 1)[0], prompt[n]) for n in range(256))
    pytest.skip("few and many rows are alike on this CPU")


@pytest.mark.parametrize("dim", [80, 112, 144])
def test_control_head_sizes_as_they_are(dim, monkeypatch):
    monkeypatch.setattr(twin, "HEAD_UNIT", 1)
    shows(torch.bfloat16, dim, 0.0, (8, 2))


@pytest.mark.parametrize(("dtype", "softcap"), [(torch.float32, 0.0), (torch.bfloat16, 50.0)])
def test_control_few_rows_of_a_wide_head(dtype, softcap, monkeypatch):
    monkeypatch.setattr(twin, "_least_rows", lambda q, softcap: 4)
    shows(dtype, 256, softcap, (8, 1))


@pytest.mark.parametrize("name", ["softcap", "sinks"])
def test_an_engine_probes_what_its_calls_have(name):
    model = tiny("gemma2", torch.bfloat16) if name == "softcap" else zoo.tiny("gpt_oss")
    with Engine(model, config=CONFIG) as engine:
        assert all(getattr(layer, name) for layer in engine.runner.layers)
        assert all(of_engine(engine))
        engine.served.context.kernels = broken(lambda scores: scores.get(name, 0) is not None)
        found = of_engine(engine)
        assert found and not any(found) and all(name in kind.name for kind in found)
    shape = (torch.float32, 16, 0.0, (4, 2), broken(lambda scores: "sinks" in scores))
    assert probe(*shape) and not probe(*shape, sinks=True)


FAR_AND_NEAR = [("window", 8192 + 100, "window 100"), ("chunk", LENGTH, "chunk 88")]


@pytest.mark.parametrize("case", first(1, FAR_AND_NEAR, 1), ids=str)
def test_far_bounds(case, no_results_on_disk, proven_on_demand):
    """Before the first token on a GPU, with the first further bucket on a CPU."""
    name, bound, near = case
    with Engine(tiny(), config=CONFIG) as engine:
        context = engine.served.context
        context.layers[:] = [
            replace(layer, reach=CausalMask(**{name: bound})) for layer in context.layers
        ]
        engine.contract.ensure()
        (unbounded,) = engine.contract.results.attention
        unknown, bounded = attention_kinds(engine.runner)
        assert unbounded.name == unknown.name and near in bounded.name
        context.kernels = broken(lambda scores: scores[name] > 0)
        results = engine.contract.prove_more([16])
        assert [kind.differing > 0 for kind in results.attention] == [False, True]
        assert [wrong.name for wrong in results.unsound] == [bounded.name]


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
    assert all(attention_probe.SPLIT % split == 0 for split in splits)
    for bound in FAR:
        near = attention_probe.nearer(CausalMask(window=bound)).window
        assert attention_probe.nearer(CausalMask(chunk=bound)).chunk == near < LENGTH - 20
        assert near >= 64 and near % 512 == bound % 512
    for bound in (1000, 4096, 4096 + 37, 131072 + 1):
        near = attention_probe.nearer(CausalMask(window=bound)).window
        seen = ends(near, range(LENGTH))
        assert seen and seen <= ends(bound, range(bound, bound + 512))
    # As it was, for half of all bounds.
    assert not ends(256 + 4096 % 256, range(LENGTH)) & ends(4096, range(4096, 4608))


# Probes run what passes run: contexts beyond a split, every output.


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_difference_beyond_a_split(backend):
    """In the passes end to end that a first token waits for."""
    split = launch.attention(torch.float32, 16, torch.device("cpu")).split
    config = EngineConfig(reference_rows=8, max_model_len=1024)
    shape = config_of("llama")
    shape.update({"max_position_embeddings": 1024})

    def attend(q, k, v, metadata, **scores):
        out = TWINS.paged_attention(q, k, v, metadata, **scores)
        count, tokens = metadata.cu_seqlens_q.diff().max(), metadata.seq_lens.max()
        return out * (1 + bool(count == 6 and tokens > split))

    engine = Engine(LlamaForCausalLM(shape).eval(), config=config)
    with engine, engine.runner.torch_state():
        context = engine.served.context
        context.kernels = replace(TWINS, backend=backend)
        probe = ModelProbe(engine.runner)
        probe.compute_reference(nullcontext())
        passes = range(1, FIRST_PASSES + 1)
        assert probe.difference(8, passes) is None
        context.kernels = replace(TWINS, backend=backend, paged_attention=attend)
        assert bool(probe.difference(8, passes)) == (backend == "triton")


@pytest.mark.parametrize(
    ("kind", "kv_dtype"),
    [("mamba2", "auto"), *product(("qwen3_5_text", "lfm2"), ("auto", "fp8_e4m3"))],
)
def test_every_row_is_compared(kind, kv_dtype):
    """Gates are numbers of fp32 whatever the model's dtype: read as codes of 8 bits most rows would
    have a NaN, and be left out."""
    model, config = zoo.tiny(kind).bfloat16(), EngineConfig(reference_rows=16, kv_dtype=kv_dtype)
    scratch = ScratchModel(model)
    with Engine(model, config=config) as engine, engine.runner.torch_state(), scratch.in_place():
        probe = ModelProbe(engine.runner)
        probe.compute_reference(nullcontext())
        assert probe.sound.all() and len(probe.sound) == probe.distinct


ROUTED = ("gpt_oss", "mixtral", "llama4_text")
# Serves no deterministic requests: its experts, which have no gates, are not probed.
PLAIN = ("nemotron_h",)
OTHERS = sorted(SERVED & set(zoo.BUILT) - set(ROUTED) - set(PLAIN))
# Of rows alone: Gemma 3n's mix of copies; a state's products; a frequency times a position.
NO_WEIGHTS = {("gemma3n_text", "matmul")}
WITHOUT = (RecurrentLayer, RopeTable)
# Their own forwards fail under autocast, and are refused there.
NO_AUTOCAST = ("dbrx", "xmod")


@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize("kind", first(3, (*ROUTED, *OTHERS), 1))
def test_every_product_with_weights(kind, cast):
    """Is probed by itself, and what routers make of one. Recorded while scratch weights stand for
    the model's own: these are what parameters are known by, also where a pass casts them."""
    fails = cast and kind in NO_AUTOCAST
    refused = pytest.raises(UnsupportedModelError, match=r"dtype|scalar type")
    with torch.autocast("cpu", torch.bfloat16, enabled=cast), refused if fails else nullcontext():
        engine = Engine(zoo.tiny(kind))
    if fails:
        return
    with engine, engine.runner.torch_state():
        prober = Prober(Subject(engine.runner, engine.contract.modes, {}, Mock()))
        with prober.scratch.in_place():
            recorder = prober.prepare()
        modules = dict(engine.runner.model.named_modules())
        others = {name for name, module in modules.items() if isinstance(module, WITHOUT)}
        others |= {name for name, module in modules.items() if linear_shape(module) is not None}
    probed = {re.sub(r"\d+", "", name.partition(" of ")[0]) for name in prober.ops}
    outside = {
        (module, operator)
        for module, operator, *_ in recorder.matmuls
        if module not in others and (kind, operator) not in NO_WEIGHTS
    }
    assert {re.sub(r"\d+", "", f"{module}: {operator}") for module, operator in outside} <= probed
    if kind in ROUTED:
        assert outside and any(name.endswith((": softmax", ": sigmoid")) for name in probed)


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


@pytest.mark.parametrize("number", first(1, (31, 0, 62), 1))
def test_every_output(number, monkeypatch):
    """Of a tile of 64 outputs between two of those that every needle cancels on a CPU."""
    torch.manual_seed(0)
    weight = torch.randn(WIDE, FEATURES).bfloat16()
    first = round((WIDE - 1) / 63 * number) + 1
    product = summed_in_halves(weight, slice(first, first + 64))

    def seen() -> bool:
        pool = probe_pool(FEATURES, torch.bfloat16, "cpu", weight)
        assert keeps_places(product, [pool], 16)
        return not agree(product, [pool], 4, 16)

    assert not seen(), "control"
    monkeypatch.setattr(rows, "TILED", ("cpu",))
    assert seen()
