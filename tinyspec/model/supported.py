"""Which models are served, by their config and by how they were loaded. Nothing runs here.

What only a forward shows is left to ``introspection``. Tests compare every model type of SERVED
with transformers token by token; one of another type is compared at load (``parity_check``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from inspect import signature
from traceback import walk_tb
from typing import Any

import torch
from torch import nn
from transformers import (
    AttentionInterface,
    DynamicCache,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)

from tinyspec.errors import refuse
from tinyspec.model.wrappers import has_hooks, users_forward

DEVICES = "auto, cpu, cuda or cuda:N"
# What transformers calls the argument that holds a cache, newest first, and what it is called here.
CACHE_NAMES = ("cache", "past_key_values")
_prepared = signature(GenerationMixin.prepare_inputs_for_generation).parameters
CACHE = next((name for name in CACHE_NAMES if name in _prepared), CACHE_NAMES[0])
SERVED_TYPES = """
afmoe apertus apertus1p5_text arcee aria_text axk1 bamba bart beam bert bert-generation
bigbird_pegasus biogpt bitnet blenderbot blenderbot-small camembert codegen cohere cohere2
cohere2_moe cohere_compass_text ctrl cwm data2vec-text dbrx deepseek_v2 deepseek_v3 diffllama
dory dots1 electra emu3 ernie ernie4_5 ernie4_5_moe exaone exaone4 exaone_moe falcon_h1
flex_olmo flint fuyu gemma gemma2 gemma3 gemma3_text gemma3n_text gemma4 gemma4_text
gemma4_unified gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite got_ocr2 gpt-sw3 gpt2
gpt_bigcode gpt_neox gpt_oss gptj granite granite_swa granitemoe granitemoe_swa granitemoehybrid
granitemoeshared helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax internlm3
iquestcoder jais2 jetmoe kolibri1 laguna lara_mini lfm2 lfm2_moe lfm3 llama llama4 llama4_text
longcat_flash mamba2 marian mbart mellum mimo_v2_flash minicpm3 minimax_m2 ministral ministral3
mistral mixtral mllama modernbert-decoder moss_transcribe_diarize nanochat nemotron nemotron_h
olmo olmo2 olmo3 olmo_hybrid olmoe opt pegasus persimmon phi phi3 phi4_multimodal phimoe plbart
qwen2 qwen2_moe qwen3 qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next
roberta roberta-prelayernorm roc_bert sarvam_mla sarvam_moe seed_oss smollm3 solar_open stablelm
starcoder2 vaultgemma whisper xlm-roberta xlm-roberta-xl xmod youtu zamba2
"""
SERVED = frozenset(SERVED_TYPES.split())
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Of layers that keep nothing: some versions give them the cache of a state all the same.
STATELESS = {"mlp", "moe"}
LAYER_TYPES = STATELESS | {
    *("full_attention", "sliding_attention", "chunked_attention"),
    *("conv", "linear_attention", "hybrid"),
}
# Layers of transformers' cache that hold only keys and values, or (shared ones) nothing.
CACHE_LAYERS = {"DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer"}
# Of a layer with a state, alone or beside attention; served where its module is known.
RECURRENT = {"LinearAttentionLayer", "LinearAttentionAndFullAttentionLayer"}
# Introspection and the parity check run at so many positions, whatever max_model_len is.
LEAST_POSITIONS = 64
# What configs call the longest sequence.
POSITIONS = """
max_position_embeddings n_positions max_target_positions max_seq_len n_ctx max_sequence_length
seq_length context_length model_max_length
"""
# Where no config names it: the length that most models were trained for.
DEFAULT_POSITIONS = 2048


def refusal(model: PreTrainedModel) -> str | None:
    """What in the model's config or in transformers itself cannot be served, or None."""
    config = model.config
    if config.is_encoder_decoder or getattr(config, "add_cross_attention", False):
        return "it has cross-attention"
    text = config.get_text_config(decoder=True)
    kinds = getattr(text, "layer_types", None) or ()
    kept = {type(layer).__name__ for layer in _cache_layers(text)} - CACHE_LAYERS - RECURRENT
    if kept:
        return f"it keeps state other than keys and values ({', '.join(sorted(kept))})"
    others = set(kinds) - LAYER_TYPES
    if others:
        return f"it has layers of type {', '.join(sorted(others))}"
    if any(rope.get("rope_type") == "dynamic" for rope in _ropes(text)):
        return "dynamic RoPE scaling makes a row depend on the longest sequence"
    return None


