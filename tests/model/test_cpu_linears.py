"""Stand-ins for linears: right, shared, and gone without a trace. Passes that need not be canonical
run some by torch's default: no bit shows it (``quick``: that way splits its sum elsewhere, whatever
the CPU). And linears in tiles of rows: buckets whose plain linears have other bits are canonical
all the same (``breaks_above``: torch's linear splits its sum elsewhere in passes of more than 16
rows, as some matrix libraries do). Sums in fp64, so that nothing else decides the bits."""

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from tests.support.budget import first
from tests.support.cases import drain, engine_of, greedy, one_by_one
from tests.support.mixes import bits, crowd, needles, solo
from tests.support.sensitive import ShapeSensitiveLinear, replace_linears, two_sums
from tests.support.tiny import config_of, prompts, tiny
from tinyspec import Engine, EngineConfig, SamplingParams, doctor
from tinyspec.kernels.twins.layers import linear
from tinyspec.model import cpu_linears as linears
from tinyspec.model.cpu_linears import (
    MKL_ROWS,
    REORDERED_ELEMENTS,
    TRANSPOSED_ROWS,
    CpuLinear,
    OneDnnLinear,
    TransposedLinear,
    cpu_has,
)
from tinyspec.model.linears import RowTiles, kernel_stand_ins
from tinyspec.model.shadow import standing_in

# Which linear, and the row counts that are quicker by torch's default.
KINDS = {
    torch.float32: (OneDnnLinear, range(1, MKL_ROWS + 1)),
    torch.bfloat16: (TransposedLinear, range(TRANSPOSED_ROWS + 1, 1 << 20)),
}
both = pytest.mark.parametrize("dtype", KINDS, ids=str)


