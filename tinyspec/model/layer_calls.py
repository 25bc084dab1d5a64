"""How a model calls its pre-norm decoder layers, and what it calls with what they return.

Recorded in one forward of a few rows, with attention replaced by a recorder. Knows no kernels.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from tinyspec.model.attention_calls import ModuleCall
from tinyspec.model.equivalence import same_bits
from tinyspec.model.introspection import Record, probe_forward
from tinyspec.model.layer_structure import is_norm, is_pre_norm


@dataclass
class LayerCall:
    """The call of a layer, or of a norm that is part of none, in a forward.

    output: what it returned, and a copy. following: what was called with that very tensor, as it
    was returned.
    """

    module: nn.Module
    given: list[ModuleCall] = field(default_factory=list)
    output: tuple[Tensor, Tensor] | None = None
    following: list[nn.Module] = field(default_factory=list)

    def returned(self, hidden: object) -> bool:
        """Whether this is the output, to which nobody has written."""
        made = self.output
        return made is not None and made[0] is hidden and same_bits(*made)


def layer_calls(model: PreTrainedModel, record: Record, last: int) -> list[LayerCall]:
    """The calls of pre-norm layers, and of norms outside of them, in a forward of rows at positions
    from 0 to ``last``; of those that are called once."""
    layers = [module for module in model.modules() if is_pre_norm(module)]
    inside = {id(part) for layer in layers for part in layer.modules()}
    norms = [m for m in model.modules() if id(m) not in inside and is_norm(m)]
    if not layers:
        return []
    calls = {id(module): LayerCall(module) for module in (*layers, *norms)}

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = ModuleCall(args, kwargs)
        calls[id(module)].given.append(call)
        for earlier in calls.values():
            if earlier.returned(call.hidden):
                earlier.following.append(module)

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if isinstance(output, Tensor):
            calls[id(module)].output = output, output.clone()

    called = (*layers, *norms)
    hooks = [module.register_forward_pre_hook(before, with_kwargs=True) for module in called]
    hooks += [layer.register_forward_hook(after) for layer in layers]
    try:
        probe_forward(model, record, last)
    finally:
        for hook in hooks:
            hook.remove()
    return [call for call in calls.values() if len(call.given) == 1]
