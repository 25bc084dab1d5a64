"""Wrappers around a loaded model: PEFT's and torch.compile's; hooks and wrapped calls of modules;
methods that tinyspec serves.

Knows neither attention nor passes. peft is not imported: its models are recognised by attributes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from inspect import getclosurevars
from os import PathLike
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from tinyspec.errors import UnsupportedModelError, unsupported

# The dtype to which autocast casts; None where it is off.
Casts = torch.dtype | None
CAPTURING = "transformers.utils.output_capturing"
# Where the functions are defined that ``torch.autocast(...)(forward)`` and accelerate's mixed
# precision put around a forward.
AUTOCASTING = ("torch.amp.autocast_mode", "accelerate.utils.operations")
# PEFT's methods that compute something in the wrapper, which passes do not call.
IN_THE_WRAPPER = ("ADAPTION_PROMPT", "POLY", "SHADOW", "XLORA")


class Method:
    """A method of ``model`` that tinyspec serves. Copies of the model, in memory or on disk, get
    their own back."""

    def __init__(self, model: PreTrainedModel, name: str, served: Callable[..., Any]):
        self._model, self._name, self._served = model, name, served
        self.before = vars(model).get(name)
        self.original: Callable[..., Any] = getattr(model, name)
        functools.update_wrapper(self, self.original, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._served(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _own_method, (self._model, self._name, self.before)

    def put_in(self) -> None:
        """Let the model's method be this."""
        vars(self._model)[self._name] = self

    def take_out(self) -> None:
        """Give the model its own back, also from under another one that was put over this."""
        table = vars(self._model)
        over = table.get(self._name)
        if over is self:
            del table[self._name]
            if self.before is not None:
                table[self._name] = self.before
            return
        while isinstance(over, Method) and over.before is not self:
            over = over.before
        if isinstance(over, Method):
            over.before = self.before


def _own_method(model: PreTrainedModel, name: str, before: Callable[..., Any] | None) -> Any:
    """A method of an unpatched model: ``before``, set on the model, or its class's."""
    return before or getattr(type(model), name).__get__(model)


def unwrap(model: Any) -> PreTrainedModel:
    """The transformers model inside of PEFT's and torch.compile's wrappers, or ``model`` itself.

    Adapters in the model's layers (such as LoRA) stay there.

    Raises UnsupportedModelError for anything but a transformers model, for PEFT methods that
    compute something in the wrapper (such as prompt learning), and for a wrapper with hooks.
    """
    while not isinstance(model, PreTrainedModel):
        inside = _inside(model)
        if inside is None:
            reason = (
                "it is neither a transformers model nor PEFT's or torch.compile's wrapper of one"
            )
            if isinstance(model, (str, PathLike)):
                reason += f"; Engine.from_pretrained({str(model)!r}) loads one by name"
            raise unsupported(model, reason)
        if has_hooks(model):
            raise UnsupportedModelError(
                f"{type(model).__name__} has forward hooks, which would not run: passes call the "
                "model inside; register them there"
            )
        model = inside
    return model


def is_compiled(module: Any) -> bool:
    """Whether ``module`` is a wrapper that ``torch.compile(module)`` returned."""
    # By name: importing dynamo takes a second.
    return isinstance(module, nn.Module) and type(module).__name__ == "OptimizedModule"


def own_forward(module: nn.Module, attribute: str = "forward") -> Any:
    """The forward set on a module itself, as it was before it was compiled or told to run under
    autocast; None where the module has its class's forward."""
    own = vars(module).get(attribute)
    forward = own
    classes = type(module).forward
    while classes not in (forward, getattr(forward, "__func__", None)):
        inside = _wrapped(forward)
        if inside is None:
            # In a wrapper that was made a method is a plain function.
            if isinstance(own, MethodType) and isinstance(forward, FunctionType):
                return MethodType(forward, module)
            return forward
        forward = inside
    return None


def users_forward(module: nn.Module) -> Any:
    """``own_forward``, and not accelerate's, which only moves inputs to the module's device and
    keeps the one before."""
    return own_forward(module, "_old_forward" if hasattr(module, "_hf_hook") else "forward")


