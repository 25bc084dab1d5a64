"""Models by name, and what is taken for an engine's arguments: refused in words that help."""

import pytest
import torch

from tests.support.tiny import tiny
from tinyspec import Engine, UnsupportedModelError
from tinyspec.engine import input_processor as loading
from tinyspec.tools.demo import BUNDLED


@pytest.mark.parametrize(
    ("how", "complaint"),
    [
        ({"device": "gpu"}, r"device='gpu' is not allowed: auto, cpu, cuda or cuda:N"),
        ({"device": "cuda"}, r"device='cuda' is not allowed: .* torch finds no CUDA device here"),
        ({"device": 3.5}, r"device=3.5 is not allowed"),
        ({"device": "mps"}, r"device='mps' is not allowed"),
        ({"dtype": "float99"}, r"dtype='float99' is not allowed: auto, float32, bfloat16"),
        ({"dtype": "nn"}, r"dtype='nn' is not allowed"),
    ],
)
def test_before_anything_is_loaded(monkeypatch, how, complaint):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(loading, "AutoModelForCausalLM", None)
    with pytest.raises(ValueError, match=complaint):
        Engine.from_pretrained(BUNDLED, **how)


def test_a_device_that_is_not_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert loading.checked_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(ValueError, match=r"device='cuda:2' .* torch finds 2 CUDA devices here"):
        loading.checked_device("cuda:2")


def test_a_name_that_is_not_found(tmp_path):
    """The message names it, whatever transformers says."""
    for name in ("no/such-model", str(tmp_path)):
        with pytest.raises(ValueError, match=f"^model='{name}' is not allowed: a folder with a m"):
            Engine.from_pretrained(name)


def test_what_is_no_model_or_no_config():
    with pytest.raises(UnsupportedModelError, match=r"Engine.from_pretrained\('some/name'\)"):
        Engine("some/name")
    for config in ({}, {"page_size": 8}, "auto"):
        with pytest.raises(ValueError, match=r"config=.* is not allowed: None or an EngineConfig"):
            Engine(tiny(), None, config)
    with pytest.raises(ValueError, match=r"tokenizer='some/name' is not allowed: .*AutoTokenizer"):
        Engine(tiny(), "some/name")