def recurrent_layers(model: PreTrainedModel) -> int:
    """How many layers of the model's own cache keep a state."""
    text = model.config.get_text_config(decoder=True)
    layers, kinds = _cache_layers(text), getattr(text, "layer_types", None) or ()
    # A config that does not name each layer says nothing of any.
    named = kinds if len(kinds) == len(layers) else [""] * len(layers)
    with_state = (type(layer).__name__ in RECURRENT for layer in layers)
    pairs = zip(with_state, named, strict=True)
    return sum(has_one and kind not in STATELESS for has_one, kind in pairs)


def length_refusal(model: PreTrainedModel, max_model_len: int, max_rows: int) -> str | None:
    """What forbids sequences of ``max_model_len`` tokens, passes of ``max_rows`` rows, or None."""
    text = model.config.get_text_config(decoder=True)
    most = _longrope_limit(text)
    if most is not None and (max_model_len > most or most < LEAST_POSITIONS):
        return (
            f"longrope changes the factors of all rows once a sequence is longer than {most} "
            f"tokens; set max_model_len={most}"
        )
    scale = getattr(text, "floor_scale", None)
    if not scale or not getattr(text, "attn_temperature_tuning", False):
        return None
    for name, size in (("max_model_len", max_model_len), ("max_rows", max_rows)):
        if size >= scale:
            return (
                f"its attention temperature changes from {scale} rows on, by a row's place in the "
                f"pass; set {name}={scale - 1}"
            )
    return None


def max_positions(model: PreTrainedModel) -> int:
    """The longest sequence that the model has positions for."""
    text = model.config.get_text_config(decoder=True)
    found = (getattr(text, name, None) for name in POSITIONS.split())
    return next((int(value) for value in found if value and value > 0), DEFAULT_POSITIONS)


def vocab_size(model: PreTrainedModel) -> int:
    """Rows of the model's embedding table: how many token ids it takes."""
    return len(model.get_input_embeddings().weight)  # type: ignore[arg-type]


def checked_device(device: str | torch.device) -> torch.device:
    """The device to use. Raises ValueError for one that is not served or not there."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise refuse("device", device, DEVICES) from None
    if found.type not in ("cpu", "cuda"):
        raise refuse("device", str(device), DEVICES)
    count = torch.cuda.device_count()
    if found.type == "cuda" and (found.index or 0) >= count:
        there = f"torch finds {count} CUDA devices" if count else "torch finds no CUDA device"
        raise refuse("device", str(device), f"{DEVICES}, and {there} here")
    return found


def default_eos(model: PreTrainedModel, vocab_size: int) -> tuple[int, ...]:
    """The model's end-of-sequence tokens, as its ``generate`` would use now."""
    settings = getattr(model, "generation_config", None) or model.config
    eos = settings.eos_token_id
    ids = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
    return tuple(token for token in ids if token < vocab_size)


def cache_windows(model: PreTrainedModel) -> set[int]:
    """Sliding windows of the layers of the model's own cache."""
    layers = _cache_layers(model.config.get_text_config(decoder=True))
    return {w for layer in layers if (w := getattr(layer, "sliding_window", None))}


def _cache_layers(text: PreTrainedConfig) -> list[Any]:
    """Layers of the model's cache; none where its config fits no ``DynamicCache``."""
    try:
        cache = DynamicCache(config=text)
    except (AttributeError, KeyError, TypeError, ValueError):
        return []
    return list(cache.layers)


def _ropes(text: PreTrainedConfig) -> Iterator[dict[str, Any]]:
    """Parameters of RoPE, one after the other where types of layers have their own."""
    given = getattr(text, "rope_parameters", None) or {}
    if isinstance(given, dict):
        yield given
        yield from (part for part in given.values() if isinstance(part, dict))


def _longrope_limit(text: PreTrainedConfig) -> int | None:
    """The tokens from which on longrope takes its long factors; None without longrope."""
    for rope in _ropes(text):
        if rope.get("rope_type") == "longrope":
            most = rope.get("original_max_position_embeddings")
            return most or getattr(text, "original_max_position_embeddings", None) or 0
    return None


def loading_refusal(model: PreTrainedModel) -> str | None:
    """What in the way that ``model`` was loaded cannot be served, or None."""
    if model.dtype not in DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        return f"its dtype is {model.dtype}; served are {names}"
    return _offloaded_or_merged(model) or _sharded(model) or _own_attention(model)


