"""What a proof rests on and what it survives: facts on disk, linear kernel, weights, adapters."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.support import changes
from tests.support.budget import first
from tests.support.cases import bits_of, facts_of, one_by_one, run
from tests.support.sensitive import ShapeSensitiveLinear, _SplitLinear, replace_linears
from tests.support.tiny import prompts, tiny
from tests.support.zoo import tiny as of_zoo
from tinyspec import DeterminismError, Engine, EngineConfig, SamplingParams
from tinyspec.determinism import contract, proof, results
from tinyspec.kernels.twins import layers as twins
from tinyspec.model.attention import AttentionContext
from tinyspec.model.checksum import checksum
from tinyspec.model.cpu_linears import cpu_stand_ins
from tinyspec.model.linears import KernelLinear
from tinyspec.runner import kv_cache

SIZES = [2, 4, 8, 12, 16]
CONFIG = {"reference_rows": 8, "max_rows": 16}
DETERMINISTIC = SamplingParams(max_new_tokens=8, deterministic=True, logprobs=True)


pytestmark = pytest.mark.usefixtures("home")


def engine_of(model, **config):
    return Engine(model, config=EngineConfig(**{**CONFIG, **config}))


def proven(model, **config):
    """(facts, fingerprint) of an engine around ``model``."""
    with engine_of(model, **config) as engine:
        engine.contract.ensure()
        return engine.contract.results, engine.fingerprint


def kernels_of(engine):
    """Names of the linears that the kernel serves."""
    named = engine.runner.model.named_modules()
    return [name for name, module in named if isinstance(module, KernelLinear)]


# Facts on disk


OTHERS = ({"linear": "always"}, {"reference_rows": 12}, {"max_rows": 20}, {"max_model_len": 100})


def test_which_settings_share_facts(probed, proven_on_demand):
    """And another checkpoint of the same structure, whose fingerprint is another."""
    own = proven(tiny())
    for number, other in enumerate(OTHERS, 2):
        proven(tiny(), **other)
        assert len(probed) == number, other
    assert proven(tiny(), draft_window=3, verify="always", prefix_cache=False)[0] == own[0]
    facts, fingerprint = proven(tiny(seed=1))
    assert facts == own[0] and fingerprint != own[1]
    assert len(probed) == 1 + len(OTHERS)


def test_fresh_facts_replace_those_on_disk(home, probed):
    proven(tiny())
    (file,) = home.iterdir()
    known = results.load(file.stem)
    results.store(file.stem, known.with_bucket(replace(known.buckets[0], seconds=12345.0)))
    assert proven(tiny())[0].buckets[0].seconds == 12345.0
    with engine_of(tiny()) as engine:
        assert engine.contract.probe(True, 1).buckets[0].seconds != 12345.0
        assert engine.generate(prompts(2), DETERMINISTIC)
    assert proven(tiny())[0].buckets[0].seconds != 12345.0
    assert [path.name for path in home.iterdir()] == [file.name], "no draft is left"


# The linear kernel


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def broken(request, monkeypatch):
    """dtype; linears with 192 outputs break fact 1 in it, and the kernel does not."""
    served = cpu_stand_ins(nn.Sequential(nn.Linear(2, 2, dtype=request.param)), AttentionContext())
    cls = next(map(type, served.values()), nn.Linear)
    whole = cls.forward

    def forward(self, x):
        out = whole(self, x)
        third = torch.arange(out.shape[-2]) % 3 == 1
        nudged = (out.float() * (1 + 2**-6)).to(out.dtype)
        return torch.where(third[:, None], nudged, out) if self.out_features == 192 else out

    monkeypatch.setattr(cls, "forward", forward)
    return request.param


WIDE = [f"model.layers.{n}.mlp.{name}_proj" for n in range(2) for name in ("gate", "up")]


def test_the_kernel_serves_the_layers_that_break_the_reference_bucket(broken, probed):
    model = tiny(dtype=broken)
    types = [type(module) for module in model.modules()]
    with engine_of(model) as engine:
        plain = engine.contract.current_fingerprint().digest
        outputs = engine.generate(prompts(4), DETERMINISTIC)
        assert kernels_of(engine) == WIDE == sorted(engine.contract.results.kernel_linears)
        assert 8 in engine.contract.results.canonical
        assert {o.fingerprint for o in outputs} == {engine.fingerprint} != {plain}
        alone = one_by_one(engine, [(prompt, DETERMINISTIC) for prompt in prompts(4)])
        assert bits_of(outputs) == alone
    assert [type(module) for module in model.modules()] == types
    with engine_of(model) as engine:
        assert engine.fingerprint == outputs[0].fingerprint, "from disk, swapped without a probe"
        assert bits_of(engine.generate(prompts(4), DETERMINISTIC)) == alone
    assert len(probed) == 1


def test_a_pass_that_fails_leaves_no_kernel_behind(broken):
    model, failing = tiny(dtype=broken), []

    def fail(module, args):
        if failing:
            raise RuntimeError("it fails")

    model.lm_head.register_forward_pre_hook(fail)
    proven(model)
    with engine_of(model) as engine:
        failing.append(True)
        with pytest.raises(RuntimeError, match="it fails"):
            engine.contract.ensure()
        assert kernels_of(engine) == []
        failing.clear()
        engine.contract.ensure()
        assert kernels_of(engine), "control"


@pytest.mark.parametrize("linear", ["never", "auto"])
def test_without_the_kernel_or_its_help_the_module_is_named(linear, broken, monkeypatch):
    whole = twins.linear

    def no_better(x, weight, bias=None):
        out = whole(x, weight, bias)
        out[1::3] *= 1.125
        return out

    monkeypatch.setattr(twins, "linear", no_better)
    with engine_of(tiny(dtype=broken), linear=linear) as engine:
        with pytest.raises(DeterminismError, match=WIDE[0]):
            engine.generate([[1, 2]], DETERMINISTIC)
        assert kernels_of(engine) == [] and engine.contract.results.kernel_linears == ()
        assert engine.generate([[1, 2]])[0].completions[0].finish_reason == "length"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_always_makes_every_bucket_canonical(dtype):
    model = tiny(dtype=dtype)
    types = [type(module) for module in model.modules()]
    found = []
    for verify in ("direct", "always"):
        with engine_of(model, linear="always", verify=verify) as engine:
            found.append(bits_of(engine.generate(prompts(5), DETERMINISTIC)))
            assert engine.contract.results.canonical == SIZES
            assert engine.contract.results.tiles == {}
            assert (engine.stats().drafted > 0) == (verify == "always")
            modules = engine.runner.model.named_modules()
            assert kernels_of(engine) == [n for n, m in modules if hasattr(m, "out_features")]
            always = engine.fingerprint
    assert found[0] == found[1]
    assert [type(module) for module in model.modules()] == types
    assert proven(model)[1] != always


def test_direct_is_refused_with_the_buckets_that_are_in_its_way():
    model = replace_linears(tiny(), ShapeSensitiveLinear)
    for sequences, listed in ((16, ": 2, 4, 12, 16;"), (5, ": 2, 4;")):
        with (
            engine_of(model, verify="direct", max_sequences=sequences) as engine,
            pytest.raises(DeterminismError, match=f"direct.*{sequences} rows.*{listed}"),
        ):
            engine.generate([[1, 2]], DETERMINISTIC)


# What a proof survives


def test_trained_weights_keep_the_proof_and_change_the_fingerprint(probed):
    model = tiny()
    with engine_of(model) as engine:
        engine.contract.ensure()
        seen = [engine.fingerprint]
        for parameter in list(model.parameters())[:3]:
            with torch.no_grad():
                parameter.add_(0.01)
            assert engine.contract.changed()
            engine.generate(prompts(2), DETERMINISTIC)
            assert not engine.contract.changed()
            seen.append(engine.fingerprint)
            assert engine.runner.buckets.canonical
        assert len(set(seen)) == 4 and len(probed) == 1


def other_form(model):
    model.lm_head.weight.requires_grad_(False)


def other_tensor(model):
    model.lm_head._parameters["weight"] = model.lm_head.weight.detach()


WHILE_PROVEN = {
    "the weights": other_form,
    "others": other_tensor,
    "variance_epsilon": changes.number,
    "threads": changes.threads,
    "": changes.parameter_written,
    "nothing": lambda _: None,
}


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("what", WHILE_PROVEN)
def test_a_model_that_changes_while_it_is_proven(
    what, begun, home, monkeypatch, two_threads, proven_on_demand
):
    """What was found is kept by nobody, unless only numbers of weights changed, or others were put
    into the model, which the engine does not have yet."""
    model, whole = tiny(), contract.prove_reference

    def while_proven(*given):
        if begun:
            WHILE_PROVEN[what](model)
        found = whole(*given)
        if not begun:
            WHILE_PROVEN[what](model)
        return found

    with engine_of(model) as engine:
        with monkeypatch.context() as patches:
            patches.setattr(contract, "prove_reference", while_proven)
            if what in ("", "nothing", "others"):
                engine.generate(prompts(2), DETERMINISTIC)
            else:
                with pytest.raises(DeterminismError, match=f"{what} changed while.*call again"):
                    engine.generate(prompts(2), DETERMINISTIC)
                assert engine.contract.results is None and not list(home.glob("*"))
        engine.generate(prompts(2), DETERMINISTIC)
        assert len(list(home.iterdir())) == 1 + (what == "others")
        if what == "variance_epsilon":  # before it begins
            model.model.norm.variance_epsilon = 0.25
            monkeypatch.setattr(contract, "prove_reference", None)
            with pytest.raises(DeterminismError, match="changed while"):
                engine.contract.prove(fresh=True)


def test_whether_weights_ask_for_gradients_is_in_the_fingerprint():
    """Of torch's own linears: it multiplies views of rows in another way, so the proof is lost."""
    model = tiny("llama", torch.float16)
    with engine_of(model) as engine:
        engine.contract.ensure()
        asking = engine.fingerprint
        assert engine.runner.buckets.canonical
        model.requires_grad_(False)
        assert engine.contract.refresh() and engine.runner.buckets.canonical == []
        assert engine.fingerprint != asking
        model.requires_grad_(True)
        assert engine.fingerprint == asking


