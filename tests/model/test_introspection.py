"""What is recorded of a model: keys that rows attend to, attention calls in order."""

import pytest
import torch
from transformers import AttentionMaskInterface
from transformers import masking_utils as masks

from tests.support.tiny import tiny as llama
from tests.support.zoo import tiny
from tinyspec import Engine, EngineConfig, SamplingParams, UnsupportedModelError
from tinyspec.kernels.twins.attention_plan import CausalMask
from tinyspec.model.introspection import reach_of
from tinyspec.runner import parity_check

ROWS = 12


def test_windows_and_chunks_of_any_size():
    padding = torch.zeros(1, dtype=torch.long)
    for size in (1, 2, 3, 16, 4096, 131072):
        window = reach_of(masks.sliding_window_causal_mask_function(size), ROWS, size)
        chunk = reach_of(masks.chunked_causal_mask_function(size, padding), ROWS, size)
        assert window == CausalMask(window=size)
        assert chunk == (CausalMask(chunk=size) if size > 1 else CausalMask(window=1)), (
            "one key is one key"
        )


CAUSAL = masks.causal_mask_function
UNKNOWN = {
    "both ways": lambda batch, head, q, kv: kv >= 0 * q,
    "without itself": lambda batch, head, q, kv: kv < q,
    "every second": masks.and_masks(CAUSAL, lambda batch, head, q, kv: (q - kv) % 2 == 0),
    "a prefix": masks.or_masks(CAUSAL, lambda batch, head, q, kv: kv < 3),
    "another window": masks.sliding_window_causal_mask_function(16),
}


def test_other_masks_are_not_known():
    for name, mask in UNKNOWN.items():
        assert [reach_of(mask, ROWS, size) for size in (None, 32)] == [None, None], name


def reaches(kind, **changes):
    model = tiny(kind)
    if changes:
        config = model.config
        for name, value in changes.items():
            setattr(config, name, value)
        model = type(model)(config).eval()
    with Engine(model, config=EngineConfig(max_model_len=128)) as engine:
        return [layer.reach for layer in engine.served.context.layers]


def test_windows_come_from_masks():
    """Qwen2-MoE's attention is not given its window, GPT-2 has none, Mistral's may be None."""
    assert set(reaches("qwen2_moe")) == {CausalMask(), CausalMask(window=16)}
    assert set(reaches("gpt2")) == {CausalMask()}
    assert set(reaches("mistral")) == {CausalMask(window=16)}
    assert set(reaches("mistral", sliding_window=None)) == {CausalMask()}
    assert set(reaches("mistral", sliding_window=4096)) == {CausalMask(window=4096)}
    assert set(reaches("llama4_text")) == {CausalMask(), CausalMask(chunk=32)}


def test_recording_leaves_nothing_behind():
    """Mask functions, generators, modes: neither after recording nor after a refusal."""
    before = dict(AttentionMaskInterface._global_mapping)
    model = tiny("gpt2").train()
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    with Engine(model):
        assert torch.equal(torch.rand(2), expected)
    assert model.transformer.drop.training and model.training
    for kind in ("doge", "moshi"):
        with pytest.raises(UnsupportedModelError):
            Engine(tiny(kind))
    assert dict(AttentionMaskInterface._global_mapping) == before


@pytest.mark.parametrize("known", [True, False])
def test_weights_that_show_nothing_are_tried_with_others(known, monkeypatch):
    """All zero, as before a checkpoint is loaded: of a type that is known, and of one that is
    compared with its own generate as well."""
    if not known:
        monkeypatch.setattr(parity_check, "SERVED", frozenset())
    model, filled = llama(), llama()
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    prompt, params = [list(range(3, 40))], SamplingParams(max_new_tokens=6)
    with Engine(filled) as engine:
        expected = engine.generate(prompt, params)[0].completions[0].token_ids
    with Engine(model) as engine:
        assert engine.generate(prompt, params)[0].completions[0].token_ids == [0] * 6
        model.load_state_dict(filled.state_dict())
        assert engine.generate(prompt, params)[0].completions[0].token_ids == expected
