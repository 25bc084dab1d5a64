"""Putting paged attention into a loaded model, and taking it out again without a trace.

Knows modules and what a survey found of them; nothing of passes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import (
    AttentionInterface,
    PreTrainedConfig,
    PreTrainedModel,
)

from tinyspec.config import EngineConfig
from tinyspec.errors import unsupported
from tinyspec.model.attention import (
    IMPLEMENTATION,
    AttentionContext,
    PagedAttention,
    paged_attention_function,
)
from tinyspec.model.attention_calls import Layer, Survey
from tinyspec.model.attention_trial import WAYS, stand_ins
from tinyspec.model.cpu.linears import cpu_stand_ins
from tinyspec.model.cpu.norms import norm_stand_ins
from tinyspec.model.introspection import given_calls, survey
from tinyspec.model.linears import LinearFunction, kernel_stand_ins
from tinyspec.model.modules import children
from tinyspec.model.patched_model import PatchedModel
from tinyspec.model.positions import GivenPositions, RopeTable
from tinyspec.model.quantized import repack_weights
from tinyspec.model.supported import (
    LEAST_POSITIONS,
    cache_windows,
    length_refusal,
    loading_refusal,
    max_positions,
    refusal,
    swap_refusal,
)
from tinyspec.model.torch_state import TorchState
from tinyspec.model.wrappers import CompiledCalls, compiled_modules, has_hooks


def calls_interface(module: nn.Module) -> bool:
    """Whether a module's forward looks for its attention where transformers keeps it."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


@cache
def _parameters(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


def _is_rotary(module: nn.Module) -> bool:
    kind = type(module)
    own = _parameters(kind.forward)[1:3] == ["x", "position_ids"]
    return own and kind.__name__.endswith("RotaryEmbedding")


def _counts_positions(module: nn.Module) -> bool:
    """Whether a module counts positions from a cache's length unless it is given them."""
    takes = {"past_key_values_length", "position_ids"} <= {*_parameters(type(module).forward)}
    return isinstance(module, nn.Embedding) and takes


def _always_swapped(model: nn.Module) -> list[nn.Module]:
    """The modules that are swapped whatever they compute."""
    found = [m for _, _, m in children(model) if _is_rotary(m) or _counts_positions(m)]
    wrappers = (parent.get_submodule(name) for parent, name, _ in compiled_modules(model))
    return found + [wrapper for wrapper in wrappers if has_hooks(wrapper)]


def refuse_unsupported(model: PreTrainedModel) -> None:
    """Raise UnsupportedModelError naming what is in the way, ValueError if patched already."""
    if getattr(model, "_tinyspec", None) is not None:
        raise ValueError(
            "model is not allowed: it is served by another Engine, or patched; close that Engine, "
            "or call tinyspec.unpatch(model), first"
        )
    reason = (
        refusal(model) or loading_refusal(model) or _swap_refusal(model, _always_swapped(model))
    )
    if reason is None and not any(map(calls_interface, model.modules())):
        reason = "its attention does not go through transformers' attention interface"
    if reason is not None:
        raise unsupported(model, reason)


def _names(model: nn.Module) -> dict[int, str]:
    return {id(module): name for name, module in model.named_modules()}


def _swap_refusal(model: nn.Module, swapped: Iterable[nn.Module]) -> str | None:
    """What would not run any more of the modules that are swapped, or None."""
    names = _names(model)
    return next(filter(None, (swap_refusal(names[id(m)], m) for m in swapped)), None)


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
    for parent, name, module in children(model):
        if _counts_positions(module):
            patched.swap(parent, name, GivenPositions(module, context))
        elif _is_rotary(module):
            table = RopeTable(module, max(positions, LEAST_POSITIONS), like)
            patched.swap(parent, name, table)
    _swap_attention(patched, positions)
    if linear is not None:
        for parent, name, served in kernel_stand_ins(model, linear):
            patched.swap(parent, name, served)
    for parent, name, quicker in cpu_stand_ins(model, patched.fast_mode):
        patched.swap(parent, name, quicker)
    with TorchState(model)():
        norms = norm_stand_ins(model, patched.fast_mode, model.dtype)
    for parent, name, norm in norms:
        patched.swap(parent, name, norm)


def _swap_attention(patched: PatchedModel, positions: int) -> None:
    """Find out what attention the model calls, and put in the stand-ins for it."""
    model, context = patched.model, patched.context
    repack_weights(model, model.dtype)  # before a forward in inference mode does
    with TorchState(model)():
        found = survey(model, IMPLEMENTATION, context.record)
        _refuse_cache_windows(model, found)
        modules = {id(call.module): call.module for call in found.calls}
        last = max(positions, min(LEAST_POSITIONS, max_positions(model))) - 1
        given = given_calls(model, context.record, modules, last)
        made = stand_ins(found.calls, given, context, WAYS)
    swapped = [modules[key] for key in made]
    for stand_in in made.values():
        if isinstance(stand_in, PagedAttention) and stand_in.has_norm:
            swapped += [stand_in.q_norm, stand_in.k_norm]
    if (reason := _swap_refusal(model, swapped)) is not None:
        raise unsupported(model, reason)
    names = _names(model)
    for parent, name, module in children(model):
        if id(module) in made:
            patched.swap(parent, name, made[id(module)])
    patched.layers += [call.shape for call in found.calls]
    patched.keeps_logits = found.keeps_logits
    for call in found.calls:
        module = made.get(id(call.module), call.module)
        context.layers.append(Layer(names[id(call.module)], id(module), call.reach))


def _refuse_cache_windows(model: PreTrainedModel, found: Survey) -> None:
    seen = {size for call in found.calls for size in (call.reach.window, call.reach.chunk)}
    others = cache_windows(model) - seen
    if others:
        why = f"its cache has a window of {min(others)} where its masks have none"
        raise unsupported(model, why)


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
