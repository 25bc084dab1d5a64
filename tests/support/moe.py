"""Tiny mixtures of experts with random weights."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.support.tiny import VOCAB

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}
_FLASH = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16}
CONFIGS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 8},
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 96, "head_dim": 16},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 3},
    "gpt_oss": {"num_local_experts": 8, "head_dim": 16, "sliding_window": 24},
    "dbrx": {
        "d_model": 64,
        "n_heads": 4,
        "n_layers": 2,
        "max_seq_len": 512,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10_000.0, "clip_qkv": 8.0},
        "ffn_config": {"moe_num_experts": 8, "moe_top_k": 2, "ffn_hidden_size": 96},
    },
    "jetmoe": {"num_local_experts": 8, "kv_channels": 16},
    "longcat_flash": {
        **_FLASH,
        "num_layers": 1,
        "num_hidden_layers": 2,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "v_head_dim": 16,
        "ffn_hidden_size": 96,
        "expert_ffn_hidden_size": 96,
        "n_routed_experts": 8,
        "zero_expert_num": 2,
        "moe_topk": 2,
    },
}
SERVED = ("mixtral", "qwen3_moe", "olmoe", "gpt_oss")
# By loops of their own, not by transformers' experts interface; and which module the loop is in.
OWN_WAY = {"dbrx": "ffn.experts", "jetmoe": "input_linear", "longcat_flash": "experts"}


def tiny_moe(
    family: str = "qwen3_moe", dtype: torch.dtype = torch.float32, seed: int = 0
) -> PreTrainedModel:
    """A new tiny model in eval mode; the same weights for the same arguments."""
    changes = {**_COMMON, **CONFIGS[family]}
    config = AutoConfig.for_model(family, **changes)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 3:  # experts: not all families draw them
                    parameter.normal_(0, 0.2)
    return model.to(dtype)
