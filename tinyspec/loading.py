"""How a model was loaded: where it lies, what hooks it has, which attention it asks for. Names what
cannot be honoured.

Knows neither families of models nor passes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

from tinyspec.unwrap import has_hooks, own_forward

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Transformers' own, all of them the same attention by other kernels.
SAME_ATTENTION = (
    "eager_paged_attention_forward",
    "flash_attention_forward",
    "flex_attention_forward",
    "sdpa_attention_forward",
)


def loading_refusal(model: PreTrainedModel) -> str | None:
    """What in the way that ``model`` was loaded cannot be honoured, or None."""
    if model.dtype not in DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        return f"its dtype is {model.dtype}; served are {names}"
    return _placement(model) or _attention(model)


def _placement(model: PreTrainedModel) -> str | None:
    for name, module in model.named_modules():
        if type(module).__name__ == "ParamWrapper":
            return f"PEFT puts {name}'s parameters together anew in every pass (target_parameters)"
        hook = _offloading(getattr(module, "_hf_hook", None))
        if hook is not None:
            where = name or "all of it"
            return f"{where} is offloaded (accelerate's {hook}); load it onto one device"
    if (getattr(model, "_tp_size", None) or 1) > 1:
        return "it is sharded over devices (tensor parallel)"
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            return f"{name} has no data (it is on the meta device); load it onto one device"
        if hasattr(parameter, "device_mesh"):
            return f"{name} is sharded over devices ({type(parameter).__name__})"
    devices = {str(parameter.device) for parameter in model.parameters()}
    if len(devices) > 1:
        return f"it lies on more than one device ({', '.join(sorted(devices))})"
    return None


def _offloading(hook: Any) -> str | None:
    """The name of the part of accelerate's hook that does more than to move tensors to where the
    module is; None if none does."""
    if hook is None:
        return None
    if type(hook).__name__ == "SequentialHook":
        return next(filter(None, map(_offloading, hook.hooks)), None)
    aligns = type(hook).__name__ == "AlignDevicesHook" and not hook.offload
    return None if aligns else type(hook).__name__


def _attention(model: PreTrainedModel) -> str | None:
    name = model.config._attn_implementation
    if name in (None, "eager"):
        return None
    function = AttentionInterface().get(name)
    function = getattr(function, "func", function)  # of a partial
    module = getattr(function, "__module__", "") or ""
    own = module.split(".")[0] == "transformers" or function is None
    if own and getattr(function, "__name__", SAME_ATTENTION[0]) in SAME_ATTENTION:
        return None
    called = f"{module}.{getattr(function, '__qualname__', function)}"
    return f"its attn_implementation {name!r} is {called}, which paged attention would not call"


def swap_refusal(name: str, module: nn.Module) -> str | None:
    """Why ``module``, called ``name``, cannot make room for a stand-in, or None.

    Its weights are used without it: what else it does, and what is hooked to it, would be lost.
    """
    if has_hooks(module):
        return f"{name} has forward hooks, which paged attention would not call"
    # Accelerate's own only moves tensors to where the module is.
    if (
        own_forward(module, "_old_forward" if hasattr(module, "_hf_hook") else "forward")
        is not None
    ):
        return f"{name} has a forward of its own, which paged attention would not call"
    return None
