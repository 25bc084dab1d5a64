"""Names outside of transformers' public interface: where one is missing, an engine says which."""

import subprocess
import sys

import pytest
from transformers import DynamicCache

from tests.support.loading import everything, unlike
from tests.support.tiny import tiny
from tests.support.zoo import tiny as of_zoo
from tinyspec import Engine, UnsupportedModelError

WITHOUT_IMPORTS = """
import transformers.integrations.moe, transformers.pytorch_utils
from transformers import LlamaConfig, LlamaForCausalLM

model = LlamaForCausalLM(LlamaConfig(
    vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
))
del transformers.integrations.moe.ALL_EXPERTS_FUNCTIONS, transformers.pytorch_utils.Conv1D

import tinyspec

try:
    tinyspec.Engine(model)
except tinyspec.UnsupportedModelError as error:
    print(error)
"""


def test_imports():
    """The package can be imported, and an engine says what is missing."""
    command = [sys.executable, "-c", WITHOUT_IMPORTS]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "LlamaForCausalLM is not supported: transformers 5." in said
    assert "transformers.pytorch_utils.Conv1D" in said
    assert "transformers.integrations.moe.ALL_EXPERTS_FUNCTIONS" in said


@pytest.mark.parametrize(
    "name", ["_attn_implementation_internal", "_experts_implementation_internal"]
)
def test_attributes_of_configs(name):
    model = tiny()
    del vars(model.config)[name]
    with pytest.raises(UnsupportedModelError, match=f"has no .*PreTrainedConfig.{name}"):
        Engine(model)
    assert not hasattr(model, "_tinyspec")


def test_layers_of_the_cache(monkeypatch):
    """Without them nothing says which models keep state other than keys and values."""
    monkeypatch.setattr(DynamicCache, "__init__", lambda self, **settings: None)
    with pytest.raises(UnsupportedModelError, match=r"has no DynamicCache.layers"):
        Engine(tiny())


def test_attributes_of_experts():
    model = of_zoo("qwen3_moe")
    experts = model.model.layers[1].mlp.experts
    del experts.is_transposed, experts.has_gate
    before = everything(model)
    with pytest.raises(UnsupportedModelError, match="did not set has_gate, is_transposed"):
        Engine(model)
    assert unlike(before, everything(model)) == []
