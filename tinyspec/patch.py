"""Putting paged attention into a loaded model, and taking it out again without a trace.

Decides from the model's structure whether it can be served at all; knows nothing of passes.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

from tinyspec.attention import (
    IMPLEMENTATION,
    AttentionContext,
    PagedAttention,
    RopeTable,
    paged_attention_function,
)
from tinyspec.errors import UnsupportedModelError
from tinyspec.kv_cache import LayerShape
from tinyspec.linears import LinearFunction, by_kernel, by_onednn
from tinyspec.loading import loading_refusal, swap_refusal
from tinyspec.patched import Patched
from tinyspec.unwrap import CompiledCalls, compiled_modules, has_hooks

# Attention classes that PagedAttention stands in for, and model types served by the interface.
FUSED = (
    "LlamaAttention",
    "MistralAttention",
    "Qwen2Attention",
    "Qwen3Attention",
    "Gemma2Attention",
)
INTERFACE = ("gpt2", "gpt_neox")
OFF_INTERFACE = ("falcon", "bloom", "mpt", "gptj", "gpt_neo", "codegen", "xglm")
OTHER_STATE: tuple[str, ...] = (
    "mamba",
    "mamba2",
    "rwkv",
    "jamba",
    "bamba",
    "zamba",
    "falcon_h1",
    "nemotron_h",
)
OTHER_STATE += ("qwen3_next", "qwen3_5", "lfm2", "recurrent_gemma")
LAYER_TYPES = {"full_attention", "sliding_attention"}


def _refusal(model: PreTrainedModel) -> str | None:
    """Why the model cannot be served, or None."""
    config = model.config
    kind = config.model_type
    if config.is_encoder_decoder or getattr(config, "add_cross_attention", False):
        return "it has cross-attention"
    if kind in OFF_INTERFACE:
        return "its attention does not go through transformers' attention interface"
    if kind in OTHER_STATE:
        return "it keeps state other than keys and values"
    if getattr(config, "kv_lora_rank", None):
        return "its cache holds latents (kv_lora_rank)"
    if getattr(config, "num_kv_shared_layers", None):
        return "its layers share keys and values (num_kv_shared_layers)"
    if getattr(config, "attention_chunk_size", None):
        return "its attention is chunked (attention_chunk_size)"
    others = set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES
    if others:
        return f"it has layers of type {', '.join(sorted(others))}"
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "dynamic":
        return "dynamic RoPE scaling makes a row depend on the longest sequence"
    found, layers = len(_attentions(model)), config.num_hidden_layers
    if 0 < found < layers:
        return f"{layers - found} of its {layers} layers have an attention module of another kind"
    if found == 0:
        served = ", ".join([*FUSED, *INTERFACE])
        return f"model type {kind!r} has not been tried; served are {served}"
    return loading_refusal(model) or _swap_refusal(model)


def _swap_refusal(model: PreTrainedModel) -> str | None:
    """What would not run any more of the modules that are swapped, or None."""
    names = {id(module): name for name, module in model.named_modules()}
    layers: dict[object, str] = {}
    swapped = [m for m in model.modules() if type(m).__name__.endswith("RotaryEmbedding")]
    for parent, _, module in _attentions(model):
        name = names[id(module)]
        other = layers.setdefault(module.layer_idx, name)
        if other != name:
            return f"{other} and {name} are both the attention of layer {module.layer_idx}"
        if type(parent).__name__.endswith("Attention"):
            return f"{name} is called by another attention ({type(parent).__name__})"
        if type(module).__name__ in FUSED:
            norms = [getattr(module, n) for n in ("q_norm", "k_norm") if hasattr(module, n)]
            swapped += [module, *norms]
            for norm in norms:
                if not type(norm).__name__.endswith("RMSNorm"):
                    return f"{names[id(norm)]} is no norm of transformers ({type(norm).__name__})"
    wrappers = (parent.get_submodule(name) for parent, name, _ in compiled_modules(model))
    swapped += [wrapper for wrapper in wrappers if has_hooks(wrapper)]
    return next(filter(None, (swap_refusal(names[id(m)], m) for m in swapped)), None)


def refuse_unsupported(model: PreTrainedModel) -> None:
    """Raise UnsupportedModelError naming what is in the way, ValueError if patched already."""
    if getattr(model, "_tinyspec", None) is not None:
        raise ValueError(
            "model is not allowed: it is served by another Engine, or patched; close that Engine, "
            "or call tinyspec.unpatch(model), first"
        )
    reason = _refusal(model)
    if reason is not None:
        raise UnsupportedModelError(f"{type(model).__name__} is not supported: {reason}")


def _attentions(model: PreTrainedModel) -> list[tuple[nn.Module, str, nn.Module]]:
    """(parent, name, module) of every attention module, in layer order."""
    found = []
    for parent in model.modules():
        for name, child in parent.named_children():
            kind = type(child).__name__
            interface = model.config.model_type in INTERFACE and hasattr(child, "layer_idx")
            if kind.endswith("Attention") and (kind in FUSED or interface):
                found.append((parent, name, child))
    return sorted(found, key=lambda item: item[2].layer_idx)  # type: ignore[return-value, arg-type]


def _shape(model: PreTrainedModel, attention: nn.Module) -> LayerShape:
    config = model.config
    heads = config.num_attention_heads
    head_dim = getattr(attention, "head_dim", None) or getattr(attention, "head_size", None)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return LayerShape(heads, kv_heads, head_dim or config.hidden_size // heads)


def vocab_size(model: PreTrainedModel) -> int:
    """Rows of the model's embedding table: the token ids it takes."""
    return len(model.get_input_embeddings().weight)  # type: ignore[arg-type]


