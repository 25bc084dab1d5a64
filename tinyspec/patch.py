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
from tinyspec.linears import LinearFunction, by_kernel, by_onednn

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
    """What ``install`` did to a model, kept on it as ``_tinyspec``.

    swapped: (parent, name, the model's own module, its stand-in), in the order of swapping.
    """

    model: PreTrainedModel
    context: AttentionContext
    layers: list[LayerShape]
    implementation: str
    swapped: list[tuple[nn.Module, str, nn.Module, nn.Module]] = field(default_factory=list)
    bound: list[nn.Module] = field(default_factory=list)
    # The model as it was left by ``suspend``; None while the stand-ins are in.
    left: list[object] | None = None

    def swap(self, parent: nn.Module, name: str, module: nn.Module) -> None:
        """Put ``module`` in the place of ``parent``'s child ``name``."""
        before: nn.Module = parent._modules[name]  # type: ignore[assignment]
        self.swapped.append((parent, name, before, module))
        _hand_over(parent, name, before, module)

    def undo(self, kept: int = 0) -> None:
        """Put everything back but the first ``kept`` swaps."""
        while len(self.swapped) > kept:
            parent, name, before, module = self.swapped.pop()
            _hand_over(parent, name, module, before)

    def suspend(self) -> None:
        """Give the model everything back that is its own, until ``resume``."""
        for parent, name, before, module in reversed(self.swapped):
            _hand_over(parent, name, module, before)
        self.unbind()
        self.model.set_attn_implementation(self.implementation)
        self.left = _outline(self.model)

    def resume(self) -> bool:
        """Put the stand-ins in again; False, and nothing done, where they no longer fit: modules,
        hooks, dtype or device are not what they were."""
        if self.left is not None:
            if _outline(self.model) != self.left:
                return False
            for parent, name, before, module in self.swapped:
                _hand_over(parent, name, before, module)
            self.bind()
            self.model.set_attn_implementation(IMPLEMENTATION)
            self.left = None
        return True

    def bind(self) -> None:
        """Tell the attention modules that call the attention interface where the pages are."""
        for module in self.bound:
            module.__dict__["tinyspec_context"] = self.context

    def unbind(self) -> None:
        for module in self.bound:
            module.__dict__.pop("tinyspec_context", None)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of a patched model, in memory or on disk, is not patched."""
        return type(None), ()


def _hand_over(parent: nn.Module, name: str, before: nn.Module, after: nn.Module) -> None:
    """``after`` takes the place of ``before``, with the parameters and the mode that it has now."""
    for own in before._parameters.keys() & after._parameters.keys():
        after._parameters[own] = before._parameters[own]
    after.training = before.training
    parent._modules[name] = after


def _outline(model: PreTrainedModel) -> list[object]:
    """What stand-ins count on: every module, its hooks, a forward of its own, dtype and device."""
    outline: list[object] = [model.dtype, model.device, model.config._attn_implementation]
    for module in model.modules():
        hooks = len(module._forward_hooks), len(module._forward_pre_hooks)
        outline += [module, hooks, "forward" in vars(module)]
    return outline


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
    found, layers = len(_attentions(model)), config.num_hidden_layers
    if 0 < found < layers:
        return f"{layers - found} of its {layers} layers have an attention module of another kind"
    if found == 0:
        served = ", ".join([*FUSED, *INTERFACE])
        return f"model type {kind!r} has not been tried; served are {served}"
    return None


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
    attentions = _attentions(model)
    layers = [_shape(model, module) for _, _, module in attentions]
    patched = Patched(model, context, layers, model.config._attn_implementation)
    model.__dict__["_tinyspec"] = patched
    try:
        _install(model, patched, attentions, max_model_len or max_positions(model), linear)
    except BaseException:
        uninstall(model)
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
    for parent, name, quicker in by_onednn(model):
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
        patched.undo()
        patched.unbind()
        model.set_attn_implementation(patched.implementation)
