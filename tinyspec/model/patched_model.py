"""Everything that was changed in a model for paged attention, so that it can be undone.

Knows which module replaced which, not how they are chosen.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import copy
from threading import RLock
from typing import Any
from weakref import ref

from torch import nn
from transformers import PreTrainedModel

from tinyspec.errors import refuse
from tinyspec.model.attention import IMPLEMENTATION, TAKEN, AttentionContext, PagedAttention
from tinyspec.model.attention_calls import LayerShape
from tinyspec.model.config_views import ConfigViews
from tinyspec.model.cpu.fast_mode import FastMode
from tinyspec.model.exchange import ABSENT, Place
from tinyspec.model.lending import Lending
from tinyspec.model.modules import calls_interface, children
from tinyspec.model.moe import IMPLEMENTATION as EXPERTS
from tinyspec.model.moe import Experts, has_experts
from tinyspec.model.positions import GivenPositions, RopeTable
from tinyspec.model.private_names import ATTENTION_CHOICE, EXPERTS_CHOICE
from tinyspec.model.quantized import trace
from tinyspec.model.row_tiles import RowTiles
from tinyspec.model.stand_in import FusedModule
from tinyspec.model.torch_state import TorchState
from tinyspec.model.wrappers import hooks_of, is_compiled, own_forward, wrapped_calls

# Settings of a config that users change from call to call, or ``save_pretrained`` does, and no
# stand-in depends on.
CALL_SETTINGS = {
    "architectures",
    *("use_cache", "dtype", "return_dict", "output_hidden_states", "output_attentions"),
    *("pad_token_id", "bos_token_id", "eos_token_id"),
}

# What torch keeps on every module, and attributes without effect.
_KEPT = {*vars(nn.Module()), "forward", "gradient_checkpointing", "_compiled_call_impl"}
_VALUES = (bool, int, float, str, tuple, type(None))  # of settings
_PLAIN = frozenset(_VALUES)


class PatchedModel:
    """What ``install`` does to a model, kept on it as ``_tinyspec`` until all of it is undone.

    configs: those that choose the attention. layers: heads of every attention call of a forward, in
    order. swapped: children of modules and their stand-ins, in the order of swapping. bound:
    modules that call the attention interface. tiles: linears that run in tiles of rows. left:
    whether the model is its own; None while an exchange runs or after it was cut off: the next one
    then begins by undoing it. owner: the engine, referred to weakly, so that a model keeps none.
    lock: held during an exchange.
    """

    def __init__(self, model: PreTrainedModel, linear: str = "auto", owner: object | None = None):
        self.model, self.context = model, AttentionContext()
        self.owner = None if owner is None else ref(owner)
        models = [m for m in model.modules() if isinstance(m, PreTrainedModel)]
        self.bound = [module for module in model.modules() if calls_interface(module)]
        holders = [m for m in (*models, *self.bound) if getattr(m, "config", None)]
        self.configs: list[Any] = list({id(m.config): m.config for m in holders}.values())
        self.layers: list[LayerShape] = []
        self.keeps_logits = True
        self.swapped: list[Place] = []
        self.fast_mode, self.tiles = FastMode(), RowTiles()
        self.torch_state: TorchState | None = None
        self.left: bool | None = None
        self._lent = False
        # The modules that stand-ins were made of, and the outline of the model, when ``suspend``
        # first left it.
        self.taken: list[nn.Module] = []
        self.outline: list[object] | None = None
        self._views = ConfigViews(vars(m).get("config") for m in model.modules())
        self._experts = Experts(model, self.context, linear) if has_experts(model) else None
        self._lendings = [Lending(m, self.context, self.lend) for m in models]
        self._held: list[Place] = []
        self.lock = RLock()

    @property
    def abandoned(self) -> bool:
        """Whether the owner is no more."""
        return self.owner is not None and self.owner() is None

    def swap(self, parent: nn.Module, name: str, module: nn.Module) -> None:
        """Replace ``parent``'s child ``name`` by ``module``."""
        place = Place(parent._modules, name, parent._modules[name], module)
        self.swapped.append(place)
        place.put_in()

    def undo(self, kept: int = 0) -> None:
        """Undo all swaps but the first ``kept``."""
        while len(self.swapped) > kept:
            self.swapped[-1].take_out()
            self.swapped.pop()

    def hold(self) -> None:
        """Put in all but stand-ins: what modules that call the attention interface and experts need
        to know, views of configs, calls without wrappers. They fit the model as it is now."""
        self._hold(list(self.model.modules()))

    def _hold(self, modules: list[nn.Module]) -> None:
        self._held = self._found(modules)
        for place in self._held:
            place.put_in()

    def _found(self, modules: list[nn.Module]) -> list[Place]:
        # What lends comes first, and is taken out last: it finishes what was cut off.
        found = [place for lending in self._lendings for place in lending.places()]
        lent = {id(place.table) for place in found}
        found += [Place(vars(m), "tinyspec_context", ABSENT, self.context) for m in self.bound]
        for config in self.configs:
            self._views.choose(config, ATTENTION_CHOICE, IMPLEMENTATION)
        if self._experts is not None:
            for config, members in self._experts.served():
                self._views.choose(config, EXPERTS_CHOICE, EXPERTS)
                found += self._experts.places(config, members)
        for module in modules:
            table = vars(module)
            if "forward" in table or table.get("_compiled_call_impl") is not None:
                wrapped = wrapped_calls(module)
                found += [p for p in wrapped if p.key != "forward" or id(table) not in lent]
            config = table.get("config")
            if config is not None and (view := self._views.of(config)) is not config:
                found.append(Place(table, "config", config, view))
        return found

    def take_out(self) -> None:
        """Restore the model; what is left of it where that was cut off."""
        with self.lock:
            if self.left:
                return
            self.left = None
            if self.tiles.bound:
                self.tiles.suspend()
            for place in reversed([*self._held, *self.swapped]):
                place.take_out()
            if any(place.table.get(place.key) is not place.own for place in self.swapped):
                self._take_out_moved()
            self.left = True

    def _take_out_moved(self) -> None:
        """As ``take_out``, of stand-ins that are elsewhere in the model now: in a wrapper that
        somebody has put in their place."""
        own = {id(p.served): p.own for p in self.swapped if not is_compiled(p.own)}
        for parent, name, child in children(self.model):
            while id(child) in own:
                Place(parent._modules, name, own[id(child)], child).take_out()
                child = own[id(child)]

    def suspend(self) -> None:
        """Restore the model until ``resume``."""
        with self.lock:
            self._lent = False
            self.take_out()
            # The first one: what changed while the stand-ins were in may not have reached them.
            if self.outline is None:
                self.taken = [*(place.own for place in self.swapped), *self.bound]
                self.outline = self._outline(list(self.model.modules()))

    def resume(self) -> bool:
        """Put the stand-ins in again.

        False, and nothing done, where they no longer fit: modules, hooks, settings, dtype or device
        have changed.
        """
        with self.lock:
            if self.left is not False:
                self.suspend()
                modules = list(self.model.modules())
                if self._outline(modules) != self.outline:
                    return False
                self.left = None
                self._hold(modules)
                for place in self.swapped:
                    place.put_in()
                if self.tiles.bound:
                    self.tiles.resume()
                self.left = False
            return True

    def lend(self) -> None:
        """Restore the model until ``take_back``, for a forward of its own or a copy.

        Raises RuntimeError while the engine runs.
        """
        with self.lock:
            if self.torch_state is not None and self.torch_state.entered:
                raise RuntimeError(TAKEN)
            self.suspend()
            self._lent = True

    def take_back(self) -> None:
        """``resume`` after ``lend``, or after that was cut off. Raises ValueError where the
        stand-ins no longer fit."""
        with self.lock:
            if (self._lent or self.left is None) and not self.resume():
                self._lent = True
                allowed = "change it back, or close the engine and make a new one"
                raise refuse("model", "changed in modules, hooks or settings", allowed)

    def _outline(self, modules: list[nn.Module]) -> list[object]:
        """What stand-ins depend on: every module, its hooks, whether it has a forward of its own,
        and the types of its weights; of replaced modules also settings and buffers."""
        model = self.model
        hooked = [m for m in modules if m._forward_hooks or m._forward_pre_hooks]
        return [
            *(model.dtype, model.device, self._settings_of_configs()),
            *(modules, list(map(type, modules))),
            [(module, hooks) for module in hooked if (hooks := hooks_of(module))],
            [list(map(type, module._parameters.values())) for module in modules],
            ["forward" in vars(module) for module in modules],
            [(_settings(module), _buffers(module)) for module in self.taken],
        ]

    def _settings_of_configs(self) -> dict[str, object]:
        found: dict[str, object] = {}
        for config in self.configs:
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
    settings: dict[str, object] = {}
    for name, value in vars(module).items():
        if name in _KEPT or name.startswith(("tinyspec_", "_tables")):
            continue
        kind = type(value)  # to ask a config of its class takes longer
        if kind in _PLAIN:
            settings[name] = value
        elif issubclass(kind, (list, dict)):
            settings[name] = copy(value)
        elif issubclass(kind, _VALUES) or (callable(value) and not issubclass(kind, nn.Module)):
            settings[name] = value
    return settings


def _buffers(module: nn.Module) -> dict[str, object]:
    return {name: trace(held) for name, held in module._buffers.items() if held is not None}
