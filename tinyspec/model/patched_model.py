"""Everything that was changed in a model for paged attention, so that it can be undone.

Knows which module replaced which, not how they are chosen.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from tinyspec.model.attention import IMPLEMENTATION, AttentionContext
from tinyspec.model.attention_calls import LayerShape
from tinyspec.model.cpu.fast_mode import FastMode
from tinyspec.model.modules import replace_child
from tinyspec.model.moe import Experts
from tinyspec.model.private_names import ATTENTION_CHOICE
from tinyspec.model.quantized import trace
from tinyspec.model.wrappers import WrappedCalls, hooks_of

# Settings of a config that users change from call to call and no stand-in depends on.
CALL_SETTINGS = {"use_cache", "dtype", "return_dict", "output_hidden_states", "output_attentions"}


@dataclass
class PatchedModel:
    """What ``install`` did to a model, kept on it as ``_tinyspec``.

    configs: those that choose the attention, and what they chose. layers: heads of every attention
    call of a forward, in order. swapped: (parent, name, the model's own module, its stand-in), in
    the order of swapping. bound: modules that call the attention interface.
    """

    model: PreTrainedModel
    context: AttentionContext
    configs: list[tuple[PreTrainedConfig, str | None]]
    wrapped: WrappedCalls
    layers: list[LayerShape] = field(default_factory=list)
    keeps_logits: bool = True
    swapped: list[tuple[nn.Module, str, nn.Module, nn.Module]] = field(default_factory=list)
    bound: list[nn.Module] = field(default_factory=list)
    fast_mode: FastMode = field(default_factory=FastMode)
    # The outline of the model when ``suspend`` left it; None while the stand-ins are in.
    left: list[object] | None = None

    def __post_init__(self) -> None:
        self.experts = Experts(self.model, self.context)

    def swap(self, parent: nn.Module, name: str, module: nn.Module) -> None:
        """Replace ``parent``'s child ``name`` by ``module``."""
        before: nn.Module = parent._modules[name]  # type: ignore[assignment]
        self.swapped.append((parent, name, before, module))
        replace_child(parent, name, before, module)

    def undo(self, kept: int = 0) -> None:
        """Undo all swaps but the first ``kept``."""
        while len(self.swapped) > kept:
            parent, name, before, module = self.swapped.pop()
            replace_child(parent, name, module, before)

    def take_out(self) -> None:
        """Restore the model."""
        for parent, name, before, module in reversed(self.swapped):
            replace_child(parent, name, module, before)
        for bound in self.bound:
            bound.__dict__.pop("tinyspec_context", None)
        self.experts.take_out()
        self.wrapped.put_back()
        # Not by set_attn_implementation, which refuses what it could not load here.
        for config, implementation in self.configs:
            setattr(config, ATTENTION_CHOICE, implementation)

    def suspend(self) -> None:
        """Restore the model until ``resume``."""
        self.take_out()
        self.left = self._outline()

    def resume(self) -> bool:
        """Put the stand-ins in again.

        False, and nothing done, where they no longer fit: modules, hooks, settings, dtype or device
        have changed.
        """
        if self.left is not None:
            if self._outline() != self.left:
                return False
            for parent, name, before, module in self.swapped:
                replace_child(parent, name, before, module)
            self.bind()
            self.wrapped.set_aside()
            self.left = None
        return True

    def _outline(self) -> list[object]:
        """What stand-ins depend on: every module, its hooks, whether it has a forward of its own,
        and the types of its weights; of replaced modules also settings and buffers."""
        model = self.model
        outline: list[object] = [model.dtype, model.device]
        for config, _ in self.configs:
            settings = {k: v for k, v in config.to_dict().items() if k not in CALL_SETTINGS}
            outline += [config._attn_implementation, settings]
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
        """Make the modules that call the attention interface call paged attention; hand them and
        the experts the context of the pass."""
        for config, _ in self.configs:
            setattr(config, ATTENTION_CHOICE, IMPLEMENTATION)
        for module in self.bound:
            module.__dict__["tinyspec_context"] = self.context
        self.experts.put_in()

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of a patched model, in memory or on disk, is not patched."""
        return type(None), ()