def max_positions(model: PreTrainedModel) -> int:
    """The longest sequence that the model has positions for."""
    return int(model.config.max_position_embeddings)


def install(
    model: PreTrainedModel,
    max_model_len: int | None = None,
    linear: LinearFunction | None = None,
) -> Patched:
    """Swap the attention of ``model`` for paged attention; weights are shared, never copied.

    linear: the kernel that is to serve all plain linears.

    Raises UnsupportedModelError naming what is in the way, ValueError if it is patched already.
    """
    refuse_unsupported(model)
    AttentionInterface.register(IMPLEMENTATION, paged_attention_function)
    context = AttentionContext()
    layers = [_shape(model, module) for _, _, module in _attentions(model)]
    implementation = model.config._attn_implementation
    patched = Patched(model, context, layers, implementation, CompiledCalls(model))
    model.__dict__["_tinyspec"] = patched
    try:
        _install(model, patched, max_model_len or max_positions(model), linear)
    except BaseException:
        uninstall(model)
        raise
    return patched


def _install(
    model: PreTrainedModel,
    patched: Patched,
    positions: int,
    linear: LinearFunction | None,
) -> None:
    context = patched.context
    for parent, name, module in compiled_modules(model):
        patched.swap(parent, name, module)
    patched.compiled.set_aside()
    for parent, name, module in _attentions(model):
        if type(module).__name__ in FUSED:
            patched.swap(parent, name, PagedAttention(module, context))
        else:
            patched.bound.append(module)
    patched.bind()
    like = torch.empty(0, dtype=model.dtype, device=model.device)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__.endswith("RotaryEmbedding"):
                patched.swap(parent, name, RopeTable(child, positions, like))
    if linear is not None:
        for parent, name, served in by_kernel(model, linear):
            patched.swap(parent, name, served)
    for parent, name, quicker in by_onednn(model, patched.haste):
        patched.swap(parent, name, quicker)
    model.set_attn_implementation(IMPLEMENTATION)
    if model.config._attn_implementation != IMPLEMENTATION:
        name = type(model).__name__
        raise UnsupportedModelError(f"{name} is not supported: it keeps its own attention")


def patched_of(model: PreTrainedModel) -> Patched:
    """What ``install`` did to a model."""
    return model.__dict__["_tinyspec"]


def uninstall(model: PreTrainedModel) -> None:
    """Give ``model`` its own attention back; a model without ours is left alone."""
    patched: Patched | None = model.__dict__.pop("_tinyspec", None)
    if patched is None:
        return
    if patched.left is None:
        patched.take_out()
