"""Mixtures of experts: a deterministic request keeps its bits though which rows an expert gets
depends on who else is there.

Controls: without the kernel the same comparison fails where the probe is silenced, and where it is
not, it refuses.
"""

import random
from inspect import signature

import pytest
import torch
from transformers.integrations.moe import use_experts_implementation

from tests.support.budget import first
from tests.support.mixes import Liar, bits, crowd, needles, random_config, run_through, solo
from tests.support.tiny import hf_greedy, prompts
from tests.support.tolerances import OPERATOR, close
from tests.support.zoo import tiny
from tinyspec import (
    DeterminismError,
    Engine,
    EngineConfig,
    SamplingParams,
    UnsupportedModelError,
)
from tinyspec.determinism import proof
from tinyspec.kernels.twins.layers import linear
from tinyspec.model.moe import KernelExperts, kernel_experts, kernel_forward

SERVED = ("mixtral", "qwen3_moe", "olmoe", "gpt_oss")
DTYPES = (torch.float32, torch.bfloat16)
REFERENCE = 16


class Config:
    """What an experts class asks a config for."""

    def __init__(self, **settings):
        self.__dict__.update(settings)
        self._experts_implementation = "eager"


def experts_of(has_gate, is_transposed, has_bias, is_concatenated, norm, dtype=torch.float32):
    """A module of the decorated kind, 5 experts, 24 -> 64 -> 24. Of odd widths not
    even an activation keeps its bits, which the probe finds."""

    @use_experts_implementation(
        has_gate=has_gate,
        is_transposed=is_transposed,
        has_bias=has_bias,
        is_concatenated=is_concatenated,
        **({"has_post_expert_norm": True} if norm else {}),
    )
    class Experts(torch.nn.Module):
        def __init__(self, config):
            super().__init__()
            self.num_experts = 5
            self.act_fn = torch.nn.SiLU()
            wide = 128 if has_gate else 64
            self.name = "gate_up_proj" if has_gate else "up_proj"
            for name, out, width in ((self.name, wide, 24), ("down_proj", 24, 64)):
                shape = (5, width, out) if is_transposed else (5, out, width)
                self.register_parameter(name, torch.nn.Parameter(torch.randn(shape) / 4))
                if has_bias:
                    bias = torch.nn.Parameter(torch.randn(5, out))
                    self.register_parameter(f"{name}_bias", bias)
            if norm:
                self.post_expert_norm = torch.nn.RMSNorm(24)

        def forward(self, x, index, weights):
            """Every pair by itself, in the dtype of the weights."""
            rows = []
            for row, chosen, scales in zip(x, index, weights, strict=True):
                total = 0
                for expert, scale in zip(chosen, scales, strict=True):
                    hidden = self.matmul(self.name, row[None], expert)
                    hidden = self._apply_gate(hidden) if has_gate else self.act_fn(hidden)
                    hidden = self.matmul("down_proj", hidden, expert)
                    hidden = self.post_expert_norm(hidden) if norm else hidden
                    total = total + hidden * scale
                rows.append(total)
            return torch.cat(rows)

        def matmul(self, name, x, expert):
            weight = getattr(self, name)[expert]
            out = x @ (weight if is_transposed else weight.T)
            return out + getattr(self, f"{name}_bias")[expert] if has_bias else out

    if not is_concatenated:

        def apart(self, gate_up):
            return self.act_fn(gate_up[..., ::2]) * gate_up[..., 1::2]

        Experts._apply_gate = apart
    return Experts(Config()).to(dtype).eval()


KINDS = {
    "plain": (True, False, False, True, False),
    "transposed": (True, True, False, True, False),
    "gpt_oss": (True, True, True, False, False),
    "no gate": (False, False, False, True, False),
}
if "has_post_expert_norm" in signature(use_experts_implementation).parameters:  # not in 5.17
    KINDS["norm"] = (True, False, True, True, True)


