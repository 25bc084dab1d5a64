"""Why modules run as they are: what their trial raised, and functions of other names, are told once
and by name."""

import logging
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.support import zoo
from tests.support.tiny import tiny
from tinyspec import Engine, EngineConfig, UnsupportedModelError
from tinyspec.model import attention_stand_ins, install, layer_trial, recurrent, short_conv, trial

CONFIG = EngineConfig(reference_rows=4, max_rows=8)


@pytest.fixture
def told(caplog):
    trial.tell.cache_clear()
    caplog.set_level(logging.INFO, "tinyspec")
    yield lambda: [line for line in caplog.messages if "has no stand-in" in line]
    trial.tell.cache_clear()


def no_memory(*_):
    raise torch.OutOfMemoryError("tried to allocate 20 GiB")


def test_modules_of_one_kind(told):
    """Another kind, or one that is called otherwise, is tried all the same."""
    linears = [nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 8)]

    def find(module):
        return module.out_features if module.out_features == 8 else no_memory()

    for _ in range(2):
        trials = trial.Trials()
        assert [trials.of(m, lambda m=m: find(m)) for m in linears] == [None, None, 8]
        why = "trying it raised OutOfMemoryError: tried to allocate 20 GiB"
        assert trials.causes == [f"Linear: {why}"] and told() == [f"Linear has no stand-in: {why}"]
        assert trials.of(linears[0], lambda: 3, "called otherwise") == 3
    quiet = trial.Trials((torch.OutOfMemoryError,))
    assert quiet.of(nn.LayerNorm(4), no_memory) is None and len(told()) == 1 and not quiet.causes


KINDS = [
    ("qwen3_5_text", recurrent, "Qwen3_5GatedDeltaNet"),
    ("bamba", recurrent, "BambaMixer"),
    ("lfm2", short_conv, "Lfm2ShortConv"),
]


@pytest.mark.parametrize("kind, module, layer", KINDS)
def test_a_model_that_is_refused_says_what_was_raised(kind, module, layer, told, monkeypatch):
    model = zoo.tiny(kind)
    monkeypatch.setattr(module, "close", no_memory)
    for _ in range(2):
        with pytest.raises(UnsupportedModelError, match=f"0 are known; {layer}: .*allocate 20 Gi"):
            Engine(model, config=CONFIG)
    (line,) = told()
    assert layer in line and "OutOfMemoryError" in line


def test_a_function_of_another_name_in_a_recurrent_layer(told, monkeypatch):
    monkeypatch.setattr(recurrent, "DELTA", "another_name")
    with pytest.raises(UnsupportedModelError, match=r"0 are known$"):
        Engine(zoo.tiny("qwen3_5_text"), config=CONFIG)
    (line,) = told()
    assert "Qwen3_5" in line and "causal_conv1d_fn" in line and "chunk_gated_delta_rule" in line


def test_attention(told, monkeypatch):
    """Of another name of the function that rotates, and of what is raised, the log tells; a
    stand-in that does not fit is no news."""
    model = zoo.tiny("cohere")
    Engine(model, config=CONFIG).close()
    Engine(zoo.tiny("phi3"), config=CONFIG).close()
    assert told() == []
    with monkeypatch.context() as patches:
        patches.setattr(attention_stand_ins, "ROTATE", "another_name")
        for _ in range(2):
            Engine(model, config=CONFIG).close()
    assert told() == ["CohereAttention has no stand-in: it does not rotate by another_name"]
    monkeypatch.setattr(attention_stand_ins.Trial, "run", no_memory)
    Engine(model, config=CONFIG).close()
    assert len(told()) == 2 and "OutOfMemoryError" in told()[1]


def test_layers(told, monkeypatch):
    """Of fused kernels."""
    monkeypatch.setattr(layer_trial, "fused_norm", no_memory)
    model = tiny()
    for _ in range(2):
        config = replace(CONFIG, max_model_len=64)
        with monkeypatch.context() as patches:
            patches.setattr(install, "fuses_layers", lambda config: True)
            Engine(model, config=config).close()
    (line,) = told()
    assert "LlamaRMSNorm" in line and "20 GiB" in line