def autocast_of(model: Any, device_type: str) -> Casts:
    """The dtype to which a call of ``model`` casts now, in this thread, or None: by the autocast
    around the call, or by what the forwards of wrappers and of the model inside turn on or off."""
    known = torch.amp.is_autocast_available(device_type)  # "meta" has none
    on = known and torch.is_autocast_enabled(device_type)
    found = torch.get_autocast_dtype(device_type) if on else None
    while model is not None:
        found = autocast_within(model, device_type, found)
        model = None if isinstance(model, PreTrainedModel) else _inside(model)
    return found


def autocast_within(module: nn.Module, device_type: str, around: Casts) -> Casts:
    """As ``autocast_of``, in the forward of one module that is called under ``around``."""
    forward, found = vars(module).get("forward"), around
    while forward is not None:
        for cell in getattr(forward, "__closure__", None) or ():
            held = cell.cell_contents
            if isinstance(held, torch.autocast) and held.device == device_type:
                found = held.fast_dtype if held._enabled else None
        forward = _wrapped(forward)
    return found


def underneath(held: Any, default: Any = None) -> Any:
    """What a method of a model was before tinyspec's own was put over it; ``default``: its
    class's."""
    while isinstance(held, Method):
        held = default if held.before is None else held.before
    return held


def runs_class_forward(module: nn.Module) -> bool:
    """Whether a module runs its class's forward, a plain function."""
    return isinstance(type(module).forward, FunctionType) and users_forward(module) is None


def _wrapped(forward: Any) -> Any:
    """What a compiled forward, or one that turns autocast on, calls; None of any other."""
    scope = getattr(forward, "__globals__", {}).get("__name__", type(forward).__module__)
    if scope in AUTOCASTING or isinstance(forward, Method):
        return getattr(forward, "__wrapped__", None)
    # Dynamo's own function around it: with fullgraph, or where the class is torch's.
    if scope == "torch._dynamo.external_utils":
        return getclosurevars(forward).nonlocals["fn"]
    return getattr(forward, "_torchdynamo_orig_callable", None)


def hooks_of(module: nn.Module) -> list[Any]:
    """Forward and forward-pre hooks of a module.

    Without those that transformers leaves on every module once hidden states were asked for, which
    do nothing in other calls, and those that only mark an output for gradients, which trainers put
    on and take off around every call.
    """
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    others = [hook for hook in hooks if getattr(hook, "__module__", None) != CAPTURING]
    return [hook for hook in others if _steps(hook) != _steps(_marks_for_gradients)]


def _marks_for_gradients(module: nn.Module, args: Any, output: Any) -> None:
    output.requires_grad_(True)


def _steps(function: Any) -> tuple[Any, ...]:
    """What a function computes: equal where only names of variables differ."""
    code = getattr(function, "__code__", None)
    if code is None:
        return ()
    return code.co_argcount, code.co_code, code.co_names, code.co_consts, code.co_freevars


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has ``hooks_of``."""
    return bool(hooks_of(module))


def _inside(model: Any) -> Any:
    """What a wrapper holds; None of anything but a wrapper."""
    if is_compiled(model):
        return model._orig_mod
    tuner = getattr(model, "base_model", None)
    configs = getattr(model, "peft_config", None)
    if not isinstance(model, nn.Module) or not isinstance(configs, dict) or tuner is None:
        return None
    for name, config in configs.items():
        _refuse_method(model, name, config)
    return tuner.model


def _refuse_method(wrapper: object, name: str, config: Any) -> None:
    """Raise for an adapter that the layers of the model do not compute by themselves."""
    kind = getattr(config.peft_type, "value", config.peft_type)
    why = None
    if getattr(config, "is_prompt_learning", False):
        why = "its virtual tokens are added outside of the model"
    elif kind in IN_THE_WRAPPER:
        why = "part of it is computed outside of the model's layers"
    elif getattr(config, "alora_invocation_tokens", None):
        why = "PEFT's generate finds where it begins (alora_invocation_tokens)"
    if why is not None:
        raise unsupported(wrapper, f"adapter {name!r} is {kind}, and {why}")
