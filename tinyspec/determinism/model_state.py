"""What the bits of a pass depend on in a model: weights, modules, hooks, settings, adapters.

All is described as it would be in any process, without addresses: what a function or an object of
the user's holds beyond its code and its plain values is not seen. Knows no engine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator
from contextlib import suppress
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from tinyspec.model.install import KeepsHidden
from tinyspec.model.linears import RowTiles
from tinyspec.model.outline import BASE
from tinyspec.model.quantized import layout
from tinyspec.model.torch_state import global_hooks
from tinyspec.model.wrappers import hooks_of, users_forward

PLAIN = (bool, int, float, str, type(None))
_CONSTANT = (bool, float, str)
# Whose private attributes are bookkeeping, and whose code has a version in the fingerprint.
OWN = ("transformers", "torch", "tinyspec")
LIBRARIES = (*OWN, "peft", "torchao", "bitsandbytes", "accelerate", "builtins")
# Attributes that no bit of a pass depends on.
_IDLE = BASE | {"forward", "gradient_checkpointing", "name_or_path", "generate", "context"}
# How deep objects inside of objects are described.
DEPTH = 4


def top_package(kind: Any) -> str:
    """The package that a class or function comes from."""
    return (getattr(kind, "__module__", None) or "").split(".")[0]


def package_of(module: nn.Module) -> str:
    """The package of a module's class, or of the class of a user's that it stands in for."""
    package, stands_in_for = (top_package(k) for k in (type(module), type(module).__bases__[-1]))
    return stands_in_for if package == "tinyspec" and stands_in_for not in OWN else package


def is_users(module: nn.Module) -> bool:
    """Whether its class, a hook or a forward of its own comes from no known library."""
    own = [*hooks_of(module), *filter(None, [vars(module).get("forward")])]
    packages = (top_package(x if hasattr(x, "__qualname__") else type(x)) for x in own)
    return not {package_of(module), *packages} <= set(LIBRARIES)


def runs_user_code(model: nn.Module) -> bool:
    """Whether passes run hooks or modules of no known library."""
    return bool(global_hooks()) or any(map(is_users, model.modules()))


def tensors(model: nn.Module, ignored: Collection[str] = ()) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor of every parameter, buffer and attribute but ``ignored``, each tensor
    once."""
    seen: set[int] = set()
    for name, module in model.named_modules():
        tables: list[dict[str, Any]] = [module._parameters, module._buffers]
        if package_of(module) != "tinyspec":
            tables.append(vars(module))
        for table in tables:
            for key, value in table.items():
                if isinstance(value, Tensor) and id(value) not in seen:
                    full = f"{name}.{key}".lstrip(".")
                    if full not in ignored:
                        seen.add(id(value))
                        yield full, value


def layouts(model: nn.Module) -> dict[str, Any]:
    """By name, how every parameter and buffer lies in memory."""
    held = [*model.named_parameters(), *model.named_buffers()]
    return {name: layout(tensor) for name, tensor in held}


def functions(model: nn.Module) -> dict[str, Any]:
    """By name: class, hooks and own forward of every module; hooks on all modules."""
    found: dict[str, Any] = {"hooks of all modules": list(map(description, global_hooks()))}
    kinds: dict[type, Any] = {}
    for name, module in model.named_modules():
        kind = type(module)
        if isinstance(module, KeepsHidden):  # no bit depends on it
            kind = kind.__bases__[-1]
        if kind not in kinds:
            kinds[kind] = class_description(kind)
        own = users_forward(module)
        if getattr(own, "__qualname__", "").startswith(RowTiles.__name__):
            own = None  # in tiles it has the same bits
        hooks = [description(hook) for hook in hooks_of(module)]
        found[name or type(model).__name__] = [kinds[kind], hooks, description(own)]
    return found


