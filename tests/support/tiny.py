"""Tiny models with random weights, one of every family that this version serves."""

import random
from functools import cache

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

VOCAB = 128
# Head and width larger than a test needs, so that sums are long enough for their order to show.
_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_GROUPED = {**_COMMON, "num_key_value_heads": 2}
_CONFIGS = {
    "llama": _GROUPED,
    "mistral": {**_GROUPED, "sliding_window": 24},
    "qwen2": {**_GROUPED, "use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    "qwen3": {**_GROUPED, "head_dim": 32},
    "gemma2": {**_GROUPED, "head_dim": 16, "sliding_window": 24},
    "gpt2": {**_COMMON, "intermediate_size": None},
    "gpt_neox": _COMMON,
}
FAMILIES = tuple(_CONFIGS)


def config_of(family: str) -> PreTrainedConfig:
    """A config of ``family`` small enough for thousands of passes."""
    return AutoConfig.for_model(family, **_CONFIGS[family])


def tiny(
    family: str = "llama", dtype: torch.dtype = torch.float32, seed: int = 0
) -> PreTrainedModel:
    """A new tiny model in eval mode; the same weights for the same arguments."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        # transformers 5.17 takes SDPA for gemma2, which knows no softcap.
        how = {"attn_implementation": "eager"} if family == "gemma2" else {}
        model = AutoModelForCausalLM.from_config(config_of(family), **how)
    return model.to(dtype).eval()


@cache
def prompts(count: int, longest: int = 200, seed: int = 0) -> list[list[int]]:
    """Prompts of many lengths, 1 among them."""
    rng = random.Random(seed)
    lengths = [1, 2, 17, *(rng.randint(3, longest) for _ in range(count))][:count]
    return [[rng.randrange(VOCAB) for _ in range(n)] for n in lengths]


def hf_greedy(model: PreTrainedModel, prompt: list[int], n: int) -> list[int]:
    """What transformers' own ``generate`` yields for one unpadded prompt."""
    ids = torch.tensor([prompt], device=model.device)
    mask = torch.ones_like(ids)
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=n, do_sample=False, pad_token_id=0
    )
    return out[0, len(prompt) :].tolist()
