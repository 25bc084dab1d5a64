"""What was put into a model for paged attention, and the way back.

Knows modules and their places; not which belong where.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from tinyspec.model.attention import IMPLEMENTATION, AttentionContext
from tinyspec.model.attention_calls import LayerShape
from tinyspec.model.linears import FastMode
from tinyspec.model.moe import Experts
from tinyspec.model.quantized import trace
from tinyspec.model.wrappers import CompiledCalls, hooks_of

# What a config says that no stand-in counts on, and people change from call to call.
PASSING = {"use_cache", "dtype", "return_dict", "output_hidden_states", "output_attentions"}


@dataclass
class PatchedModel:
    """What ``install`` did to a model, kept on it as ``_tinyspec``.

    layers: heads of every attention call of a forward, in order. configs: those that say which
    attention is called, and what they said. swapped: (parent, name, the model's own module, its
    stand-in), in the order of swapping. bound: modules that call the attention interface.
    """

    model: PreTrainedModel
    context: AttentionContext
    configs: list[tuple[PreTrainedConfig, str | None]]
    compiled: CompiledCalls
    layers: list[LayerShape] = field(default_factory=list)
    keeps_logits: bool = True
    swapped: list[tuple[nn.Module, str, nn.Module, nn.Module]] = field(default_factory=list)
    bound: list[nn.Module] = field(default_factory=list)
    fast_mode: FastMode = field(default_factory=FastMode)
    # The model as it was left by ``suspend``; None while the stand-ins are in.
    left: list[object] | None = None

    def __post_init__(self) -> None:
        self.experts = Experts(self.model, self.context)

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

    def take_out(self) -> None:
        """Give the model everything back that is its own."""
        for parent, name, before, module in reversed(self.swapped):
            _hand_over(parent, name, module, before)
        for bound in self.bound:
            bound.__dict__.pop("tinyspec_context", None)
        self.experts.take_out()
        self.compiled.put_back()
        # Not by set_attn_implementation, which refuses what it could not load here.
        for config, implementation in self.configs:
            config._attn_implementation_internal = implementation

    def suspend(self) -> None:
        """``take_out``, until ``resume``."""
        self.take_out()
        self.left = self._outline()

    def resume(self) -> bool:
        """Put the stand-ins in again; False, and nothing done, where they no longer fit: modules,
        hooks, dtype or device are not what they were."""
        if self.left is not None:
            if self._outline() != self.left:
                return False
            for parent, name, before, module in self.swapped:
                _hand_over(parent, name, before, module)
            self.bind()
            self.compiled.set_aside()
            self.left = None
        return True

    def _outline(self) -> list[object]:
        """What stand-ins count on: every module as it is there, its hooks, a forward of its own and
        what kind of weights it has; of modules that have stand-ins, their settings and buffers."""
        model = self.model
        outline: list[object] = [model.dtype, model.device]
        for config, _ in self.configs:
            said = {k: v for k, v in config.to_dict().items() if k not in PASSING}
            outline += [config._attn_implementation, said]
        for module in model.modules():
            kinds = [type(parameter) for parameter in module._parameters.values()]
            outline += [module, type(module), hooks_of(module), kinds, "forward" in vars(module)]
        for _, _, before, _ in self.swapped:
            settings = {k: v for k, v in vars(before).items() if isinstance(v, (int, float))}
            settings.pop("training", None)
            buffers = [trace(buffer) for buffer in before.buffers(recurse=False)]
            outline += [settings, buffers]
        return outline

    def bind(self) -> None:
        """Have the modules that call the attention interface call ours, and tell them where the
        pages are, and experts which pass is running."""
        for config, _ in self.configs:
            config._attn_implementation_internal = IMPLEMENTATION
        for module in self.bound:
            module.__dict__["tinyspec_context"] = self.context
        self.experts.put_in()

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of a patched model, in memory or on disk, is not patched."""
        return type(None), ()


def _hand_over(parent: nn.Module, name: str, before: nn.Module, after: nn.Module) -> None:
    """``after`` takes the place of ``before``, with the parameters and the mode that it has now."""
    for own in before._parameters.keys() & after._parameters.keys():
        after._parameters[own] = before._parameters[own]
    after.training = before.training
    parent._modules[name] = after