def routes(rows, seed=0, slots=3):
    """x [rows, 24], experts and weights [rows, slots], no expert twice in a row."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 24, generator=generator)
    index = torch.rand(rows, 5, generator=generator).argsort(1)[:, :slots]
    return x, index, torch.rand(rows, slots, generator=generator)


@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 2, 37])
@pytest.mark.parametrize("kind", KINDS)
def test_matches_reference(kind, rows):
    module = experts_of(*KINDS[kind])
    x, index, weights = routes(rows)
    expected = module(x, index, weights)
    assert close(kernel_forward(module, x, index, weights, linear), expected, OPERATOR)


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_row_invariant(kind, dtype):
    """A row alone, against the same row in any place, among others that choose as it does or not,
    whatever the order in which its experts are named."""
    module = experts_of(*KINDS[kind], dtype=dtype)
    x, index, weights = routes(40)
    x = x.to(dtype)
    alone = [
        kernel_forward(module, x[n : n + 1], index[n : n + 1], weights[n : n + 1], linear)
        for n in range(40)
    ]
    rng = random.Random(0)
    for turn in range(12):
        order = rng.sample(range(40), rng.randint(1, 40))
        flip = (lambda t: t.flip(1)) if turn % 2 else (lambda t: t)
        given = kernel_forward(module, x[order], flip(index[order]), flip(weights[order]), linear)
        assert torch.equal(given, torch.cat([alone[n] for n in order])), turn


@pytest.mark.crossed(5)
@pytest.mark.parametrize("dtype", first(1, DTYPES, 5), ids=str)
@pytest.mark.parametrize("family", first(1, SERVED, 5))
def test_the_contract(family, dtype):
    """Every kind of needle alone, and among 1 to 15 others of any kind, by any entry point."""
    model = tiny(family).to(dtype)
    rng = random.Random(1)
    with Engine(model, config=EngineConfig(reference_rows=REFERENCE)) as engine:
        alone = [bits(solo(engine, needle)) for needle in needles()]
        assert len(kernel_experts(engine.runner.model)) == model.config.num_hidden_layers
        for size in (1, 4, 15):
            outputs = run_through(engine, rng, [*needles(), *crowd(rng, size)])
            assert [bits(output) for output in outputs[: len(alone)]] == alone, size
    with Engine(model, config=random_config(rng, REFERENCE, Liar(0))) as engine:
        outputs = run_through(engine, rng, [*needles(), *crowd(rng, 8)])
        assert [bits(output) for output in outputs[: len(alone)]] == alone


@pytest.mark.parametrize("family", first(1, SERVED, 1.3))
def test_plain_tokens_are_transformers(family):
    model = tiny(family)
    expected = [hf_greedy(model, prompt, 12) for prompt in prompts(8, 60)]
    with Engine(model) as engine:
        outputs = engine.generate(prompts(8, 60), SamplingParams(max_new_tokens=12))
        both = engine.generate(
            prompts(8, 60), SamplingParams(max_new_tokens=12, deterministic=True)
        )
    assert [o.completions[0].token_ids for o in outputs] == expected
    assert [o.completions[0].token_ids for o in both] == expected


def without_the_kernel(model, config):
    """Bits of needles alone, and in a crowd, though the probe would refuse them."""
    with Engine(model, config=config) as engine:
        assert not kernel_experts(model)
        alone = [bits(solo(engine, needle)) for needle in needles()]
        others = crowd(random.Random(3), 12)
        outputs = engine.generate(*zip(*[*needles(), *others], strict=True))
    return alone, [bits(output) for output in outputs[: len(alone)]]


@pytest.mark.parametrize(
    "implementation", ["grouped_mm", pytest.param("eager", marks=pytest.mark.slow("crosses", 4))]
)
def test_control_other_implementations(monkeypatch, implementation):
    """transformers' own break the contract, and are refused by name."""
    config = EngineConfig(reference_rows=REFERENCE, linear="never")
    model = tiny("qwen3_moe")
    model.set_experts_implementation(implementation)
    with Engine(model, config=config) as engine:
        with pytest.raises(DeterminismError, match=r"layers\.0\.mlp\.experts: the shapes"):
            solo(engine, needles()[0])
        assert engine.generate([[1, 2, 3]])[0].completions[0].finish_reason == "length"
    monkeypatch.setattr(proof, "data_dependent", lambda passes: [])
    found = []
    for dtype in DTYPES:
        model = tiny("qwen3_moe").to(dtype)
        model.set_experts_implementation(implementation)
        try:
            found.append(without_the_kernel(model, config))
        except DeterminismError:  # the probe of the model end to end may see it as well
            found.append(("refused", None))
    assert any(alone != among for alone, among in found)