def layout(model):
    weight = model.model.norm.weight
    weight.data = weight.data.repeat_interleave(2)[::2]


LOSES = [changes.threads, layout, changes.module, changes.hook]


@pytest.mark.parametrize("change", first(2, LOSES, 1), ids=lambda change: change.__name__)
def test_what_loses_the_proof(probed, change, two_threads, proven_on_demand):
    model = tiny()
    with engine_of(model) as engine:
        engine.contract.ensure()
        change(model)
        assert engine.contract.refresh()
        assert engine.runner.buckets.canonical == []
        engine.contract.ensure()
        assert len(probed) == 2
        assert not engine.contract.refresh()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("size", [1, 3, 1001])
def test_checksum(dtype, size):
    """Of every value and of its place."""
    x = torch.arange(size + 1).to(dtype)
    for tensor in (x[:size], x[1:]):  # one of them does not begin at a multiple of eight bytes
        others = [tensor.clone(), tensor.clone(), tensor.flip(0)]
        others[0][-1] += 1
        others[1][size // 2] += 1
        found = checksum(tensor)
        assert 0 <= found < 2**64 and found == checksum(tensor.clone())
        assert all(checksum(other) != found for other in others if not torch.equal(other, tensor))


# A proof does not depend on the values of weights: it uses weights of its own making. Controls:
# models of these weights differ in every other respect, and a linear that differs at one row count
# is found whatever the weights are.

FILLS = {
    "as they are": lambda parameter: None,
    "zero": nn.init.zeros_,
    "identity": lambda p: nn.init.eye_(p) if p.dim() == 2 else nn.init.ones_(p),
    "nan": lambda parameter: nn.init.constant_(parameter, torch.nan),
}


def fill(model, name):
    """Other weights in the loaded model, as some of these are refused at load."""
    for parameter in model.parameters():
        FILLS[name](parameter)


def broken_by(model, filled="as they are"):
    """What a new proof finds, by rows."""
    with engine_of(model) as engine:
        fill(model, filled)
        return {b["rows"]: list(b["broken_by"]) for b in facts_of(engine)["buckets"]}


class OtherAtFourRows(_SplitLinear):
    """Splits its sum elsewhere in passes of four rows."""

    def forward(self, x):
        return self._split_at(x, self._cut(1 if x.shape[:-1].numel() == 4 else 2))


def replaced(model, name, kind=OtherAtFourRows):
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, kind(model.get_submodule(name)))
    return model


