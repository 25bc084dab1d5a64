"""Probes run what passes run: contexts beyond a split, every output.

Each broken stand-in is one that a probe did not see before.
"""

import re
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.support import zoo
from tests.support.budget import first
from tests.support.tiny import config_of
from tinyspec import Engine, EngineConfig
from tinyspec.determinism import rows
from tinyspec.determinism.model_probe import ModelProbe
from tinyspec.determinism.proof import FIRST_PASSES, Prober
from tinyspec.determinism.rows import agree, keeps_places, probe_pool
from tinyspec.errors import UnsupportedModelError
from tinyspec.kernels import backend as kernels
from tinyspec.kernels import launch
from tinyspec.model.linears import linear_shape
from tinyspec.model.supported import SERVED

TWINS = kernels.load("torch")


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_difference_beyond_a_split(backend):
    """In the passes end to end that a first token waits for."""
    split = launch.attention(torch.float32, 16, torch.device("cpu")).split
    config = EngineConfig(reference_rows=8, max_model_len=1024)
    shape = config_of("llama")
    shape.update({"max_position_embeddings": 1024})

    def attend(q, k, v, metadata, **scores):
        out = TWINS.paged_attention(q, k, v, metadata, **scores)
        rows, tokens = metadata.cu_seqlens_q.diff().max(), metadata.seq_lens.max()
        return out * (1 + bool(rows == 6 and tokens > split))

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


ROUTED = ("gpt_oss", "mixtral", "llama4_text")
OTHERS = sorted(SERVED & set(zoo.BUILT) - set(ROUTED))
# Of rows alone: Gemma 3n's mix of copies.
NO_WEIGHTS = {("gemma3n_text", "matmul")}
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
        prober = Prober(engine.runner, engine.contract.modes)
        with prober.scratch.in_place():
            recorder = prober.prepare()
        modules = engine.runner.model.named_modules()
        linears = {name for name, module in modules if linear_shape(module) is not None}
    probed = {re.sub(r"\d+", "", name.partition(" of ")[0]) for name in prober.ops}
    outside = {
        (module, operator)
        for module, operator, *_ in recorder.matmuls
        if module not in linears and (kind, operator) not in NO_WEIGHTS
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
