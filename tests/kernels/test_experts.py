"""Kernels of a mixture of experts against their twins, ``linear`` and fp64, and a row's experts
among those of others."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

from tests.kernels import cases
from tests.kernels.cases import DEVICE, assert_row_invariant, normal
from tinyspec.determinism.rows import cancelling_inputs
from tinyspec.kernels import experts as kernels
from tinyspec.kernels import hidden_states
from tinyspec.kernels.twins import layers as twins

EXPERTS, SLOTS = 5, 3
both = cases.both("module", kernels, twins)
modules = pytest.mark.parametrize("module", [kernels, twins], ids=["triton", "twin"])


def device(module: ModuleType) -> str:
    return "cpu" if module is twins else DEVICE


def routes(rows: int, experts: int = EXPERTS, slots: int = SLOTS, seed: int = 0) -> Tensor:
    """[rows, slots], no expert twice in a row."""
    return normal(rows, experts, seed=seed).argsort(1)[:, :slots].contiguous()


def layers(
    module: ModuleType, width: int, outputs: int, dtype: torch.dtype, stored: str = "nk"
) -> tuple[Tensor, Tensor]:
    """Weights [E, N, K] and biases [E, N]; "kn": the weights lie as gpt_oss has them."""
    weight = (normal(EXPERTS, outputs, width, seed=1) * width**-0.5).to(device(module), dtype)
    if stored == "kn":
        weight = weight.transpose(1, 2).contiguous().transpose(1, 2)
    return weight, normal(EXPERTS, outputs, seed=2).to(device(module), dtype)


@modules
@pytest.mark.parametrize("rows, experts, slots", [(1, 4, 2), (37, 5, 3), (700, 130, 8), (3, 1, 1)])
def test_sorted(module, rows, experts, slots):
    """Pairs by expert, then by number; where every expert begins, those without pairs too."""
    index = routes(rows, experts, slots).to(device(module))
    index[index == experts // 2] = 0  # an expert that nobody asks for
    pairs, starts = module.sort_by_expert(index, experts)
    chosen = index.flatten().tolist()
    expected = sorted(range(len(chosen)), key=lambda pair: (chosen[pair], pair))
    assert pairs.tolist() == expected
    assert starts.tolist() == [sum(c < e for c in chosen) for e in range(experts + 1)]


@both
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("stored", ["nk", "kn"])
@pytest.mark.parametrize("rows, width, outputs", [(1, 64, 64), (90, 63, 37), (40, 128, 130)])
def test_product_is_that_of_linear(rows, width, outputs, stored, module, dtype):
    """Bit for bit, pair by pair, with and without a bias."""
    weight, bias = layers(module, width, outputs, dtype, stored)
    index = routes(rows).to(weight.device)
    order = module.sort_by_expert(index, EXPERTS)
    x = normal(rows * SLOTS, width, seed=3).to(weight)
    linear = twins.linear if module is twins else hidden_states.linear
    for shift in (None, bias):
        out = module.grouped_linear(x, weight, shift, *order)
        for expert, own in enumerate(index.flatten() == e for e in range(EXPERTS)):
            one = None if shift is None else shift[expert]
            if own.any():
                assert torch.equal(out[own], linear(x[own], weight[expert], one)), expert


@both
def test_weights_are_rounded_as_they_are_read(module, dtype):
    """As autocast would have rounded them before."""
    weight, bias = layers(module, 64, 48, torch.float32)
    index = routes(9).to(weight.device)
    order = module.sort_by_expert(index, EXPERTS)
    x = normal(9 * SLOTS, 64, dtype=dtype).to(weight.device)
    before = module.grouped_linear(x, weight.to(dtype), bias.to(dtype), *order)
    assert torch.equal(module.grouped_linear(x, weight, bias, *order), before)


@both
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("scaled", [None, torch.float32], ids=["same", "fp32 scales"])
def test_added_in_order_of_experts(scaled, module, dtype):
    """Rounded where torch rounds, in ascending order of the numbers, however they are named."""
    index = routes(9).to(device(module))
    out = normal(9 * SLOTS, 70, dtype=dtype).to(index.device)
    scales = normal(9, SLOTS, seed=1, dtype=scaled or dtype).to(index.device)
    found = module.add_experts(out, scales, index, dtype)
    for row in range(9):
        parts = {
            int(e): out[SLOTS * row + s] * scales[row, s : s + 1] for s, e in enumerate(index[row])
        }
        total = torch.zeros(70, dtype=torch.float32, device=index.device)
        for number in sorted(parts):
            total = total + parts[number]
        assert torch.equal(found[row], total.to(dtype)), row
    flipped = out.view(9, SLOTS, 70).flip(1).reshape(-1, 70)
    assert torch.equal(module.add_experts(flipped, scales.flip(1), index.flip(1), dtype), found)


@both
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_row_invariant(module, dtype):
    """Alone and among any others, whichever experts these ask for, and whatever they hold."""
    weight, bias = layers(module, 100, 48, dtype)
    count = 40 if module is twins else 9  # rows through the interpreter take long
    index = routes(count).to(weight.device)
    pool = cancelling_inputs(count, 100, dtype, weight=weight[0]).to(weight.device)
    named = torch.cat((pool, index.to(dtype)), dim=1)

    def run(rows: Tensor) -> Tensor:
        chosen = rows[:, 100:].nan_to_num(0).clamp(0, EXPERTS - 1).long()
        pairs, starts = module.sort_by_expert(chosen, EXPERTS)
        x = rows[:, :100].repeat_interleave(SLOTS, 0)
        out = module.grouped_linear(x, weight, bias, pairs, starts)
        return module.add_experts(out, torch.ones_like(rows[:, :SLOTS]), chosen, dtype)

    assert_row_invariant(run, named)
