"""Launches of a pass, recorded without a GPU."""

from __future__ import annotations

from collections import Counter
from unittest.mock import patch

import pytest
import torch
import triton
import triton.language as tl

from benchmarks import launches
from benchmarks.launches import Launches, recorded
from benchmarks.presets import PRESETS, build


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
