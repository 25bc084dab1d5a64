"""Models by name, and what is taken for an engine's arguments: refused in words that help."""

import pytest
import torch

from tests.support.loading import saved
from tests.support.tiny import tiny
from tinyspec import AsyncEngine, Engine, UnsupportedModelError, doctor
from tinyspec.config import EngineConfig
from tinyspec.engine import input_processor as loading
from tinyspec.tools.demo import BUNDLED, THINKER


@pytest.mark.parametrize(
    ("how", "complaint"),
    [
        ({"device": "gpu"}, r"device='gpu' is not allowed: auto, cpu, cuda or cuda:N"),
        ({"device": "cuda"}, r"device='cuda' is not allowed: .* torch finds no CUDA device here"),
        ({"device": 3.5}, r"device=3.5 is not allowed"),
        ({"device": "mps"}, r"device='mps' is not allowed"),
        ({"dtype": "float99"}, r"dtype='float99' is not allowed: auto, float32, bfloat16"),
        ({"dtype": "nn"}, r"dtype='nn' is not allowed"),
        ({"torch_dtype": "float16"}, "torch_dtype='float16' .*it is called dtype here"),
        ({"device_map": "auto"}, "device_map='auto' .*it is called device here"),
        ({"revison": "v1"}, r"revison='v1' is not allowed: one of .*, revision, "),
        ({"max_model_len": 9}, r"max_model_len=9 .*EngineConfig\(max_model_len=...\) as config"),
        ({"gpu_memory_utilization": 0.9}, "=0.9 .*it is called memory_fraction in EngineConfig"),
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


def test_what_is_not_found(tmp_path):
    """The message names it, whatever transformers says."""
    for name in ("no/such-model", str(tmp_path)):
        with pytest.raises(ValueError, match=f"^model='{name}' is not allowed: a folder with a m"):
            Engine.from_pretrained(name)
    folder = saved(tmp_path)
    for name in ("flash_attention_5", "none/such"):
        with pytest.raises(ValueError, match=f"^attn_implementation='{name}' is not allowed: one "):
            Engine.from_pretrained(folder, attn_implementation=name)


def test_what_is_no_model_or_no_config():
    for call in (Engine, doctor):
        with pytest.raises(UnsupportedModelError, match=r"Engine.from_pretrained\('some/name'\)"):
            call("some/name")
    for config in ({}, {"page_size": 8}, "auto"):
        with pytest.raises(ValueError, match=r"config=.* is not allowed: None or an EngineConfig"):
            Engine(tiny(), None, config)
    with pytest.raises(ValueError, match=r"tokenizer='some/name' is not allowed: .*AutoTokenizer"):
        Engine(tiny(), "some/name")
    with pytest.raises(ValueError, match=r"tokenizer=EngineConfig.*config="):
        Engine(tiny(), EngineConfig())


OF_BOTH = {"revision": "v1", "trust_remote_code": True, "token": "x", "local_files_only": True}
OF_BOTH |= {"cache_dir": "there", "subfolder": "sub"}
OF_MODEL = {"attn_implementation": "eager", "variant": "fp16", "use_safetensors": True}


@pytest.mark.parametrize("how", [{}, OF_BOTH, OF_MODEL, OF_BOTH | OF_MODEL])
def test_what_is_handed_on(monkeypatch, how):
    """To transformers' loaders, each what it takes."""
    calls = {}

    def loader(name, result):
        def from_pretrained(path, **given):
            calls[name] = path, given
            return result

        return type(name, (), {"from_pretrained": staticmethod(from_pretrained)})

    monkeypatch.setattr(loading, "AutoModelForCausalLM", loader("model", tiny()))
    monkeypatch.setattr(loading, "AutoTokenizer", loader("tokenizer", None))
    asked = []
    monkeypatch.setattr(loading, "cached_files", lambda *given, **_: asked.append(given) or ["x"])
    Engine.from_pretrained("some/name", dtype="bfloat16", **how).close()
    assert calls["model"] == ("some/name", {"dtype": torch.bfloat16, **how})
    of_both = {name: value for name, value in how.items() if name in OF_BOTH}
    assert calls["tokenizer"] == ("some/name", of_both)
    quantized = object()
    Engine.from_pretrained("some/name", quantization_config=quantized, device="cpu").close()
    given = {"quantization_config": quantized, "device_map": {"": torch.device("cpu")}}
    assert calls["model"] == ("some/name", {"dtype": "auto", **given})


def test_other_doors_hand_on_too():
    given = {"revision": "main", "local_files_only": True}
    with Engine.from_pretrained(THINKER, **given) as engine:
        assert engine._thinker is not None and engine.tokenizer is not None
    with AsyncEngine.from_pretrained(BUNDLED, dtype="bfloat16", **given).engine as engine:
        assert engine.model.dtype == torch.bfloat16