def function_settings(model: nn.Module, ignored: Collection[str] = ()) -> dict[str, Any]:
    """By name, described: every attribute but ``ignored`` that may enter what a module computes.

    Of transformers', torch's and our own modules these are public plain values and functions, of
    others all that they hold: of adapters (peft's tuner layers) which are in use, too, unless they
    are disabled.
    """
    found = {}
    for name, module in model.named_modules():
        package = package_of(module)
        # A model's other attributes say where it came from, and what it generates with.
        whole = isinstance(module, PreTrainedModel)
        disabled = package == "peft" and getattr(module, "disable_adapters", None) is True
        idle = _IDLE | {"_active_adapter"} if disabled else _IDLE
        for key, value in vars(module).items():
            full = f"{name}.{key}".lstrip(".")
            if key in idle or key.startswith("tinyspec_") or full in ignored:
                continue
            if isinstance(value, (nn.Module, PreTrainedConfig)) or _holds_tensors(value):
                continue
            if whole and not isinstance(value, (bool, int, float)):
                continue
            if package not in OWN or (not key.startswith("_") and _enters(value, package)):
                found[full] = description(value)
    return found


def _holds_tensors(value: Any) -> bool:
    """Whether a value is a tensor, or has some among others, as something computed has."""
    if isinstance(value, dict):
        value = list(value.values())
    return isinstance(value, Tensor) or (
        isinstance(value, (list, tuple)) and any(map(_holds_tensors, value))
    )


def _enters(value: Any, package: str) -> bool:
    """Whether a public attribute of a library's module may enter what it computes."""
    if isinstance(value, (list, tuple, dict, set)):
        return package != "tinyspec"
    return isinstance(value, PLAIN) or callable(value)


def class_description(kind: Any) -> Any:
    """Name and forward of a class; of one that has no version, all of its code."""
    name = f"{kind.__module__}.{kind.__qualname__}"
    own = [part for part in kind.__mro__ if top_package(part) not in LIBRARIES]
    code = [
        [key, _code(value.__code__)]
        for part in own
        for key, value in sorted(vars(part).items())
        if isinstance(value, FunctionType)
    ]
    return [name, description(kind.forward), code]


def description(value: Any, depth: int = DEPTH) -> Any:
    """What can be said of a value that is the same in every process, as JSON takes it: of functions
    their name and, where they have no version, code and what they enclose; of other objects their
    class and, unless it is a library's, their plain values."""
    if isinstance(value, PLAIN):
        return value
    if depth == 0:
        return type(value).__qualname__
    inner = partial(description, depth=depth - 1)
    if isinstance(value, dict):
        return sorted(([str(key), inner(held)] for key, held in value.items()), key=repr)
    if isinstance(value, (list, tuple)):
        return [inner(held) for held in value]
    if isinstance(value, (set, frozenset)):
        return sorted(map(inner, value), key=repr)
    if isinstance(value, partial):
        return ["partial", *map(inner, (value.func, value.args, value.keywords))]
    if isinstance(value, MethodType):
        return [inner(value.__func__), inner(value.__self__)]
    if isinstance(value, (torch.dtype, torch.device)):
        return str(value)
    if isinstance(value, (FunctionType, BuiltinFunctionType, type)):
        name = f"{value.__module__}.{value.__qualname__}"
        if not isinstance(value, FunctionType) or top_package(value) in LIBRARIES:
            return name
        return [name, _code(value.__code__), inner(value.__defaults__), inner(_enclosed(value))]
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    if top_package(type(value)) in LIBRARIES or isinstance(value, (nn.Module, Tensor)):
        return name
    # Numbers that objects count with are no settings.
    held = {k: v for k, v in getattr(value, "__dict__", {}).items() if isinstance(v, _CONSTANT)}
    return [name, inner(held)]


def _enclosed(function: FunctionType) -> list[Any]:
    """What a function encloses, but for what it may collect."""
    found = []
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # it is empty
            found.append(cell.cell_contents)
    return [type(x).__name__ if isinstance(x, (list, dict, set)) else x for x in found]


def _code(code: CodeType) -> str:
    """Digest of what a function does: not of its file or its lines."""
    constants = [
        _code(value)
        if isinstance(value, CodeType)
        else sorted(map(repr, value))
        if isinstance(value, frozenset)
        else repr(value)
        for value in code.co_consts
    ]
    text = repr((code.co_code, code.co_names, code.co_varnames, constants))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
