"""Linears on a CPU: right, one operator whatever the pass, shared, and gone without a trace; what
plain passes run otherwise for few rows shows in no deterministic bit. And linears in tiles of rows,
or transposed: buckets whose plain linears have other bits are canonical all the same.

Emulated, with sums in fp64, so that nothing else decides the bits. ``quick``: torch's default
splits its sums elsewhere than oneDNN does, and is faster for few rows. ``tiles_of_16``: oneDNN's
product in 16 bits, whose rows agree up to 16 of them, as with AMX up to 32; transposed, those of
narrow linears agree throughout. ``breaks_above``: torch's linear splits its sum elsewhere in passes
of more than 16 rows, as some matrix libraries do."""

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from tests.support.budget import first
from tests.support.cases import drain
from tests.support.mixes import bits, crowd, needles, solo
from tests.support.sensitive import ShapeSensitiveLinear, replace_linears, two_sums
from tests.support.tiny import prompts, tiny
from tinyspec import Engine, EngineConfig, SamplingParams
from tinyspec.determinism.rows import agree, probe_pool
from tinyspec.kernels.twins.layers import linear
from tinyspec.model import cpu_linears as linears
from tinyspec.model import one_dnn
from tinyspec.model.cpu_linears import FEW_ROWS, LEAST_ROWS, SMALL_ELEMENTS, CpuLinear
from tinyspec.model.linears import TRANSPOSED, RowTiles, kernel_stand_ins
from tinyspec.model.one_dnn import serves
from tinyspec.model.shadow import standing_in

FEW = max(FEW_ROWS)
CONFIG = EngineConfig(reference_rows=16, max_rows=32)
# Inputs and outputs: small ones and others, and sums of several blocks.
SIZES = {"small": (96, 40), "deep": (2048, 24), "LoRA": (512, 8), "large": (1408, 512)}
SERVED = [dtype for dtype in one_dnn.DTYPES if serves(dtype)]


def stand_in(size, dtype=torch.float32, bias=False, **context):
    inputs, outputs = SIZES.get(size, size)
    context = SimpleNamespace(**{"canonical": None, "prepacked": None, **context})
    own = nn.Linear(inputs, outputs, bias, dtype=dtype)
    return own, standing_in(own, CpuLinear, tinyspec_context=context)


def run(engine, requests):
    outputs = engine.generate([p for p, _ in requests], [s for _, s in requests])
    return [bits(output) for output in outputs]


def alone(model, config):
    """The bits of needles by the reference bucket alone."""
    with Engine(model, config=replace(config, verify="always")) as engine:
        found = [solo(engine, needle) for needle in needles()[::2]]
    assert all(output.completions[0].token_ids for output in found)
    return list(map(bits, found))


def emulate(monkeypatch, operator):
    """Another operator in the place of oneDNN's."""
    for module in (linears, one_dnn):
        monkeypatch.setattr(module, "one_dnn", operator)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", SERVED, ids=str)
def test_products(dtype, size, bias):
    """The same as the linear's, as near as the dtype can tell, and laid out alike."""
    own, served = stand_in(size, dtype, bias)
    for shape in ((), (1,), (1, 1), (1, 7), (2, 3), (1, 77)):
        x = torch.randn((*shape, own.in_features), dtype=dtype)
        with torch.no_grad():
            exact = own.double()(x.double())
            own.to(dtype)
            found = [served(x), served.transposed(x)]
        for each in found:
            assert each.shape == exact.shape and each.is_contiguous() and each.dtype == dtype
            most = 2**-7 if dtype == torch.bfloat16 else 2**-19
            assert (each.double() - exact).norm() <= most * exact.norm()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.skipif(torch.float32 not in SERVED, reason="torch's default serves fp32 here")
def test_rows_agree(size, threads, two_threads):
    """In fp32 from 2 rows on, on inputs whose sums cancel; small weights' at one row as well.
    Control: torch's default at few rows, which plain passes run."""
    torch.set_num_threads(threads)
    own, served = stand_in(size)
    pool = probe_pool(own.in_features, torch.float32, "cpu", own.weight)
    small = own.weight.numel() < SMALL_ELEMENTS
    with torch.inference_mode():
        for rows in (*([1] if small else []), 2, 3, 5, 8, 12, 15, 16, 17, 24, 64, 96, 128, 512):
            assert agree(served, [pool], rows, 32), rows
        assert not all(agree(own, [pool], rows, 32) for rows in (1, 2, 3))


