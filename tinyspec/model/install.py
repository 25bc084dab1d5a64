"""Putting paged attention and other stand-ins into a shadow of a loaded model.

Knows modules, nothing of passes.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

from tinyspec.config import EngineConfig
from tinyspec.errors import UnsupportedEnvironmentError, unsupported
from tinyspec.kernels import backend
from tinyspec.kernels.launch import MAX_HEAD_DIM
from tinyspec.model import openmp
from tinyspec.model.attention import (
    IMPLEMENTATION,
    AttentionContext,
    PagedAttention,
    paged_attention_function,
)
from tinyspec.model.attention_stand_ins import stand_ins
from tinyspec.model.cpu_linears import cpu_stand_ins
from tinyspec.model.introspection import attention_calls, module_calls
from tinyspec.model.layer_trial import layer_stand_ins
from tinyspec.model.linears import calls_interface, kernel_stand_ins
from tinyspec.model.moe import expert_stand_ins
from tinyspec.model.positions import given_positions, rope_table
from tinyspec.model.quantized import is_packed, repack_weights
from tinyspec.model.recurrent import NO_FUNCTIONS, recurrent_stand_ins
from tinyspec.model.served_model import ServedModel
from tinyspec.model.shadow import standing_in
from tinyspec.model.short_conv import conv_stand_ins
from tinyspec.model.supported import (
    LEAST_POSITIONS,
    length_refusal,
    loading_refusal,
    max_positions,
    recurrent_layers,
    refusal,
    swap_refusal,
)
from tinyspec.model.torch_settings import pinned
from tinyspec.model.torch_state import Autocast, TorchState, without_modes
from tinyspec.model.trial import Trials, tell
from tinyspec.model.wrappers import autocast_within, has_hooks, is_compiled


@cache
def _parameters(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


def _is_rotary(module: nn.Module) -> bool:
    kind = type(module)
    own = _parameters(kind.forward)[1:3] == ["x", "position_ids"]
    return own and kind.__name__.endswith("RotaryEmbedding")


def _counts_positions(module: nn.Module) -> bool:
    """Whether a module derives positions from the cache's length unless it is given them."""
    takes = _parameters(type(module).forward) if isinstance(module, nn.Embedding) else ()
    # "cache_length" and, before transformers 5.24, "past_key_values_length".
    return "position_ids" in takes and any(name.endswith("_length") for name in takes)


def _is_always_swapped(module: nn.Module) -> bool:
    """Whether a module is replaced in every model, or left out, and would lose its hooks."""
    left_out = is_compiled(module) and has_hooks(module)
    return left_out or _is_rotary(module) or _counts_positions(module)


def _interface_refusal(model: PreTrainedModel) -> str | None:
    if any(map(calls_interface, model.modules())) or recurrent_layers(model):
        return None
    return "its attention does not go through transformers' attention interface"


def _autocast_refusal(model: PreTrainedModel, dtype: torch.dtype | None) -> str | None:
    """Why a model cannot be served under autocast to ``dtype`` (None: without), or None."""
    for name, module in model.named_modules():
        if name and autocast_within(module, model.device.type, dtype) != dtype:
            return f"the forward of {name} is wrapped in an autocast of its own"
    quantized = getattr(model, "hf_quantizer", None) or any(map(is_packed, model.parameters()))
    if dtype is not None and quantized:
        return "its weights are quantized, and it is called under autocast"
    return None


def install(
    model: PreTrainedModel,
    config: EngineConfig,
    root: nn.Module | None = None,
    autocast: torch.dtype | None = None,
) -> ServedModel:
    """A shadow of ``model`` with paged attention in the place of its own; weights are shared.

    config: resolved. root: what ``model`` is a part of, which gets a shadow with it. autocast: the
    dtype to which its forward casts, if any.

    Raises UnsupportedModelError with the reason, or UnsupportedEnvironmentError where no model
    could be served.
    """
    assert config.max_model_len and config.max_rows
    if model.device.type == "cpu" and (shortage := openmp.shortage()) is not None:
        raise UnsupportedEnvironmentError(shortage)
    reason = (
        refusal(model)
        or loading_refusal(model)
        or swap_refusal(model, filter(_is_always_swapped, model.modules()))
        or _interface_refusal(model)
        or length_refusal(model, config.max_model_len, config.max_rows)
        or _autocast_refusal(model, autocast)
    )
    if reason is not None:
        raise unsupported(model, reason)
    AttentionInterface.register(IMPLEMENTATION, paged_attention_function)
    precision = Autocast(autocast, model.device.type)
    served = ServedModel(model, model if root is None else root, precision)
    loud = logging.getLogger("bitsandbytes")  # which warns of every product of fp32
    # Tables and stand-ins are made under the settings of passes.
    with ExitStack() as later, pinned(model.device.type), without_modes():
        later.callback(loud.setLevel, loud.level)
        loud.setLevel(logging.ERROR)
        _install(served, config)
    widest = max((layer.head_dim for layer in served.layers), default=0)
    if config.backend == "triton" and widest > MAX_HEAD_DIM:
        reason = f"its attention has heads of {widest} numbers; the GPU's kernels take "
        raise unsupported(model, f"{reason}{MAX_HEAD_DIM}")
    return served


