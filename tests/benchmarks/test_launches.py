"""Launches of a pass, recorded without a GPU, and how far one prompt travels: no farther than was
recorded."""

from unittest.mock import patch

import pytest
import torch

from benchmarks import launches
from benchmarks.count_files import count
from benchmarks.presets import PRESETS, build
from tinyspec.engine import engine
from tinyspec.kernels.twins import sample


def of_layers(kind, linear):
    """Passes of models of one and two layers, three sequences."""
    found = []
    for layers in (1, 2):
        with patch.dict(PRESETS["tiny"], model_type=kind):
            model = build("tiny", torch.bfloat16, "cpu", layers)
        model.generation_config.eos_token_id = None
        found.append(launches.decode_pass(model, 3, 40, linear))
    return found


ONCE = ("kv_write_kernel", "attention_kernel", "merge_kernel", "gated_kernel")
PARTS = {"add_rms_norm_kernel": 2, **dict.fromkeys(ONCE, 1)}
PRODUCTS = {"auto": {"aten.linear": 7}, "always": {"linear_kernel": 7}}


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("linear", ["auto", "always"])
def test_launches_of_a_pass(kind, linear):
    """13 a layer, whoever multiplies; 10 more."""
    one, two = of_layers(kind, linear)
    assert one.fetches == two.fetches == 1
    layer = two.counts - one.counts
    assert layer == {**PARTS, **PRODUCTS[linear]} and layer.total() == 13
    rest = one.counts - layer
    assert rest.total() == 10
    assert rest["sample_kernel"] == rest["sample_merge_kernel"] == 1


# Of a plain prompt: to lower with the numbers.
MOST_FILES, MOST_UPWARDS = 54, 3


def test_one_prompt():
    found = count(deterministic=False)
    assert len(found.upwards) <= MOST_UPWARDS, sorted(found.upwards)
    assert len(found.files) <= MOST_FILES, sorted(found.files)
    # Control: the way is seen from its one end to the other.
    assert {engine.__file__, sample.__file__} <= found.files
