"""What a proof rests on and what it survives: facts on disk, linear kernel, weights, adapters."""

import random
from dataclasses import replace

import pytest
import torch
from huggingface_hub import constants
from torch import nn

from tests.support.budget import first
from tests.support.mixes import bits
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


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path))
    return tmp_path / "tinyspec"


def proven(model, **config):
    """(facts, fingerprint) of an engine around ``model``."""
    with Engine(model, config=EngineConfig(**{**CONFIG, **config})) as engine:
        engine.contract.ensure()
        return engine.contract.results, engine.fingerprint


# Facts on disk


OTHERS = ({"linear": "always"}, {"reference_rows": 12}, {"max_rows": 20}, {"max_model_len": 100})


def test_which_settings_share_facts(probed, proven_on_demand):
    proven(tiny())
    for number, other in enumerate(OTHERS, 2):
        proven(tiny(), **other)
        assert len(probed) == number, other
    proven(tiny(), draft_window=3, verify="always", prefix_cache=False)
    assert len(probed) == 1 + len(OTHERS)


def test_fresh_facts_replace_those_on_disk(home, probed):
    proven(tiny())
    (file,) = home.iterdir()
    known = results.load(file.stem)
    results.store(file.stem, known.with_bucket(replace(known.buckets[0], seconds=12345.0)))
    assert proven(tiny())[0].buckets[0].seconds == 12345.0
    with Engine(tiny(), config=EngineConfig(**CONFIG)) as engine:
        assert engine.contract.probe(True, 1).buckets[0].seconds != 12345.0
        assert engine.generate(prompts(2), DETERMINISTIC)
    assert proven(tiny())[0].buckets[0].seconds != 12345.0
    assert [path.name for path in home.iterdir()] == [file.name], "no draft is left"


# The linear kernel


def third_rows_nudged(whole, only):
    """A forward that breaks fact 1 where ``only`` says so of the module."""

    def forward(self, x):
        out = whole(self, x)
        if not only(self):
            return out
        third = torch.arange(out.shape[-2]) % 3 == 1
        nudged = out.float() * (1 + 2**-6)
        return torch.where(third[:, None], nudged.to(out.dtype), out)

    return forward


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def broken(request, monkeypatch):
    """dtype; linears with 192 outputs break fact 1 in it, and the kernel does not."""
    served = cpu_stand_ins(nn.Sequential(nn.Linear(2, 2, dtype=request.param)), AttentionContext())
    cls = next(map(type, served.values()), nn.Linear)
    forward = third_rows_nudged(cls.forward, lambda module: module.out_features == 192)
    monkeypatch.setattr(cls, "forward", forward)
    return request.param


WIDE = [f"model.layers.{n}.mlp.{name}_proj" for n in range(2) for name in ("gate", "up")]


def test_the_kernel_serves_the_layers_that_break_the_reference_bucket(broken, probed):
    model = tiny(dtype=broken)
    types = [type(module) for module in model.modules()]
    with Engine(model, config=EngineConfig(**CONFIG)) as engine:
        plain = engine.contract.current_fingerprint().digest
        outputs = engine.generate(prompts(4), DETERMINISTIC)
        named = engine.runner.model.named_modules()
        served = [n for n, m in named if isinstance(m, KernelLinear)]
        assert served == WIDE == sorted(engine.contract.results.kernel_linears)
        assert 8 in engine.contract.results.canonical
        assert {o.fingerprint for o in outputs} == {engine.fingerprint} != {plain}
        alone = [bits(engine.generate([p], DETERMINISTIC)[0]) for p in prompts(4)]
        assert [bits(output) for output in outputs] == alone
    assert [type(module) for module in model.modules()] == types
    with Engine(model, config=EngineConfig(**CONFIG)) as engine:
        assert engine.fingerprint == outputs[0].fingerprint, "from disk, swapped without a probe"
        assert [bits(o) for o in engine.generate(prompts(4), DETERMINISTIC)] == alone
    assert len(probed) == 1


def test_a_pass_that_fails_leaves_no_kernel_behind(broken):
    model, raises = tiny(dtype=broken), list[bool]()

    def fail(module, args):
        if raises:
            raise RuntimeError("it fails")

    model.lm_head.register_forward_pre_hook(fail)
    proven(model)
    for fails in (False, True):
        with Engine(model, config=EngineConfig(**CONFIG)) as engine:
            raises += [True] * fails
            if fails:
                with pytest.raises(RuntimeError, match="it fails"):
                    engine.contract.ensure()
            else:
                engine.contract.ensure()
            raises.clear()
            modules = engine.runner.model.modules()
            assert any(isinstance(module, KernelLinear) for module in modules) != fails


