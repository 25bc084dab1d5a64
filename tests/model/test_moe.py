"""Mixtures of experts: a deterministic request keeps its bits though which rows an expert gets
depends on who else is there.

Controls: without the kernel the same comparison fails where the probe is silenced, and where it is
not, it refuses.
"""

import random
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.budget import first
from tests.support.mixes import Liar, bits, crowd, needles, random_config, run_through, solo
from tests.support.tiny import hf_greedy, prompts
from tests.support.tolerances import OPERATOR, close
from tests.support.zoo import tiny
from tinyspec import DeterminismError, Engine, EngineConfig, SamplingParams, UnsupportedModelError
from tinyspec.determinism import proof
from tinyspec.kernels.backend import AttentionMetadata, load
from tinyspec.model import moe
from tinyspec.model.attention import AttentionContext
from tinyspec.model.moe import KernelExperts, expert_stand_ins, kernel_experts, kernel_forward
from tinyspec.runner.graphs import GraphSafety

SERVED = ("mixtral", "qwen3_moe", "olmoe", "gpt_oss")
DTYPES = (torch.float32, torch.bfloat16)
CONFIG = EngineConfig(reference_rows=16, max_rows=32)
SMALL = replace(CONFIG, max_rows=16)
NEEDLES = needles()[::2]
KERNELS = load("torch")


# Families whose experts differ: as most have them, transposed, with biases and gates apart.
KINDS = ("mixtral", "aria_text", "gpt_oss")


def experts_of(kind, dtype=torch.float32):
    """The experts of a layer, 4 of 64 -> 96 -> 64, which run one after the other by themselves."""
    model = tiny(kind).to(dtype)
    model.set_experts_implementation("eager")
    return next(iter(expert_stand_ins(model, AttentionContext(), always=False)))


def routes(rows, seed=0, slots=3):
    """x [rows, 64], experts and weights [rows, slots], no expert twice in a row."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 64, generator=generator)
    index = torch.rand(rows, 4, generator=generator).argsort(1)[:, :slots]
    return x, index, torch.rand(rows, slots, generator=generator)


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_row_invariant(kind, dtype):
    """A row alone, against the same row in any place, among others that choose as it does or not,
    whatever the order in which its experts are named; and near the module's own."""
    module = experts_of(kind, dtype)
    x, index, weights = routes(40)
    x = x.to(dtype)

    def run(order, flip=lambda t: t):
        return kernel_forward(module, x[order], flip(index[order]), flip(weights[order]), KERNELS)

    alone = torch.cat([run([n]) for n in range(40)])
    rng = random.Random(0)
    for turn in range(12):
        order = rng.sample(range(40), rng.randint(1, 40))
        given = run(order, (lambda t: t.flip(1)) if turn % 2 else (lambda t: t))
        assert torch.equal(given, alone[order]), turn
    assert dtype != torch.float32 or close(alone, module(x, index, weights), OPERATOR)


class Launches(TorchDispatchMode):
    """Counts operators that compute something, which are launches on a device."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        views = any(r.alias_info is not None for r in func._schema.returns)
        self.count += not views and "empty" not in func.__name__
        return out


@torch.no_grad()
def test_a_device_reads_nothing_and_launches_little():
    """By the kernels a layer of Qwen3-30B-A3B's kind, of 128 experts of which a row has 8, is fit
    for a graph, and at most 14 launches with its router. Controls: the twins are neither."""
    config = {"num_local_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True}
    module = tiny("qwen3_moe", **config).model.layers[0].mlp
    x = torch.randn(3, module.gate.weight.shape[1])
    found = {}
    for backend in ("torch", "triton"):
        kernels = load(backend)
        launched = []

        def counted(name, kernels=kernels, launched=launched):
            def run(*given, **named):
                with torch.utils._python_dispatch._disable_current_modes():
                    launched.append(name)
                    return getattr(kernels, name)(*given, **named)

            return run

        names = ("sort_by_expert", "grouped_linear", "add_experts")
        of_device = replace(kernels, **{name: counted(name) for name in names})
        with Launches() as launches, GraphSafety() as safety:
            _, weights, index = module.gate(x)
            out = kernel_forward(module.experts, x, index, weights, of_device)
        with GraphSafety() as whole:
            kernel_forward(module.experts, x, index, weights, kernels)
        assert safety.refusal is None and launched == [names[0], *names[1:2] * 2, names[2]]
        found[backend] = launches.count + len(launched), out
        if backend == "torch":
            assert whole.refusal is not None
    assert found["triton"][0] <= 14, found
    assert close(*(out for _, out in found.values()), OPERATOR)


@torch.no_grad()
@pytest.mark.parametrize("exact", [False, True])
def test_small_passes(exact, monkeypatch):
    """As on a GPU: up to some rows by the kernels, beyond by the user's choice where a pass is not
    canonical."""
    monkeypatch.setattr(moe, "_fast_rows", lambda _: 8)
    context, ran, grouped = AttentionContext(), [], KERNELS.grouped_linear
    module = next(iter(expert_stand_ins(tiny("mixtral"), context, always=False).values()))
    context.kernels = replace(
        KERNELS, grouped_linear=lambda *x: ran.append(len(x[0])) or grouped(*x)
    )
    for rows in (7, 8, 9):
        metadata = AttentionMetadata.of([(0, rows)], [[0]], 16, torch.device("cpu"))
        context.begin(replace(metadata, exact=exact), torch.arange(rows), torch.arange(rows))
        module(*routes(rows))
    assert [n // 3 for n in ran[::2]] == ([7, 8, 9] if exact else [7, 8])


@pytest.mark.crossed(5)
@pytest.mark.parametrize("dtype", first(1, DTYPES, 5), ids=str)
@pytest.mark.parametrize("family", first(1, SERVED, 5))
def test_the_contract(family, dtype):
    """Every kind of needle alone, and among 1 to 15 others of any kind, by any entry point; plain
    tokens are transformers'."""
    model = tiny(family).to(dtype)
    expected = [hf_greedy(model, prompt, 8) for prompt in prompts(4, 60)]
    rng = random.Random(1)
    with Engine(model, config=CONFIG) as engine:
        alone = [bits(solo(engine, needle)) for needle in NEEDLES]
        assert len(kernel_experts(engine.runner.model)) == model.config.num_hidden_layers
        outputs = run_through(engine, rng, [*NEEDLES, *crowd(rng, 8)])
        assert [bits(output) for output in outputs[: len(alone)]] == alone
        for deterministic in (False, True) if dtype == torch.float32 else ():
            params = SamplingParams(max_new_tokens=8, deterministic=deterministic)
            outputs = engine.generate(prompts(4, 60), params)
            assert [o.completions[0].token_ids for o in outputs] == expected
    with Engine(model, config=random_config(rng, CONFIG.reference_rows, Liar(0))) as engine:
        outputs = run_through(engine, rng, [*NEEDLES, *crowd(rng, 5)])
        assert [bits(output) for output in outputs[: len(alone)]] == alone


