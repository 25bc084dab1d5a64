"""Putting paged attention into a loaded model, and taking it out again without a trace.

Decides from the model's structure whether it can be served at all; knows nothing of passes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

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
from tinyspec.linears import Haste, LinearFunction, by_kernel, by_onednn

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


@dataclass
class Patched:
    """What ``patch`` did to a model, kept on it as ``_tinyspec``."""

    context: AttentionContext
    layers: list[LayerShape]
    implementation: str
    swapped: list[tuple[nn.Module, str, nn.Module]] = field(default_factory=list)
    bound: list[nn.Module] = field(default_factory=list)
    haste: Haste = field(default_factory=Haste)

    def swap(self, parent: nn.Module, name: str, module: nn.Module) -> None:
        """Put ``module`` in the place of ``parent``'s child ``name``."""
        before: nn.Module = parent._modules[name]  # type: ignore[assignment]
        self.swapped.append((parent, name, before))
        module.training = before.training
        parent._modules[name] = module

    def undo(self, kept: int = 0) -> None:
        """Put everything back but the first ``kept`` swaps."""
        while len(self.swapped) > kept:
            parent, name, module = self.swapped.pop()
            module.train(parent._modules[name].training)  # type: ignore[union-attr]
            parent._modules[name] = module


def _refusal(model: PreTrainedModel) -> str | None:
    """Why the model cannot be served, or None."""
    config = model.config
    kind = config.model_type
    devices = {str(parameter.device) for parameter in model.parameters()}
    if len(devices) > 1:
        return f"it lies on more than one device ({', '.join(sorted(devices))})"
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
    if not _attentions(model):
        served = ", ".join([*FUSED, *INTERFACE])
        return f"model type {kind!r} has not been tried; served are {served}"
    return None


def refuse_unsupported(model: PreTrainedModel) -> None:
    """Raise UnsupportedModelError naming what is in the way, ValueError if patched already."""
    if hasattr(model, "_tinyspec"):
        raise ValueError("model is not allowed: it is served by another Engine; close that first")
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


def patch(
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
    attentions = _attentions(model)
    layers = [_shape(model, module) for _, _, module in attentions]
    patched = Patched(context, layers, model.config._attn_implementation)
    model.__dict__["_tinyspec"] = patched
    try:
        _install(model, patched, attentions, max_model_len or max_positions(model), linear)
    except BaseException:
        unpatch(model)
        raise
    return patched


def _install(
    model: PreTrainedModel,
    patched: Patched,
    attentions: list[tuple[nn.Module, str, nn.Module]],
    positions: int,
    linear: LinearFunction | None,
) -> None:
    context = patched.context
    for parent, name, module in attentions:
        if type(module).__name__ in FUSED:
            patched.swap(parent, name, PagedAttention(module, context))
        else:
            module.__dict__["tinyspec_context"] = context
            patched.bound.append(module)
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
    """What ``patch`` did to a patched model."""
    return model.__dict__["_tinyspec"]


def unpatch(model: PreTrainedModel) -> None:
    """Give ``model`` its own attention back; a model that is not patched is left alone."""
    patched: Any = model.__dict__.pop("_tinyspec", None)
    if patched is None:
        return
    patched.undo()
    for module in patched.bound:
        del module.tinyspec_context
    model.set_attn_implementation(patched.implementation)
