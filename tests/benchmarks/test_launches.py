"""Launches of a pass, recorded without a GPU."""

from __future__ import annotations

from collections import Counter
from unittest.mock import patch

import pytest
import torch
import triton
import triton.language as tl

from benchmarks import launches, roofline
from benchmarks.launches import Launches, recorded
from benchmarks.presets import PRESETS, build


def test_operators():
    """Views and allocations launch nothing; casts that change nothing do not either."""
    x, found = torch.ones(4, 8), Launches()
    with recorded(found):
        y = x.view(8, 4).t().float()
        torch.empty(9)
        z = y.contiguous()
        z.to(torch.bfloat16).add_(1)
    assert found.counts == {"aten.clone": 1, "aten._to_copy": 1, "aten.add_": 1}
    assert found.bytes == {"aten.clone": 2 * 128, "aten._to_copy": 128 + 64, "aten.add_": 64}


@triton.jit
def copy_kernel(in_ptr, out_ptr, size, BLOCK: tl.constexpr):
    n = tl.arange(0, BLOCK)
    tl.store(out_ptr + n, tl.load(in_ptr + n, mask=n < size), mask=n < size)


def test_kernels_do_not_run():
    x, out, found = torch.ones(3, 50), torch.zeros(3, 50), Launches()
    with recorded(found):
        copy_kernel[(1,)](x, out, 150, BLOCK=256)
    assert found.counts == {"copy_kernel": 1} and found.bytes == {"copy_kernel": 2 * 600}
    assert not out.any()


def of_layers(kind="llama", linear="auto"):
    """Passes of models of one and two layers, three sequences."""
    with patch.dict(PRESETS["tiny"], model_type=kind):
        models = [build("tiny", torch.bfloat16, "cpu", layers) for layers in (1, 2)]
    for model in models:
        model.generation_config.eos_token_id = None
    return [launches.decode_pass(model, 3, 40, linear) for model in models]


@pytest.fixture(scope="module")
def passes():
    return of_layers()


def a_layer(one, two):
    """What the second layer launches, by name."""
    return {name: count for name in two.counts if (count := two.counts[name] - one.counts[name])}


ONCE = ("kv_write_kernel", "attention_kernel", "merge_kernel", "gated_kernel")
PARTS = {"add_rms_norm_kernel": 2, **dict.fromkeys(ONCE, 1)}
PRODUCTS = {"auto": {"aten.linear": 7}, "always": {"linear_kernel": 7}}


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("linear", ["auto", "always"])
def test_launches_of_a_pass(kind, linear):
    """13 a layer, whoever multiplies; 10 more."""
    one, two = of_layers(kind, linear)
    assert one.fetches == two.fetches == 1
    assert a_layer(one, two) == {**PARTS, **PRODUCTS[linear]}
    assert sum(a_layer(one, two).values()) == 13
    rest = one.counts - Counter(a_layer(one, two))
    assert rest.total() == 10
    assert rest["sample_kernel"] == rest["sample_merge_kernel"] == 1


def test_bytes(passes):
    """All that must move does; a pass moves less than thrice as much."""
    shape = roofline.preset_config("tiny")
    least = sum(work.bytes for work in roofline.decode(shape, 3, 40).values())
    pages = launches.page_bytes(shape, 3, 40)
    assert pages == 2 * (40 + 1) * 3 * 2 * 2 * 16 * 2
    moved = passes[1].bytes.total() + pages
    assert least < moved < 3 * least
    text = launches.launch_table(passes[1], pages, least)
    assert f"| all | {passes[1].counts.total()} | {moved / 1e6:.4g} |" in text
