"""A tiny model with random weights for every text causal LM that transformers knows.

The weights are drawn so that attention matters: what a model says next depends on its first tokens,
it says many different things, and rarely has two of them nearly the same score.
"""

import math
import random
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.pytorch_utils import Conv1D

from tests.support.zoo_configs import (
    CANNOT,
    EXCEPTIONS,
    FROM_5_24,
    GAINS,
    LAYERS,
    PER_LAYER,
    SEEDS,
    SIZES,
    VOCAB,
)

MODEL_TYPES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
FEW = 40
_OLDER = version("transformers").startswith(tuple(f"5.{n}." for n in range(24)))
_LEFT_OUT = {*CANNOT, *(FROM_5_24 if _OLDER else ())}
BUILT = tuple(kind for kind in MODEL_TYPES if kind not in _LEFT_OUT)


def tiny(
    model_type: str, seed: int | None = None, gain: float | None = None, **changes: Any
) -> PreTrainedModel:
    """The causal LM of ``model_type``, small, fp32, in eval mode, never to stop early.

    gain: how much a matrix makes of a row of ones' size (by default by the table).
    changes: of the config. The same weights for the same arguments.
    """
    seed = SEEDS.get(model_type, 0) if seed is None else seed
    gain = gain or GAINS.get(model_type, 1.5)
    config = config_of(model_type, **changes)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        model = model.float().eval()
        with torch.no_grad():
            _draw(model, gain)
            _remember(model)
    generation = model.generation_config
    generation.eos_token_id, generation.pad_token_id = None, 0
    generation.forced_eos_token_id = generation.forced_bos_token_id = None
    generation.suppress_tokens = generation.begin_suppress_tokens = None
    return model


def _remember(model: PreTrainedModel) -> None:
    """Let recurrent states lose about a thousandth with every token: as they are initialised a few
    tokens wipe them, and nobody would see that one is wrong."""
    for module in model.modules():
        if isinstance(getattr(module, "A_log", None), nn.Parameter) and hasattr(module, "dt_bias"):
            module.A_log.fill_(-3.9)
            module.dt_bias.fill_(-3.0)


def config_of(model_type: str, **more: Any) -> PreTrainedConfig:
    """A small config of ``model_type``, with ``more``."""
    assistant = model_type.endswith("_assistant")
    changes = {} if assistant else _smaller(AutoConfig.for_model(model_type))
    return AutoConfig.for_model(model_type, **{**changes, **EXCEPTIONS.get(model_type, {}), **more})


def _smaller(config: PreTrainedConfig) -> dict[str, Any]:
    """Keyword arguments that make another config of the same class small."""
    given = config.to_dict()
    own = EXCEPTIONS.get(config.model_type, {})
    kinds = {name: list(dict.fromkeys(given[name])) for name in PER_LAYER if given.get(name)}
    count = 4 if any(len(found) > 1 for found in kinds.values()) else 2
    count = next((own[name] for name in LAYERS if name in own), count)
    changes: dict[str, Any] = {}
    for name, value in given.items():
        if name in LAYERS:
            changes[name] = count
        elif name in kinds:
            changes[name] = _cover(kinds[name], count, cycled=name == "layer_types")
        elif isinstance(value, dict) and name.endswith("config") and name != "per_layer_config":
            part = getattr(config, name)
            changes[name] = {
                **_smaller(part),
                **({"model_type": part.model_type} if part.model_type else {}),
            }
        elif name in SIZES and (value is not None or name == "head_dim"):
            changes[name] = SIZES[name]
    if given.get("kv_lora_rank"):
        changes["num_key_value_heads"] = changes["num_attention_heads"]
        if given.get("head_dim") == given["qk_rope_head_dim"]:
            changes["head_dim"] = changes["qk_rope_head_dim"]
    return {**changes, **own}


def _cover(kinds: list[str], count: int, cycled: bool) -> list[str]:
    """``count`` layers of all kinds: over and over, or the last kind to the end."""
    if cycled:
        return [kinds[n % len(kinds)] for n in range(count)]
    return (kinds + kinds[-1:] * count)[:count]


def _draw(model: PreTrainedModel, gain: float) -> None:
    """Draw all parameters anew: matrices by their fan-in, vectors about what they begin with."""
    head = model.get_output_embeddings()
    head_weight = getattr(head, "weight", None)
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            noise = torch.randn_like(parameter)
            if parameter.numel() == max(parameter.shape, default=1):
                begin = torch.nan_to_num(parameter, posinf=0, neginf=0).clamp(-20, 20)
                parameter.copy_(begin + 0.1 * noise)
            elif parameter is head_weight:
                parameter.copy_(noise * 4 / math.sqrt(parameter.shape[-1]))
            elif isinstance(module, nn.Embedding):
                # Few rows: types, languages, the same for every token of a prompt.
                parameter.copy_(noise * (1.0 if len(parameter) > FEW else 0.1))
            else:
                parameter.copy_(noise * gain / math.sqrt(_fan_in(module, parameter)))


def _fan_in(module: nn.Module, weight: Tensor) -> int:
    """How many products an output of ``weight`` sums up."""
    if isinstance(module, Conv1D):
        return weight.shape[0]
    if isinstance(module, (nn.Conv1d, nn.Conv2d)):
        return weight[0].numel()
    return weight.shape[-1]


def prompts(count: int = 8, seed: int = 0) -> list[list[int]]:
    """Prompts of 5 to 60 tokens, without the special ones."""
    rng = random.Random(seed)
    lengths = [5, 60, 17, *(rng.randint(5, 60) for _ in range(count))][:count]
    return [[rng.randrange(2, VOCAB) for _ in range(n)] for n in lengths]


def greedy(
    model: PreTrainedModel, prompt: list[int], tokens: int = 64, **settings: Any
) -> tuple[list[int], Tensor]:
    """What transformers' own ``generate`` adds to one prompt, and its logits [tokens, V]."""
    ids = torch.tensor([prompt], device=model.device)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        **settings,
    )
    return out.sequences[0, len(prompt) :].tolist(), torch.cat(out.logits).float()
