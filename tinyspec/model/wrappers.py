"""What was put around a loaded model: PEFT's and torch.compile's wrappers, and compiled calls.

Knows neither attention nor passes. peft is not imported: its models are known by what they have.
"""

from __future__ import annotations

from collections.abc import Iterator
from inspect import getclosurevars
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from tinyspec.errors import UnsupportedModelError

CAPTURING = "transformers.utils.output_capturing"
# PEFT's methods that do part of their work in the wrapper, which passes do not go through.
IN_THE_WRAPPER = ("ADAPTION_PROMPT", "POLY", "SHADOW", "XLORA")


def unwrap(model: Any) -> PreTrainedModel:
    """The transformers model inside of PEFT's and torch.compile's wrappers, or ``model`` itself.

    Adapters that live in the model's layers (LoRA and its like) stay there.

    Raises UnsupportedModelError for what is no transformers model, for PEFT's prompt learning and
    other methods that do their work in the wrapper, and for a wrapper with hooks.
    """
    while not isinstance(model, PreTrainedModel):
        inside = _inside(model)
        if inside is None:
            raise UnsupportedModelError(
                f"{type(model).__name__} is not supported: it is neither a transformers model nor "
                "PEFT's or torch.compile's wrapper of one"
            )
        if has_hooks(model):
            raise UnsupportedModelError(
                f"{type(model).__name__} has forward hooks, which would not run: passes go through "
                "the model inside; register them there"
            )
        model = inside
    return model


def is_compiled(module: Any) -> bool:
    """Whether a module is the wrapper that ``torch.compile(module)`` returns."""
    # By name: importing dynamo takes a second.
    return isinstance(module, nn.Module) and type(module).__name__ == "OptimizedModule"


def own_forward(module: nn.Module, attribute: str = "forward") -> Any:
    """The forward that stands on a module itself, as it was before it was compiled; None where it
    is that of the module's class."""
    forward = vars(module).get(attribute)
    compiled = getattr(forward, "_torchdynamo_orig_callable", None)
    if compiled is not None:
        forward = compiled
        # Dynamo's own frame around it: where a class of torch is compiled, or with fullgraph.
        scope = getattr(forward, "__globals__", {}).get("__name__")
        if scope == "torch._dynamo.external_utils":
            forward = getclosurevars(forward).nonlocals["fn"]
    return None if getattr(forward, "__func__", None) is type(module).forward else forward


def hooks_of(module: nn.Module) -> list[Any]:
    """Forward and forward-pre hooks of a module, but for those that transformers leaves everywhere
    once hidden states were asked for: they do nothing unless these are."""
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return [hook for hook in hooks if getattr(hook, "__module__", None) != CAPTURING]


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has ``hooks_of`` its own."""
    return bool(hooks_of(module))


def _inside(model: Any) -> Any:
    """What a wrapper holds; None of anything that is no wrapper."""
    if is_compiled(model):
        return model._orig_mod
    tuner = getattr(model, "base_model", None)
    configs = getattr(model, "peft_config", None)
    if not isinstance(model, nn.Module) or not isinstance(configs, dict) or tuner is None:
        return None
    for name, config in configs.items():
        _refuse_method(type(model).__name__, name, config)
    return tuner.model


def _refuse_method(wrapper: str, name: str, config: Any) -> None:
    """Raise for an adapter whose work is not all done by the layers of the model."""
    kind = getattr(config.peft_type, "value", config.peft_type)
    why = None
    if getattr(config, "is_prompt_learning", False):
        why = "its virtual tokens are not in the model"
    elif kind in IN_THE_WRAPPER:
        why = "part of it is done outside of the model's layers"
    elif getattr(config, "alora_invocation_tokens", None):
        why = "where it begins (alora_invocation_tokens) is found by PEFT's generate"
    if why is not None:
        raise UnsupportedModelError(
            f"{wrapper} is not supported: adapter {name!r} is {kind}, and {why}"
        )


def compiled_modules(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """(parent, name, what was compiled) of every wrapper of torch.compile inside of ``model``."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if is_compiled(child) and not is_compiled(parent):
                yield parent, name, _innermost(child)


def _innermost(module: nn.Module) -> nn.Module:
    while is_compiled(module):
        module = module._orig_mod  # type: ignore[assignment]
    return module


class CompiledCalls:
    """What ``module.compile()`` and ``module.forward = torch.compile(module.forward)`` left on the
    modules of one model.

    Passes have many shapes, and each would compile anew. While calls are set aside, modules run as
    they were before.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._calls: list[tuple[nn.Module, str, object]] = []

    def set_aside(self) -> None:
        """Let all modules run as they were before they were compiled."""
        for module in self._model.modules():
            attributes = vars(module)
            if attributes.get("_compiled_call_impl") is not None:
                self._keep(module, "_compiled_call_impl")
            compiled = hasattr(attributes.get("forward"), "_torchdynamo_orig_callable")
            if compiled and not is_compiled(module):
                # What was compiled may have been somebody's own forward.
                before = own_forward(module)
                self._keep(module, "forward")
                if before is not None:
                    attributes["forward"] = before

    def _keep(self, module: nn.Module, name: str) -> None:
        self._calls.append((module, name, vars(module).pop(name)))

    def put_back(self) -> None:
        """Give all modules their compiled calls back."""
        while self._calls:
            module, name, call = self._calls.pop()
            vars(module)[name] = call