def _offloaded_or_merged(model: PreTrainedModel) -> str | None:
    """The first module that moves or makes its weights in every pass, or None."""
    for name, module in model.named_modules():
        if type(module).__name__ == "ParamWrapper":
            return f"PEFT merges {name}'s parameters in every pass (target_parameters)"
        if getattr(module, "merged", False) and getattr(module, "disable_adapters", False):
            return f"a pass would unmerge {name}, whose adapters are disabled: unmerge them first"
        hook = _offloading(getattr(module, "_hf_hook", None))
        if hook is not None:
            where = name or "all of it"
            return f"{where} is offloaded (accelerate's {hook}); load it onto one device"
    return None


def _sharded(model: PreTrainedModel) -> str | None:
    """Which weights are on several devices or in several processes, or on none, or None."""
    mesh = getattr(model, "_device_mesh", None)  # of the processes that transformers loaded it in
    if mesh is not None and mesh.size() > 1:
        axes = zip(mesh.mesh_dim_names or ("tp",), mesh.shape, strict=True)
        how = ", ".join(f"{name}={size}" for name, size in axes if size > 1)
        return f"it is spread over {mesh.size()} processes ({how}); load all of it in each"
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            return f"{name} has no data (it is on the meta device); load it onto one device"
        if hasattr(parameter, "device_mesh"):
            return f"{name} is sharded over devices ({type(parameter).__name__})"
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        # FSDP1 and ZeRO-3 leave a flat part in every process, or nothing.
        if isinstance(module, (nn.Linear, nn.Embedding)) and getattr(weight, "ndim", 2) < 2:
            return f"{name}.weight is not whole in this process (FSDP, DeepSpeed): gather it first"
    devices = {str(parameter.device) for parameter in model.parameters()}
    if len(devices) > 1:
        return f"it is on more than one device ({', '.join(sorted(devices))})"
    return None


def _offloading(hook: Any) -> str | None:
    """Class of the part of accelerate's hook that does more than move inputs to the module's
    device; None if no part does."""
    if hook is None:
        return None
    if type(hook).__name__ == "SequentialHook":
        return next(filter(None, map(_offloading, hook.hooks)), None)
    aligns = type(hook).__name__ == "AlignDevicesHook" and not hook.offload
    return None if aligns else type(hook).__name__


def _own_attention(model: PreTrainedModel) -> str | None:
    """The attention function that the user chose, if it is not one of transformers'."""
    name = model.config._attn_implementation
    function = None if name == "eager" else AttentionInterface().get(name)
    if function is None:  # eager, or of a library that is not installed
        return None
    function = getattr(function, "func", function)  # of a partial
    module = getattr(function, "__module__", "") or ""
    if module.startswith("transformers."):
        return None
    called = f"{module}.{getattr(function, '__qualname__', function)}"
    return f"its attn_implementation {name!r} is {called}, which paged attention would not call"


def swap_refusal(model: nn.Module, swapped: Iterable[nn.Module]) -> str | None:
    """Why one of these modules of ``model`` cannot be replaced by a stand-in, or None.

    A stand-in uses its weights alone: hooks and a forward of its own would not run.
    """
    names = {module: name for name, module in model.named_modules()}
    for module in swapped:
        what = "forward hooks" if has_hooks(module) else "a forward of its own"
        if has_hooks(module) or users_forward(module) is not None:
            return f"{names[module]} has {what}, which paged attention would not call"
    return None


def failing_module(model: nn.Module, error: Exception) -> str:
    """``error`` of a forward over the attention's interface, with the innermost module that was
    running."""
    names = {id(module): name for name, module in model.named_modules() if name}
    owners = [id(frame.f_locals.get("self")) for frame, _ in walk_tb(error.__traceback__)]
    inside = [names[owner] for owner in owners if owner in names]
    where = f" in {inside[-1]}" if inside else ""
    raised = f"a forward over its attention's interface raised {type(error).__name__}{where}"
    return f"{raised}: {error}{_advice(model, inside)}"


def _advice(model: nn.Module, inside: list[str]) -> str:
    """What may help where experts ran by a function that not all shapes are fit for."""
    config = vars(model.get_submodule(inside[-1])).get("config") if inside else None
    choice = getattr(config, "_experts_implementation", None)
    if choice in (None, "eager") or "experts" not in inside[-1]:
        return ""
    return (
        f" (transformers runs these experts by {choice}, which does not take every size: "
        'model.set_experts_implementation("eager") does)'
    )