@pytest.fixture
def quick(monkeypatch, no_results_on_disk):
    calls = []

    def split(linear, x):
        calls.append(x.shape[:-1].numel())
        return two_sums(x, linear.weight, linear.bias, linear.weight.shape[1] // 2)

    monkeypatch.setattr(CpuLinear, "default", split)
    monkeypatch.setattr(linears, "works", lambda: True)
    monkeypatch.setattr(linears, "cpu_has", lambda name: True)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setattr(linears, "SMALL_ELEMENTS", 0)
    monkeypatch.setattr(linears, "TRANSPOSED_ELEMENTS", 1)
    return calls


PRODUCTS = {
    "transposed": (TransposedLinear, "product", torch.bfloat16, 2**-7),
    "oneDNN": (OneDnnLinear, "product", torch.float32, 2**-20),
    "oneDNN, swapped": (OneDnnLinear, "product_swapped", torch.float32, 2**-20),
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("kind", "name", "dtype", "most"), PRODUCTS.values(), ids=PRODUCTS)
def test_products(kind, name, dtype, most, bias):
    """The same as the linear's, as near as the dtype can tell, and laid out alike."""
    own = nn.Linear(96, 40, bias, dtype=dtype)
    product = getattr(standing_in(own, kind), name)
    for shape in ((96,), (1, 96), (1, 1, 96), (1, 7, 96), (2, 3, 96), (1, 77, 96)):
        x = torch.randn(shape, dtype=dtype)
        with torch.no_grad():
            found, exact = product(x), own.double()(x.double())
            own.to(dtype)
        assert found.shape == exact.shape and found.is_contiguous() and found.dtype == dtype
        assert (found.double() - exact).norm() <= most * exact.norm()


def test_swapped_products_keep_bits_or_are_fast_modes_own(monkeypatch, no_results_on_disk):
    """Either way deterministic requests have the same bits. With them canonical passes are as fast
    passes are, if this machine's product allows it."""
    monkeypatch.setattr(linears, "_mkl_rows", lambda elements: 0)
    monkeypatch.setattr(linears, "SMALL_ELEMENTS", 0)
    monkeypatch.setattr(linears, "cpu_has", lambda name: name == "avx2")
    found, whole = [], linears.swapping_keeps_bits
    for keeps in (False, whole(torch.get_num_threads())):
        monkeypatch.setattr(linears, "swapping_keeps_bits", lambda threads, keeps=keeps: keeps)
        with Engine(tiny(), config=EngineConfig(reference_rows=64, max_rows=64)) as engine:
            results = engine.contract.probe(fresh=True)
            requests = [*needles(), *crowd(random.Random(0), 8)]
            found.append(run(engine, requests)[: len(needles())])
            own = [fact.rows for fact in results.buckets if fact.canonical and fact.own_way]
            narrow = [rows for rows in results.canonical if rows in linears.NARROW_COLUMNS]
            assert own == ([] if keeps else narrow) and (narrow or keeps)
    assert found[0] == found[1]


def test_control_other_bits_swapped(monkeypatch):
    """An operator that cuts its sum by its first operand."""

    def split(a, b, bias=None):
        return two_sums(a, b, bias, 1 + len(a) % 7)

    monkeypatch.setattr(linears, "one_dnn", split)
    assert not linears.swapping_keeps_bits.__wrapped__(1)
    monkeypatch.setattr(linears, "one_dnn", lambda a, b, bias=None: two_sums(a, b, bias, 9))
    assert linears.swapping_keeps_bits.__wrapped__(1)


@both
def test_buckets_are_canonical_on_demand(quick, dtype):
    report = doctor(tiny("llama", dtype), EngineConfig(reference_rows=24, max_rows=64))
    assert report
    for fact in report.facts.buckets:
        assert bool(fact.own_way) >= (fact.canonical and fact.rows in KINDS[dtype][1])
        assert fact.canonical or fact.rows < 24


@pytest.mark.parametrize("vendor", ["GenuineIntel", "AuthenticAMD"])
def test_smallest_weights_run_by_mkl_in_fast_mode(monkeypatch, vendor):
    """On every CPU, and are never swapped; larger ones on an Intel CPU alone."""
    monkeypatch.setattr(linears, "cpu_has", lambda name: name in (vendor, "avx2", "avx512f"))
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setattr(linears, "swapping_keeps_bits", lambda threads: True)
    for outputs, small in ((8, True), (1024, False)):
        own = nn.Linear(512, outputs)
        rows = linears._mkl_rows(own.weight.numel())
        linear = standing_in(own, OneDnnLinear, tinyspec_mkl_rows=rows)
        by_mkl = linear.fast_product(4) == linear.default
        assert by_mkl == (small or vendor == "GenuineIntel")
        assert linear.faster_swapped(16) != small


def test_small_weights_run_by_torch_in_fast_mode():
    """In 16 bits, where the transposed product is slower, and at no row count in another way."""
    for outputs, own in ((383, True), (1024, False)):
        linear = standing_in(nn.Linear(128, outputs, dtype=torch.bfloat16), TransposedLinear)
        found = [linear.fast_product(rows) for rows in (1, TRANSPOSED_ROWS)]
        assert found == [linear.default if own else None] * 2


@pytest.mark.crossed(3)
@both
@pytest.mark.parametrize("reference", [4, 16])
@pytest.mark.parametrize("verify", first(1, ["auto", "padded"], 3))
def test_bits_are_those_of_the_reference_bucket(quick, verify, reference, dtype):
    model = tiny("llama", dtype)
    config = EngineConfig(reference_rows=reference, max_rows=32, max_sequences=24, verify=verify)
    with Engine(model, config=replace(config, verify="always")) as engine:
        alone = [bits(solo(engine, needle)) for needle in needles()[::2]]
    with Engine(model, config=config) as engine:
        requests = [*needles()[::2], *crowd(random.Random(0), 8)]
        del quick[:]
        outputs = engine.generate([p for p, _ in requests], [s for _, s in requests])
        assert [bits(output) for output in outputs][: len(alone)] == alone
        for count in (2, 24):
            engine.generate(prompts(count), SamplingParams(max_new_tokens=9))
        assert quick and all(rows in KINDS[dtype][1] for rows in quick)


def test_pages_of_quick_passes_serve_plain_requests_alone(quick):
    """Control: taken for canonical, they change the bits of a deterministic request."""
    plain, mine = (
        SamplingParams(max_new_tokens=60),
        SamplingParams(max_new_tokens=8, deterministic=True, logprobs=True),
    )
    config = EngineConfig(reference_rows=16, max_rows=32, page_size=16)
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


CONFIG = EngineConfig(reference_rows=16, max_rows=32)


def served(model):
    kinds = (OneDnnLinear, TransposedLinear, nn.Linear)
    found = (next((k for k in kinds if isinstance(m, k)), None) for m in model.modules())
    return [kind for kind in found if kind]


def test_an_engine_serves_plain_linears_alone():
    model = tiny()
    before = served(model)
    weights = {id(p) for p in model.parameters()}
    with Engine(model) as engine:
        assert set(served(engine.runner.model)) == {OneDnnLinear}
        assert {id(p) for p in model.parameters()} == weights
    assert served(model) == before
    with Engine(tiny("llama", torch.bfloat16)) as engine:
        assert set(served(engine.runner.model)) == {
            TransposedLinear if cpu_has("amx_bf16") else nn.Linear
        }


def test_without_the_operator_linears_stay(monkeypatch):
    """And the fingerprint says so, for the bits are others."""
    params = SamplingParams(max_new_tokens=5, deterministic=True)
    with Engine(tiny(), config=CONFIG) as engine:
        first = engine.generate(prompts(3), params)[0]
    monkeypatch.setattr(linears, "works", lambda: False)
    with Engine(tiny(), config=CONFIG) as engine:
        assert set(served(engine.runner.model)) == {nn.Linear}
        assert engine.generate(prompts(3), params)[0].fingerprint != first.fingerprint


@both
def test_a_vocabulary_as_models_have(dtype, no_results_on_disk):
    """In bf16 with AMX, oneDNN transposes the logits of so many tokens, in the proof as well."""
    config = config_of("llama")
    config.vocab_size = REORDERED_ELEMENTS // 16
    model = AutoModelForCausalLM.from_config(config).to(dtype).eval()
    requests = [(prompt, greedy(5)) for prompt in prompts(6)]
    with engine_of(model, max_rows=64) as engine:
        assert one_by_one(engine, requests) == run(engine, requests)


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
    # Canonical passes go by it, whatever the CPU, and there is no other way for few rows.
    monkeypatch.setattr(linears, "cpu_has", lambda name: False)
    return calls


def run(engine, requests):
    outputs = engine.generate([p for p, _ in requests], [s for _, s in requests])
    return [bits(output) for output in outputs]


@pytest.mark.parametrize("verify", first(2, ["auto", "direct", "padded"], 2))
def test_bits_in_tiles_are_those_of_the_reference_bucket(breaks_above, verify):
    """``verify="always"`` commits from the reference bucket alone: the oracle of the others."""
    requests = [*needles()[::2], *crowd(random.Random(0), 8)]
    model = tiny(dtype=torch.bfloat16)
    # 24 rows are no whole number of tiles of 16, and every size must be canonical for "direct".
    reference = 8 if verify == "direct" else 16
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
    assert not any("forward" in vars(module) for module in model.modules())


def test_control_without_tiles_the_bits_differ(breaks_above, monkeypatch):
    """The same passes with linears run whole: other bits, so the comparison above can fail."""
    requests = [*needles()[::2], *crowd(random.Random(0), 8)]
    config = EngineConfig(reference_rows=16, max_rows=32, max_sequences=24, verify="padded")
    with Engine(tiny(dtype=torch.bfloat16), config=config) as engine:
        alone = [bits(solo(engine, needle)) for needle in needles()[::2]]
        engine.release()
        engine.served.tiles.unbind()
        monkeypatch.setattr(engine.contract, "refresh", lambda digest: [])
        assert run(engine, requests)[: len(alone)] != alone


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
    assert sum(record.left_out == 2 for record in passes) > 3
    assert all(record.way for record in passes if record.canonical and record.bucket > 16)