def without_the_kernel(model, config):
    """Bits of needles alone, and in a crowd, though the probe would refuse them."""
    with Engine(model, config=config) as engine:
        assert not kernel_experts(model)
        alone = [bits(solo(engine, needle)) for needle in NEEDLES]
        others = crowd(random.Random(3), 8)
        outputs = engine.generate(*zip(*[*NEEDLES, *others], strict=True))
    return alone, [bits(output) for output in outputs[: len(alone)]]


@pytest.mark.parametrize(
    "implementation", ["grouped_mm", pytest.param("eager", marks=pytest.mark.slow("crosses", 4))]
)
def test_control_other_implementations(monkeypatch, implementation):
    """transformers' own break the contract, and are refused by name."""
    config = replace(CONFIG, linear="never")
    model = tiny("qwen3_moe")
    model.set_experts_implementation(implementation)
    with Engine(model, config=config) as engine:
        with pytest.raises(DeterminismError, match=r"layers\.0\.mlp\.experts: the shapes"):
            solo(engine, NEEDLES[0])
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


def test_the_users_choice_is_of_plain_forwards_alone():
    """Another one while the engine is open: canonical passes run as they did."""
    params = SamplingParams(max_new_tokens=4, deterministic=True)
    model = tiny("qwen3_moe")
    with Engine(model, config=SMALL) as engine:
        first = engine.generate([[1, 2, 3]], params)[0]
        model.set_experts_implementation("eager")
        again = engine.generate([[1, 2, 3]], params)[0]
        assert model.get_experts_implementation()[""] == "eager"
    assert not any(isinstance(module, KernelExperts) for module in model.modules())
    assert again.fingerprint == first.fingerprint and bits(again) == bits(first)
    with Engine(model, config=replace(SMALL, linear="never")) as engine:
        assert engine.fingerprint != first.fingerprint, "control: it tells how experts run"


def test_experts_that_transformers_default_cannot_run():
    """The message names them and what does."""
    model = tiny("mixtral", hidden_size=34, intermediate_size=48, num_local_experts=3)
    with pytest.raises(RuntimeError, match="strides"), torch.no_grad():
        model(torch.tensor([[1, 2, 3]]))
    named = r"layers\.0\.mlp\.experts.*strides.*set_experts_implementation"
    with pytest.raises(UnsupportedModelError, match=named):
        Engine(model)
    model.set_experts_implementation("eager")
    with Engine(model, config=CONFIG) as engine:
        params = SamplingParams(max_new_tokens=6)
        assert engine.generate([[1, 2, 3]], params)[0].completions[0].finish_reason == "length"


def test_experts_with_an_unknown_part_are_not_served():
    """What a later transformers puts behind the experts under another name is not left out."""
    model = tiny("qwen3_moe")
    for layer in model.model.layers:
        if hasattr(layer.mlp, "experts"):
            layer.mlp.experts.late_norm = torch.nn.RMSNorm(8)
    with Engine(model, config=CONFIG) as engine:
        assert kernel_experts(engine.runner.model) == {}
        with pytest.raises(DeterminismError, match="experts"):
            engine.generate([[1, 2, 3]], SamplingParams(deterministic=True))
