"""The fused attention module against transformers' attention interface: the same model, decoding.

Both sides are engines over the same weights and run in turns in one process; the ratio is that of
their medians, above 1 if the fused module is faster. Run with

    pytest benchmarks/bench_attention.py --full --benchmark-json=FILE [--rounds N]
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks import roofline
from benchmarks.workloads import DEVICE, Workload, in_turns, of_shapes
from tinyspec import Engine, EngineConfig

# Standard, with norms of q and k, with pairs of neighbours, with projections in one.
FAMILIES = ("llama", "qwen3", "glm4", "phi3")


def build(family: str, dtype: torch.dtype, smoke: bool) -> Any:
    """6 layers of width 512, 8 heads of 64, 4 of keys and values, random weights."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family,
        vocab_size=256 if smoke else 8192,
        hidden_size=64 if smoke else 512,
        intermediate_size=96 if smoke else 1408,
        num_hidden_layers=2 if smoke else 6,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=16 if smoke else 64,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype).to(DEVICE).eval()
    return model


def attention_modules(model: Any) -> list[Any]:
    """The attention module of every layer."""
    return [layer.self_attn for layer in model.model.layers]


def interface_only(model: Any) -> Any:
    """The model with a forward set on each attention module, which therefore gets no stand-in."""
    for module in attention_modules(model):
        module.forward = partial(type(module).forward, module)
    return model


def have_stand_ins(engine: Engine, modules: list[Any]) -> list[bool]:
    """Which of the modules that were in the model before have a stand-in in the engine."""
    replaced = {id(one.own) for one in engine.patched.swapped}
    return [id(module) in replaced for module in modules]


def serve(engine: Engine, work: Workload) -> list[list[int]]:
    outputs = engine.generate([list(p) for p in work.prompts], work.params(()))
    return [output.completions[0].token_ids for output in outputs]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("requests", [1, 16])
@pytest.mark.parametrize("family", FAMILIES)
def bench_attention(
    benchmark: Any, family: str, requests: int, dtype: str, smoke: bool, rounds: int
) -> None:
    """``requests`` prompts of 64 tokens, 40 out; same tokens on both sides in fp32.

    over_floor: on a GPU of roofline.py's table, the fused side over the least that it needs.
    """
    models = [build(family, getattr(torch, dtype), smoke) for _ in range(2)]
    prompt, out = (8, 4) if smoke else (64, 40)
    work = of_shapes(family, [(prompt, out)] * requests, models[0].config.vocab_size)
    own = [attention_modules(model) for model in models]
    config = EngineConfig(prefix_cache=False)
    with (
        Engine(models[0], config=config) as fused,
        Engine(interface_only(models[1]), config=config) as interface,
    ):
        assert all(have_stand_ins(fused, own[0]))
        assert not any(have_stand_ins(interface, own[1]))
        if dtype == "float32":
            assert serve(fused, work) == serve(interface, work)
        ratio = in_turns(
            benchmark, lambda: serve(fused, work), lambda: serve(interface, work), rounds
        )
    benchmark.extra_info["ratio"] = round(ratio, 3)
    if benchmark.stats is not None and (device := roofline.here()) is not None:
        shape = models[0].config
        least = roofline.generation(shape, requests, prompt, out, device, dtype)
        benchmark.extra_info["over_floor"] = round(benchmark.stats.stats.median / least, 2)
