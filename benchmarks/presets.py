"""Models of a named shape with random weights, built without a network.

Random weights: a standard deviation of 0.06 rather than 0.02, because smaller ones leave the logits
nearly equal, with more ties than a trained model has. Random logits are still flatter than a
trained model's: `sharpen` scales them. Knows no measurement.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

WEIGHT_STD = 0.06
# Factors of the unembedding that bring the mean entropy of the next token near 2 nats.
SHARPNESS = {"tiny": 7.0, "small": 4.0}

PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {  # for smoke runs
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 256,
    },
    "small": {
        "model_type": "llama",
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": 8192,
        "max_position_embeddings": 4096,
    },
    "hybrid": {  # of Qwen3.5's shape
        "model_type": "qwen3_5_text",
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 12,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "vocab_size": 8192,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    },
    "tiny-moe": {
        "model_type": "qwen3_moe",
        "hidden_size": 64,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 256,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    },
    "qwen3-0.6b": {
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "tie_word_embeddings": True,
    },
    "llama-3.1-8b": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": False,
    },
}


PRESETS["qwen3.5-9b"] = {
    **PRESETS["hybrid"],
    **{"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32, "head_dim": 256},
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 8,
    **{"num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 248320},
    **{"linear_num_key_heads": 16, "linear_num_value_heads": 32},
    **{"linear_key_head_dim": 128, "linear_value_head_dim": 128},
    "tie_word_embeddings": False,
}
PRESETS["qwen3-30b-a3b, 12 layers"] = {  # of 48
    **PRESETS["qwen3-0.6b"],
    **{"model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 12},
    **{"num_attention_heads": 32, "num_key_value_heads": 4, "tie_word_embeddings": False},
    **{"intermediate_size": 6144, "moe_intermediate_size": 768, "norm_topk_prob": True},
    **{"num_experts": 128, "num_experts_per_tok": 8},
}
PRESETS["small-moe"] = {
    **PRESETS["tiny-moe"],
    **{"hidden_size": 256, "moe_intermediate_size": 512, "num_hidden_layers": 4, "head_dim": 64},
    **{"vocab_size": 8192, "max_position_embeddings": 4096},
}


def build(
    preset: str,
    dtype: torch.dtype,
    device: str,
    layers: int | None = None,
    seed: int = 0,
    positions: int | None = None,
) -> nn.Module:
    """A model of the preset's shape, in eval mode, its weights drawn on `device`.

    layers, positions: instead of the preset's, at most and at least.
    """
    shape = dict(PRESETS[preset])
    if layers is not None:
        shape["num_hidden_layers"] = min(layers, shape["num_hidden_layers"])
    if positions is not None:
        shape["max_position_embeddings"] = max(positions, shape.get("max_position_embeddings", 0))
    return drawn(shape, dtype, device, seed, bos_token_id=1)


def drawn(
    shape: dict[str, Any], dtype: torch.dtype, device: str, seed: int = 0, **more: Any
) -> nn.Module:
    """A model of a config's settings ``shape`` and ``more``, in eval mode, that no token ends."""
    settings = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, **shape, **more}
    settings.setdefault("initializer_range", WEIGHT_STD)
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    model.generation_config.eos_token_id = None
    return model.to(device).eval()


def sharpen(model: nn.Module, preset: str) -> nn.Module:
    """The same model with logits scaled, so that its next token has a trained model's entropy; a
    preset that no factor is known of stays as it is."""
    assert not model.config.tie_word_embeddings, "the embedding would be scaled as well"
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(SHARPNESS.get(preset, 1.0))
    return model