def test_which_plain_passes_run_otherwise(monkeypatch):
    """Of small weights those of rows that canonical ones fill up, of others those of few rows."""
    monkeypatch.setattr(linears, "few_rows", lambda threads: 4)
    for size, most in (("small", LEAST_ROWS - 1), ("large", 4)):
        _, served = stand_in(size)
        differs = [served.differs_in_plain_passes(rows) for rows in (1, most, most + 1, 64)]
        assert differs == [True, True, False, False]


@pytest.mark.skipif(torch.float32 not in SERVED, reason="torch's default serves fp32 here")
def test_how_few_rows_is_measured(monkeypatch):
    """Up to where torch's default takes less time, on this machine."""

    def slow(*given, most=0):
        for _ in range(1 + 50 * (len(given[0]) > most)):
            out = given[0] @ given[1].T
        return out

    assert linears.few_rows.__wrapped__(1) in (0, *FEW_ROWS)
    monkeypatch.setattr(linears, "prepacked", lambda weight: weight)
    monkeypatch.setattr(linears, "one_dnn", lambda x, weight: [slow(x, weight) for _ in range(9)])
    for most, rows in ((8, 8), (2, 2)):
        fast = SimpleNamespace(linear=lambda x, weight, most=most: slow(x, weight, most=most))
        monkeypatch.setattr(linears, "F", fast)
        if most == 2:
            monkeypatch.setattr(linears, "one_dnn", lambda x, w: [slow(x, w, most=9) for _ in "ab"])
        assert linears.few_rows.__wrapped__(1) == rows


