"""What a proof rests on and what it survives: facts on disk, linear kernel, weights, adapters."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.support import changes
from tests.support.budget import first
from tests.support.cases import bits_of, one_by_one
from tests.support.sensitive import ShapeSensitiveLinear, replace_linears
from tests.support.tiny import prompts, tiny
from tinyspec import DeterminismError, Engine, EngineConfig, SamplingParams
from tinyspec.determinism import results
from tinyspec.kernels.twins import layers as twins
from tinyspec.model.attention import AttentionContext
from tinyspec.model.checksum import checksum
from tinyspec.model.cpu_linears import cpu_stand_ins
from tinyspec.model.linears import KernelLinear

SIZES = [2, 4, 8, 16]
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
            assert not any(fact.own_way for fact in engine.contract.results.buckets)
            assert (engine.stats().drafted > 0) == (verify == "always")
            modules = engine.runner.model.named_modules()
            assert kernels_of(engine) == [n for n, m in modules if hasattr(m, "out_features")]
            always = engine.fingerprint
    assert found[0] == found[1]
    assert [type(module) for module in model.modules()] == types
    assert proven(model)[1] != always


def test_direct_is_refused_with_the_buckets_that_are_in_its_way():
    model = replace_linears(tiny(), ShapeSensitiveLinear)
    for sequences, listed in ((16, ": 2, 4, 16;"), (5, ": 2, 4;")):
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


def test_whether_weights_ask_for_gradients_is_in_the_fingerprint():
    """Of torch's own linears: it multiplies views of rows in another way."""
    model = tiny("llama", torch.float16)
    with engine_of(model) as engine:
        asking = engine.fingerprint
        model.requires_grad_(False)
        assert engine.fingerprint != asking
        model.requires_grad_(True)
        assert engine.fingerprint == asking


def layout(model):
    weight = model.model.norm.weight
    weight.data = weight.data.repeat_interleave(2)[::2]


def frozen(model):
    model.requires_grad_(False)


LOSES = [changes.threads, layout, changes.module, changes.hook, frozen]


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