class KeepsHidden(nn.Module):
    """A decoder that leaves its last hidden states to the pass."""

    tinyspec_context: AttentionContext

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The decoder's output."""
        found = super().forward(*args, **kwargs)
        self.tinyspec_context.hidden = found.last_hidden_state[0]
        return found


def keep_hidden(served: ServedModel) -> None:
    """Let passes keep their last hidden states beside keys and values."""
    decoder = served.model.get_decoder()
    served.swap({decoder: standing_in(decoder, KeepsHidden, tinyspec_context=served.context)})
    served.hidden = int(served.model.config.hidden_size)


def fuses_layers(config: EngineConfig) -> bool:
    """Whether decoder layers run by fused kernels where these agree with them: a CPU has none."""
    return config.backend == "triton"


def _install(served: ServedModel, config: EngineConfig) -> None:
    model, context, positions = served.model, served.context, config.max_model_len
    assert positions
    if config.linear != "never":
        served.swap(expert_stand_ins(model, context, config.linear == "always"))
    like = torch.empty(0, dtype=model.dtype, device=model.device)
    length = max(positions, LEAST_POSITIONS)
    modules = list(model.modules())
    served.swap({m: given_positions(m, context) for m in modules if _counts_positions(m)})
    served.swap({m: rope_table(m, length, like) for m in modules if _is_rotary(m)})
    repack_weights(model, model.dtype)  # before a forward in inference mode does
    last = max(positions, min(LEAST_POSITIONS, max_positions(model))) - 1
    with TorchState(model.device)(), served.autocast.on():
        trials = Trials()
        made, served.channels = conv_stand_ins(model, context, trials)
        recurrent, served.recurrent = recurrent_stand_ins(model, context, trials)
    if (known := len(made) + len(recurrent)) != (count := recurrent_layers(model)):
        if not trials.causes:
            tell(type(model).__name__, NO_FUNCTIONS)
        why = f"of its {count} layers with a state {known} are known"
        raise unsupported(model, "; ".join([why, *trials.causes]))
    # What these compute themselves.
    if (reason := swap_refusal(model, [each.get_submodule("conv") for each in made])) is not None:
        raise unsupported(model, reason)
    # Made before there are modules that run in passes only.
    layers: dict[nn.Module, nn.Module] = {}
    if fuses_layers(config) and served.autocast.dtype is None:
        with TorchState(model.device)():
            layers = layer_stand_ins(model, context, last)
    served.swap(made | recurrent)
    _swap_attention(served, last)
    served.swap(layers)
    if config.linear == "always":
        linear = served.autocast.casting(backend.load(config.backend).linear)
        served.swap(kernel_stand_ins(model, linear))
    if served.autocast.dtype is None:  # which they would not follow
        served.swap(cpu_stand_ins(model, context))
    if config.drafts_by_head:
        keep_hidden(served)


def _swap_attention(served: ServedModel, last: int) -> None:
    """Record the attention calls of the model, and replace the modules that have stand-ins."""
    model, context = served.model, served.context
    with TorchState(model.device)(), served.autocast.on():
        calls, keeps_logits = attention_calls(model)
        modules = list(dict.fromkeys(call.module for call in calls))
        arguments = module_calls(model, modules, last)
        made = stand_ins(calls, arguments, context)
    swapped = list(made)
    for stand_in in made.values():
        if isinstance(stand_in, PagedAttention) and "q_norm" in stand_in._modules:
            swapped += [stand_in.q_norm, stand_in.k_norm]
    if (reason := swap_refusal(model, swapped)) is not None:
        raise unsupported(model, reason)
    names = {module: name for name, module in model.named_modules()}
    served.swap(made)
    served.layers += [call.shape for call in calls]
    served.keeps_logits = keeps_logits
    for call in calls:
        module = made.get(call.module, call.module)
        context.layers.append(replace(call, name=names[call.module], module=module))