@pytest.fixture
def quick(monkeypatch, no_results_on_disk):
    calls = []

    def split(x, weight, bias):
        calls.append(x.shape[:-1].numel())
        return two_sums(x, weight, bias, weight.shape[1] // 2)

    monkeypatch.setattr(linears, "F", SimpleNamespace(linear=split, pad=F.pad))
    monkeypatch.setattr(linears, "serves", lambda dtype: dtype == torch.float32)
    emulate(monkeypatch, lambda x, w, bias=None: two_sums(x, w, bias, w.shape[1] // 3))
    monkeypatch.setattr(linears, "SMALL_ELEMENTS", 0)
    monkeypatch.setattr(linears, "few_rows", lambda threads: FEW)
    return calls


@pytest.mark.crossed(3)
@pytest.mark.parametrize("reference", [4, 16])
@pytest.mark.parametrize("verify", first(1, ["auto", "padded"], 3))
def test_bits_are_those_of_the_reference_bucket(quick, verify, reference):
    model = tiny()
    config = EngineConfig(
        reference_rows=reference, max_rows=32, max_sequences=24, verify=verify, prepack="never"
    )
    expected = alone(model, config)
    with Engine(model, config=config) as engine:
        del quick[:]
        requests = [*needles()[::2], *crowd(random.Random(0), 8)]
        assert run(engine, requests)[: len(expected)] == expected
        for count in (2, 24):
            engine.generate(prompts(count), SamplingParams(max_new_tokens=9))
        assert quick and max(quick) <= FEW


def test_pages_of_quick_passes_serve_plain_requests_alone(quick):
    """Control: taken for canonical, they change the bits of a deterministic request."""
    plain, mine = (
        SamplingParams(max_new_tokens=60),
        SamplingParams(max_new_tokens=8, deterministic=True, logprobs=True),
    )
    config = EngineConfig(reference_rows=16, max_rows=32, page_size=16, prepack="never")
    with Engine(tiny(), config=config) as engine:
        engine.contract.ensure()
        first = engine.generate([[5, 6, 7]], plain)[0]
        tokens = [5, 6, 7, *first.completions[0].token_ids]
        warm = engine.generate([tokens], mine)[0]
        engine.release()
        assert bits(engine.generate([tokens], mine)[0]) == bits(warm)
        engine.release()
        engine.generate([[5, 6, 7]], plain)
        for key in [k for k in engine.admission.prefix.pages if not k[1]]:
            page = engine.admission.prefix.pages.pop(key)
            taken = (key[0], True, key[2])
            engine.admission.prefix.pages[taken] = page
            engine.admission.prefix.keys[page] = taken
        assert bits(engine.generate([tokens], mine)[0]) != bits(warm)


def served(model):
    kinds = (CpuLinear, nn.Linear)
    found = (next((k for k in kinds if isinstance(m, k)), None) for m in model.modules())
    return [kind for kind in found if kind]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_an_engine_serves_plain_linears_alone(dtype):
    """Of a dtype that the operator takes on this machine; others have torch's default."""
    model = tiny(dtype=dtype)
    before = served(model)
    weights = {id(p) for p in model.parameters()}
    with Engine(model) as engine:
        assert set(served(engine.runner.model)) == {CpuLinear if serves(dtype) else nn.Linear}
        assert {id(p) for p in engine.runner.model.parameters()} == weights
    assert served(model) == before


def test_the_operator_is_tried(monkeypatch):
    """What raises, or gives something else, serves nobody; nor do other processors."""
    tried = serves.__wrapped__
    for name, other in (
        ("prepacked", lambda weight: weight.no_such_thing),
        ("one_dnn", lambda x, weight: torch.zeros(2, 2)),
    ):
        with monkeypatch.context() as patches:
            patches.setattr(one_dnn, name, other)
            assert not tried(torch.float32)
    for name in ("arm64", "aarch64", "ppc64le"):
        monkeypatch.setattr(one_dnn.platform, "machine", lambda name=name: name)
        assert not tried(torch.float32) and not tried(torch.bfloat16)


@pytest.mark.skipif(torch.float32 not in SERVED, reason="torch's default serves fp32 here")
def test_without_the_operator_linears_stay(monkeypatch):
    """And the fingerprint says so, for the bits are others."""
    params = SamplingParams(max_new_tokens=5, deterministic=True)
    with Engine(tiny(), config=CONFIG) as engine:
        first = engine.generate(prompts(3), params)[0]
    monkeypatch.setattr(linears, "serves", lambda dtype: False)
    with Engine(tiny(), config=CONFIG) as engine:
        assert set(served(engine.runner.model)) == {nn.Linear}
        assert engine.generate(prompts(3), params)[0].fingerprint != first.fingerprint


@pytest.fixture
def tiles_of_16(monkeypatch, no_results_on_disk):
    calls = []

    def split(x, weight, bias, rows):
        return two_sums(x, weight, bias, weight.shape[1] // (2 if rows <= 16 else 3))

    def operator(x, weight, bias=None):
        return split(x, weight, bias, x.shape[:-1].numel())

    def transposed(self, x):
        rows = x.shape[:-1].numel()
        calls.append((self.in_features, rows))
        return split(x, self.weight, self.bias, rows if self.in_features > 64 else 1)

    monkeypatch.setattr(linears, "serves", lambda dtype: dtype == torch.bfloat16)
    emulate(monkeypatch, operator)
    monkeypatch.setattr(CpuLinear, "transposed", transposed)
    return calls


@pytest.mark.parametrize("verify", first(2, ["auto", "padded"], 2))
def test_larger_passes_run_transposed_or_in_tiles(tiles_of_16, verify):
    """Each linear by what keeps its bits. Control: without both they are others."""
    model, requests = tiny(dtype=torch.bfloat16), [*needles()[::2], *crowd(random.Random(0), 8)]
    config = EngineConfig(
        reference_rows=16, max_rows=64, max_sequences=24, verify=verify, prepack="never"
    )
    expected = alone(model, config)
    with Engine(model, config=config) as engine:
        engine.warm_up()
        found = engine.contract.results
        assert found.canonical == [2, 4, 8, 12, 16, 32, 48, 64]
        kinds = found.tiles.items()
        narrow = {name for name, rows in kinds if set(rows.values()) == {TRANSPOSED}}
        tiled = {name for name, rows in kinds if set(rows.values()) == {16}}
        assert narrow and tiled and narrow | tiled == set(found.tiles)
        assert all(set(rows) == {32, 48, 64} for _, rows in kinds)
        assert tiled == {"model.layers.0.mlp.down_proj"}, "of 192 inputs"
        del tiles_of_16[:]
        assert run(engine, requests)[: len(expected)] == expected
        assert tiles_of_16 and {inputs for inputs, _ in tiles_of_16} == {64}
        before = len(tiles_of_16)
        engine.generate(prompts(24), SamplingParams(max_new_tokens=9))
        assert len(tiles_of_16) == before, "plain passes run whole"
        engine.release()
        engine.served.tiles.unbind()
        assert run(engine, requests)[: len(expected)] != expected


def test_what_is_not_a_plain_linear_stays():
    whole, conv = tiny(), tiny("gpt2")
    plain = (nn.Linear, Conv1D)
    for model in (whole, conv):
        linears = [module for module in model.modules() if isinstance(module, plain)]
        assert [*kernel_stand_ins(model, linear)] == linears
    assert kernel_stand_ins(replace_linears(tiny(), ShapeSensitiveLinear), linear) == {}

    class Packed(torch.Tensor):
        pass

    hooked, patched, wide, packed = (nn.Linear(8, 8) for _ in range(4))
    hooked.register_forward_hook(lambda *_: None)
    patched.forward = lambda x: x
    wide.double()
    packed.weight = nn.Parameter(packed.weight.detach().as_subclass(Packed))
    model = nn.Sequential(hooked, patched, wide, packed, nn.Linear(8, 8))
    assert list(kernel_stand_ins(model, linear)) == [model[4]]


@pytest.mark.parametrize("gradient", [True, False])
def test_tiles_have_the_bits_of_passes_of_their_size(gradient):
    """Of frozen weights, too, by which torch multiplies a part of [1, R, in] as a batch."""
    torch.manual_seed(0)
    linear = nn.Linear(512, 1408, bias=False, dtype=torch.bfloat16).requires_grad_(gradient)
    x = torch.randn(1, 64, 512).to(torch.bfloat16)
    whole = [part[0].clone()[None] for part in x.split(32, dim=1)]
    with torch.no_grad():
        expected = torch.cat([linear(part) for part in whole], dim=1)
        RowTiles(SimpleNamespace(canonical=True)).bind([linear], {64: 32})
        assert torch.equal(linear(x), expected)


@pytest.fixture
def breaks_above(monkeypatch, no_results_on_disk):
    """torch's linear with other partial sums above 16 rows; counts its row counts."""
    calls = []

    def linear(x, weight, bias=None):
        rows = x.shape[:-1].numel()
        calls.append(rows)
        return two_sums(x, weight, bias, weight.shape[1] // (2 if rows <= 16 else 3))

    monkeypatch.setattr(nn.functional, "linear", linear)
    # Canonical passes go by it, whatever the CPU.
    monkeypatch.setattr(linears, "serves", lambda dtype: False)
    return calls


@pytest.mark.parametrize("verify", first(2, ["auto", "direct", "padded"], 2))
def test_bits_in_tiles_are_those_of_the_reference_bucket(breaks_above, verify, monkeypatch):
    """``verify="always"`` commits from the reference bucket alone: the oracle of the others."""
    requests = [*needles()[::2], *crowd(random.Random(0), 8)]
    model = tiny(dtype=torch.bfloat16)
    # 20 rows are no whole number of tiles of 16, and every size must be canonical for "direct".
    reference = 4 if verify == "direct" else 16
    config = EngineConfig(reference_rows=reference, max_rows=32, max_sequences=24, verify=verify)
    with Engine(model, config=replace(config, verify="always")) as engine:
        alone = [bits(solo(engine, needle)) for needle in needles()[::2]]
    with Engine(model, config=config) as engine:
        del breaks_above[:]
        assert run(engine, requests)[: len(alone)] == alone
        canonical = [record for record in engine.records if record.way in ("direct", "padded")]
        assert any(record.bucket > 16 for record in canonical)
        tiles = engine.contract.results.tiles.values()
        assert {heights[32] for heights in tiles} == {16}
        if verify != "direct":
            engine.release()
            engine.served.tiles.unbind()
            monkeypatch.setattr(engine.contract, "refresh", lambda digest: [])
            assert run(engine, requests)[: len(alone)] != alone, "control: linears run whole"
    assert not any("forward" in vars(module) for module in model.modules())


def test_plain_prompts_alone_in_a_canonical_pass(breaks_above):
    """A deterministic request waits behind older plain prompts, which fill canonical passes by
    themselves: their pages count as canonical, so these passes run in tiles as well."""
    model = tiny(dtype=torch.bfloat16)
    shared = [n % 97 + 1 for n in range(300)]
    mine = SamplingParams(max_new_tokens=8, deterministic=True, logprobs=True)
    config = EngineConfig(reference_rows=16, max_rows=32, page_size=16)
    with Engine(model, config=config) as engine:
        alone = bits(engine.generate([[*shared, 5]], mine)[0])
        engine.release()
        for n in range(2):
            engine.add_request([*shared, n], SamplingParams(max_new_tokens=2))
        request_id = engine.add_request([*shared, 5], mine)
        first = len(engine.records)
        done = drain(engine)
        passes = engine.records[first:]
        assert bits(done[request_id]) == alone
    assert sum(record.left_out > 0 for record in passes) > 3
    assert all(record.way for record in passes if record.canonical and record.bucket > 16)