def test_without_the_kernel_the_module_is_named(broken):
    model = tiny(dtype=broken)
    with Engine(model, config=EngineConfig(**CONFIG, linear="never")) as engine:
        with pytest.raises(DeterminismError, match=WIDE[0]):
            engine.generate([[1, 2]], DETERMINISTIC)
        assert engine.generate([[1, 2]])[0].completions[0].finish_reason == "length"


def test_a_kernel_that_does_not_help(broken, monkeypatch):
    whole = twins.linear

    def no_better(x, weight, bias=None):
        out = whole(x, weight, bias)
        out[1::3] *= 1.125
        return out

    monkeypatch.setattr(twins, "linear", no_better)
    model = tiny(dtype=broken)
    with Engine(model, config=EngineConfig(**CONFIG)) as engine:
        with pytest.raises(DeterminismError, match=WIDE[0]):
            engine.generate([[1, 2]], DETERMINISTIC)
        assert not any(isinstance(module, KernelLinear) for module in model.modules())
        assert engine.contract.results.kernel_linears == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_always_makes_every_bucket_canonical(dtype):
    model = tiny(dtype=dtype)
    types = [type(module) for module in model.modules()]
    config = EngineConfig(**CONFIG, linear="always", verify="direct")
    with Engine(model, config=config) as engine:
        outputs = engine.generate(prompts(5), DETERMINISTIC)
        assert engine.contract.results.canonical == SIZES
        assert not any(fact.own_way for fact in engine.contract.results.buckets)
        assert engine.stats().drafted == 0
        linears = [m for m in engine.runner.model.modules() if hasattr(m, "out_features")]
        assert linears and all(isinstance(linear, KernelLinear) for linear in linears)
        always = engine.fingerprint
    with Engine(model, config=EngineConfig(**CONFIG, linear="always", verify="always")) as engine:
        others = engine.generate(prompts(5), DETERMINISTIC)
        assert engine.fingerprint == always and engine.stats().drafted > 0
        assert [bits(output) for output in others] == [bits(output) for output in outputs]
    assert [type(module) for module in model.modules()] == types
    assert proven(model)[1] != always


def test_direct_is_refused_with_the_buckets_that_are_in_its_way():
    model = replace_linears(tiny(), ShapeSensitiveLinear)
    for sequences, listed in ((16, ": 2, 4, 16;"), (5, ": 2, 4;")):
        config = EngineConfig(**CONFIG, verify="direct", max_sequences=sequences)
        with (
            Engine(model, config=config) as engine,
            pytest.raises(DeterminismError, match=f"direct.*{sequences} rows.*{listed}"),
        ):
            engine.generate([[1, 2]], DETERMINISTIC)


# What a proof survives


def test_trained_weights_keep_the_proof_and_change_the_fingerprint(probed):
    model = tiny()
    with Engine(model, config=EngineConfig(**CONFIG)) as engine:
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
    with Engine(model, config=EngineConfig(**CONFIG)) as engine:
        asking = engine.fingerprint
        model.requires_grad_(False)
        assert engine.fingerprint != asking
        model.requires_grad_(True)
        assert engine.fingerprint == asking


@pytest.mark.parametrize("change", first(2, ["threads", "layout", "module", "hook", "frozen"], 1))
def test_what_loses_the_proof(probed, change, two_threads, proven_on_demand):
    model = tiny()
    with Engine(model, config=EngineConfig(**CONFIG)) as engine:
        engine.contract.ensure()
        if change == "threads":
            torch.set_num_threads(1)
        elif change == "module":
            model.model.layers[0].mlp.act_fn = nn.GELU()
        elif change == "frozen":
            model.requires_grad_(False)
        elif change == "hook":
            model.model.norm.register_forward_hook(lambda *_: None)
        else:
            weight = model.model.norm.weight
            weight.data = weight.data.repeat_interleave(2)[::2]
        assert engine.contract.refresh()
        assert engine.runner.buckets.canonical == []
        engine.contract.ensure()
        assert len(probed) == 2
        assert not engine.contract.refresh()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("size", [0, 1, 3, 1001])
def test_checksum(dtype, size):
    generator = torch.Generator().manual_seed(size)
    x = torch.randint(-100, 100, (size + 1,), generator=generator).to(dtype)
    for tensor in (x[:size], x[1:]):  # one of them does not begin at a multiple of eight bytes
        found = checksum(tensor)
        assert 0 <= found < 2**64 and found == checksum(tensor.clone())
        for n in random.Random(size).sample(range(size), min(size, 5)):
            other = tensor.clone()
            other[n] += 1
            assert checksum(other) != found
        if size > 1 and tensor[0] != tensor[-1]:
            swapped = tensor.clone()
            swapped[0], swapped[-1] = tensor[-1], tensor[0]
            assert checksum(swapped) != found
