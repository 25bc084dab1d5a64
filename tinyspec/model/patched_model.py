"""Everything that was changed in a model for paged attention, so that it can be undone.

Knows which module replaced which, not how they are chosen.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import copy
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from tinyspec.model.attention import IMPLEMENTATION, AttentionContext, PagedAttention
from tinyspec.model.attention_calls import LayerShape
from tinyspec.model.cpu.fast_mode import FastMode
from tinyspec.model.modules import replace_child
from tinyspec.model.moe import Experts
from tinyspec.model.positions import GivenPositions, RopeTable
from tinyspec.model.private_names import ATTENTION_CHOICE
from tinyspec.model.quantized import trace
from tinyspec.model.stand_in import FusedModule
from tinyspec.model.wrappers import WrappedCalls, hooks_of, own_forward

# Settings of a config that users change from call to call and no stand-in depends on.
CALL_SETTINGS = {
    *("use_cache", "dtype", "return_dict", "output_hidden_states", "output_attentions"),
    *("pad_token_id", "bos_token_id", "eos_token_id"),
}

# What torch keeps on every module, and attributes without effect.
_KEPT = {*vars(nn.Module()), "forward", "gradient_checkpointing", "_compiled_call_impl"}


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
    # The modules that stand-ins were made of, and the outline of the model, when ``suspend`` first
    # left it; whether it has.
    taken: list[nn.Module] = field(default_factory=list)
    outline: list[object] | None = None
    left: bool = False

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
        self.left = True
        # The first one: what changed while the stand-ins were in may not have reached them.
        if self.outline is None:
            self.taken = [*(before for _, _, before, _ in self.swapped), *self.bound]
            self.outline = self._outline()

    def resume(self) -> bool:
        """Put the stand-ins in again.

        False, and nothing done, where they no longer fit: modules, hooks, settings, dtype or device
        have changed.
        """
        if self.left:
            if self._outline() != self.outline:
                return False
            for parent, name, before, module in self.swapped:
                replace_child(parent, name, before, module)
            self.bind()
            self.wrapped.set_aside()
            self.left = False
        return True

    def _outline(self) -> list[object]:
        """What stand-ins depend on: every module, its hooks, whether it has a forward of its own,
        and the types of its weights; of replaced modules also settings and buffers."""
        model = self.model
        outline: list[object] = [model.dtype, model.device, self._settings_of_configs()]
        for module in model.modules():
            kinds = [type(parameter) for parameter in module._parameters.values()]
            outline += [module, type(module), hooks_of(module), kinds, "forward" in vars(module)]
        for module in self.taken:
            outline += [_settings(module), _buffers(module)]
        return outline

    def _settings_of_configs(self) -> dict[str, object]:
        found: dict[str, object] = {}
        for config, _ in self.configs:
            settings = {"_attn_implementation": config._attn_implementation, **config.to_dict()}
            for name, value in settings.items():
                if name not in CALL_SETTINGS and "experts_implementation" not in name:
                    found[f"{type(config).__name__}.{name}"] = value
        return found

    def _taken_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Attention and fused modules, rotary and position tables and what these were made of, by
        name."""
        names = {id(module): name for name, module in self.model.named_modules()}
        called = {layer.module_id for layer in self.context.layers}
        for module in self.model.modules():
            name = names[id(module)]
            if id(module) in called or isinstance(module, FusedModule):
                yield name, module
            if isinstance(module, (GivenPositions, RopeTable)):
                yield name, module
                yield f"{name}.original", vars(module)["_original"][0]

    def taken_over(self) -> dict[str, object]:
        """By name, what the engine and its stand-ins took from the model when they were made:
        passes follow no change of it.

        Configs, dtype and device, attributes of attention and fused modules, rotary and position
        tables, and which modules these are, and their parts that are not called.
        """
        found = self._settings_of_configs()
        found |= {"dtype": self.model.dtype, "device": self.model.device}
        modules = dict(self._taken_modules())
        for layer in self.context.layers:
            same = id(modules.get(layer.name)) == layer.module_id
            found[f"the module {layer.name}"] = same
        for name, module in modules.items():
            found |= {f"{name}.{key}": value for key, value in _settings(module).items()}
            for number, part in enumerate(_bypassed(module)):
                found[f"part {number} of {name}"] = part, hooks_of(part), own_forward(part)
        return found

    def taken_buffers(self) -> dict[str, object]:
        """As ``taken_over``: address and version of the buffers of these modules."""
        return {
            f"{name}.{key}": value
            for name, module in self._taken_modules()
            for key, value in _buffers(module).items()
        }

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


def _bypassed(module: nn.Module) -> Iterable[nn.Module]:
    """The parts of a stand-in whose weights are used and whose forward is not called."""
    if isinstance(module, FusedModule):
        return module.bypassed()
    if isinstance(module, PagedAttention) and module.has_norm:
        return module.q_norm, module.k_norm
    return ()


def _settings(module: nn.Module) -> dict[str, object]:
    """Plain values and functions that a module holds, without what torch and tinyspec keep."""
    kinds = (bool, int, float, str, list, tuple, dict, type(None))
    return {
        name: copy(value) if isinstance(value, (list, dict)) else value
        for name, value in vars(module).items()
        if name not in _KEPT and not name.startswith(("tinyspec_", "_tables"))
        if not isinstance(value, nn.Module) and (isinstance(value, kinds) or callable(value))
    }


def _buffers(module: nn.Module) -> dict[str, object]:
    return {name: trace(buffer) for name, buffer in module.named_buffers(recurse=False)}
