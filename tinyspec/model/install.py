"""Putting paged attention into a loaded model, and taking it out again without a trace.

Knows modules and what a survey found of them; nothing of passes.
"""

from __future__ import annotations

import inspect

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from tinyspec.config import EngineConfig
from tinyspec.errors import unsupported
from tinyspec.model.attention import (
    IMPLEMENTATION,
    AttentionContext,
    PagedAttention,
    paged_attention_function,
)
from tinyspec.model.attention_calls import Survey
from tinyspec.model.cpu.linears import cpu_stand_ins
from tinyspec.model.cpu.norms import norm_stand_ins
from tinyspec.model.fused_rope import deferred, layout
from tinyspec.model.introspection import survey
from tinyspec.model.linears import LinearFunction, kernel_stand_ins
from tinyspec.model.patched_model import PatchedModel
from tinyspec.model.positions import GivenPositions, RopeTable
from tinyspec.model.quantized import repack_weights
from tinyspec.model.supported import (
    LEAST_POSITIONS,
    cache_windows,
    length_refusal,
    loading_refusal,
    refusal,
    swap_refusal,
)
from tinyspec.model.torch_state import TorchState
from tinyspec.model.wrappers import CompiledCalls, compiled_modules, has_hooks

# Attention classes that PagedAttention stands in for.
FUSED = (
    "LlamaAttention",
    "MistralAttention",
    "Qwen2Attention",
    "Qwen3Attention",
    "Gemma2Attention",
)
Place = tuple[nn.Module, str, nn.Module]


def _children(model: nn.Module) -> list[Place]:
    """(parent, name, module) of every module but the outermost."""
    return [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
    ]


def calls_interface(module: nn.Module) -> bool:
    """Whether a module's forward looks for its attention where transformers keeps it."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def _is_rotary(module: nn.Module) -> bool:
    takes = list(inspect.signature(type(module).forward).parameters)
    return type(module).__name__.endswith("RotaryEmbedding") and takes[1:3] == ["x", "position_ids"]


def _counts_positions(module: nn.Module) -> bool:
    """Whether a module counts positions from a cache's length unless it is told them."""
    takes = inspect.signature(type(module).forward).parameters
    told = "past_key_values_length" in takes and "position_ids" in takes
    return isinstance(module, nn.Embedding) and told


def _swap_refusal(model: PreTrainedModel) -> str | None:
    """What would not run any more of the modules that are swapped, or None."""
    names = {id(module): name for name, module in model.named_modules()}
    swapped = []
    for _, _, module in _children(model):
        kind = layout(module) if calls_interface(module) else None
        if kind is not None:
            swapped.append(module)
        if kind == "fused":
            swapped += [getattr(module, n) for n in ("q_norm", "k_norm") if hasattr(module, n)]
        elif _is_rotary(module) or _counts_positions(module):
            swapped.append(module)
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
    reason = refusal(model) or loading_refusal(model) or _swap_refusal(model)
    if not any(map(calls_interface, model.modules())):
        reason = reason or "its attention does not go through transformers' attention interface"
    if reason is not None:
        raise unsupported(model, reason)


def _configs(model: PreTrainedModel) -> list[tuple[PreTrainedConfig, str | None]]:
    """The configs that say which attention is called, and what they say now."""
    holders = [m for m in model.modules() if isinstance(m, PreTrainedModel) or calls_interface(m)]
    found = {id(config): config for m in holders if (config := getattr(m, "config", None))}
    return [(config, config._attn_implementation) for config in found.values()]


def install(
    model: PreTrainedModel,
    config: EngineConfig,
    linear: LinearFunction | None = None,
) -> PatchedModel:
    """Swap the attention of ``model`` for paged attention; weights are shared, never copied.

    config: resolved. linear: the kernel that is to serve all plain linears.

    Raises UnsupportedModelError naming what is in the way, ValueError if it is patched already.
    """
    assert config.max_model_len and config.max_rows
    refuse_unsupported(model)
    reason = length_refusal(model, config.max_model_len, config.max_rows)
    if reason is not None:
        raise unsupported(model, reason)
    AttentionInterface.register(IMPLEMENTATION, paged_attention_function)
    patched = PatchedModel(model, AttentionContext(), _configs(model), CompiledCalls(model))
    model.__dict__["_tinyspec"] = patched
    try:
        _install(model, patched, config.max_model_len, linear)
    except BaseException:
        uninstall(model)
        raise
    return patched


def _install(
    model: PreTrainedModel,
    patched: PatchedModel,
    positions: int,
    linear: LinearFunction | None,
) -> None:
    context = patched.context
    for parent, name, module in compiled_modules(model):
        patched.swap(parent, name, module)
    patched.compiled.set_aside()
    patched.bound += [module for module in model.modules() if calls_interface(module)]
    patched.bind()
    like = torch.empty(0, dtype=model.dtype, device=model.device)
    for parent, name, module in _children(model):
        if _counts_positions(module):
            patched.swap(parent, name, GivenPositions(module, context))
        elif _is_rotary(module):
            table = RopeTable(module, max(positions, LEAST_POSITIONS), like)
            patched.swap(parent, name, table)
    found = _survey(model, context)
    patched.layers += [call.shape for call in found.calls]
    patched.keeps_logits = found.keeps_logits
    context.reach = [call.reach for call in found.calls]
    called = {id(call.module) for call in found.calls}
    for parent, name, module in _children(model):
        kind = layout(module) if id(module) in called else None
        if kind == "fused":
            patched.swap(parent, name, PagedAttention(module, context))
        elif kind == "deferred" and (stand_in := deferred(module, context)) is not None:
            patched.swap(parent, name, stand_in)
    if linear is not None:
        for parent, name, served in kernel_stand_ins(model, linear):
            patched.swap(parent, name, served)
    for parent, name, quicker in cpu_stand_ins(model, patched.fast_mode):
        patched.swap(parent, name, quicker)
    for parent, name, norm in norm_stand_ins(model, patched.fast_mode):
        patched.swap(parent, name, norm)


def _survey(model: PreTrainedModel, context: AttentionContext) -> Survey:
    repack_weights(model, model.dtype)  # before a forward in inference mode does
    with TorchState(model)():
        found = survey(model, IMPLEMENTATION, context.record)
    seen = {size for call in found.calls for size in (call.reach.window, call.reach.chunk)}
    others = cache_windows(model) - seen
    if others:
        why = f"its cache has a window of {min(others)} where its masks have none"
        raise unsupported(model, why)
    return found


def patched_of(model: PreTrainedModel) -> PatchedModel:
    """What ``install`` did to a model."""
    return model.__dict__["_tinyspec"]


def uninstall(model: PreTrainedModel) -> None:
    """Give ``model`` its own attention back; a model without ours is left alone."""
    patched: PatchedModel | None = model.__dict__.pop("_tinyspec", None)
    if patched is None:
        return
    if patched.left is None:
        patched.take_out()