@pytest.mark.parametrize("implementation", first(1, ["grouped_mm", "batched_mm", "eager"], 2))
def test_the_users_choice_stays(implementation):
    model = tiny("mixtral")
    model.set_experts_implementation(implementation)
    with Engine(model) as engine:
        served = engine.runner.model
        assert len(kernel_experts(served)) == model.config.num_hidden_layers
        engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=2, deterministic=True))
        assert model.get_experts_implementation()[""] == implementation
    assert not any(isinstance(module, KernelExperts) for module in model.modules())


@pytest.mark.slow("crosses", 3)
def test_the_users_choice_is_of_plain_forwards_alone():
    """Another one while the engine is open, or before: canonical passes run as they did."""
    params = SamplingParams(max_new_tokens=4, deterministic=True)
    model = tiny("qwen3_moe")
    with Engine(model) as engine:
        first = engine.generate([[1, 2, 3]], params)[0]
        model.set_experts_implementation("eager")
        found = [engine.generate([[1, 2, 3]], params)[0]]
        assert model.get_experts_implementation()[""] == "eager"
    with Engine(model) as engine:
        found.append(engine.generate([[1, 2, 3]], params)[0])
    assert all(again.fingerprint == first.fingerprint for again in found)
    assert all(bits(again) == bits(first) for again in found)
    with Engine(model, config=EngineConfig(linear="never")) as engine:
        assert engine.fingerprint != first.fingerprint, "control: it tells how experts run"


ODD = {
    "mixtral": {"hidden_size": 34, "intermediate_size": 48, "num_local_experts": 3},
    "qwen2_moe": {"moe_intermediate_size": 33, "num_experts": 5, "head_dim": 16},
    "qwen3_moe": {"moe_intermediate_size": 37, "num_experts": 1, "num_experts_per_tok": 1},
    "olmoe": {"intermediate_size": 33, "num_experts": 7},
}


def depends_on_place(weight):
    """Whether a row's product with ``weight`` has other bits at another of REFERENCE rows."""
    torch.manual_seed(0)
    row = torch.randn(weight.shape[1])
    with torch.no_grad():
        found = torch.nn.functional.linear(row.expand(REFERENCE, -1).contiguous(), weight)
    return not all(torch.equal(found[0], other) for other in found)


@pytest.mark.parametrize("family", first(1, ODD, 1))
def test_odd_sizes(family):
    """transformers' default cannot run these experts: the message names them and what does. So is
    a router named where torch mixes rows of such a width (fp32 on AVX2 without AVX-512)."""
    model = tiny(family, **ODD[family])
    with pytest.raises(RuntimeError, match="strides"), torch.no_grad():
        model(torch.tensor([[1, 2, 3]]))
    named = r"layers\.0\.mlp\.experts.*strides.*set_experts_implementation"
    with pytest.raises(UnsupportedModelError, match=named):
        Engine(model)
    model.set_experts_implementation("eager")
    params = SamplingParams(max_new_tokens=6, deterministic=True, logprobs=True)
    with Engine(model, config=EngineConfig(reference_rows=REFERENCE)) as engine:
        if depends_on_place(model.model.layers[0].mlp.gate.weight):
            with pytest.raises(DeterminismError, match=r"layers\.0\.mlp\.gate: linear: at 16 rows"):
                engine.generate([[1, 2, 3]], params)
            return
        alone = bits(solo(engine, ([1, 2, 3], params)))
        others = crowd(random.Random(2), 4)
        outputs = engine.generate(*zip(*[([1, 2, 3], params), *others], strict=True))
        assert bits(outputs[0]) == alone


def test_experts_with_an_unknown_part_are_not_served():
    """What a later transformers puts behind the experts under another name is not left out."""
    model = tiny("qwen3_moe")
    for layer in model.model.layers:
        if hasattr(layer.mlp, "experts"):
            layer.mlp.experts.late_norm = torch.nn.RMSNorm(8)
    with Engine(model, config=EngineConfig(reference_rows=REFERENCE)) as engine:
        assert kernel_experts(engine.runner.model) == {}
        with pytest.raises(DeterminismError, match="experts"):
            engine.generate([[1, 2, 3]], SamplingParams(deterministic=True))