NAME = "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize("filled", FILLS)
def test_a_linear_that_differs_at_one_row_count_is_caught(filled):
    found = broken_by(replaced(tiny(), NAME), filled)
    assert [rows for rows, names in found.items() if NAME in names] == [4]


SLOW = pytest.mark.slow("crosses", 1)


@pytest.mark.parametrize(
    "family", ["dbrx", *(pytest.param(n, marks=SLOW) for n in ("jetmoe", "longcat_flash"))]
)
def test_routing_by_data_is_found_whatever_the_router_says(family):
    """Of experts in loops of their own. A router of zeros sends all rows to the same experts, so
    that nothing seems to depend on them."""
    for filled in ("as they are", "zero"):
        model = of_zoo(family)
        with Engine(model) as engine:
            fill(model, filled)
            with pytest.raises(DeterminismError, match="shapes of its matmuls"):
                engine.generate([[1, 2, 3]], DETERMINISTIC)


def test_too_little_memory_is_refused_with_the_bytes(monkeypatch):
    """Of a proof; results on disk take none."""
    model, plain = tiny(), SamplingParams()
    largest = max(p.nbytes for p in model.parameters())

    def refuse(needed, device):
        with monkeypatch.context() as patches:
            patches.setattr(kv_cache, "free_memory", lambda device: largest)
            kv_cache.refuse_shortage(needed, device)

    with engine_of(model) as engine:
        with monkeypatch.context() as patches:
            patches.setattr(proof, "refuse_shortage", refuse)
            with pytest.raises(DeterminismError, match=rf"a proof takes \d+ bytes.* {largest} "):
                engine.generate([[1, 2, 3]], DETERMINISTIC)
            assert engine.generate([[1, 2, 3]], plain)[0].completions[0].finish_reason == "length"
        first = engine.generate([[1, 2, 3]], DETERMINISTIC)[0]
    monkeypatch.setattr(proof, "refuse_shortage", refuse)
    with engine_of(tiny(seed=1)) as engine:
        assert engine.generate([[1, 2, 3]], DETERMINISTIC)[0].fingerprint != first.fingerprint


def test_buckets_without_room_for_their_proof_are_left_out(proven_on_demand, monkeypatch, caplog):
    """And nothing else: requests have the same bits."""
    model, config = of_zoo("qwen3_5_text"), EngineConfig(reference_rows=8, max_rows=128)
    found = []
    for proves in (False, True):
        with Engine(model, config=config) as engine:
            if proves:
                left = contract.needed_bytes(engine.runner, 96)
                monkeypatch.setattr(contract, "free_memory", lambda device, left=left: left)
                known = engine.contract.probe().sizes
                assert {*known} == {rows for rows in engine.runner.buckets.sizes if rows <= 96}
            found.append(bits_of(run(engine, [([1, 2, 3], DETERMINISTIC)])))
    assert found[0] == found[1]
    assert "passes of 128 rows are not proven" in caplog.text
