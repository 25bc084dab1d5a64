"""The model that an engine runs: a shadow of the user's, with paged attention and other stand-ins.

Knows which module stands in for which, not how they are chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers import PreTrainedModel

from tinyspec.model.attention import IMPLEMENTATION, AttentionContext, LayerShape
from tinyspec.model.linears import RowTiles, calls_interface
from tinyspec.model.outline import IDLE, Outline, Tables
from tinyspec.model.positions import RopeTable
from tinyspec.model.quantized import is_packed, repack_weights, trace
from tinyspec.model.recurrent import RecurrentShape
from tinyspec.model.shadow import Shadow
from tinyspec.model.torch_state import Autocast

# What configs keep the chosen attention under. Set by this name, because the property of nearly the
# same name also writes to the configs inside of a config.
ATTENTION_CHOICE = "_attn_implementation_internal"
# Of attributes that a pass may count with or keep.
COUNTED = (bool, int, float, str, type(None), Tensor)
# Of a tensor in a table of a module, both by their places: its identity, address and version.
Marks = dict[tuple[int, str], tuple[int, ...]]


class Swapped(NamedTuple):
    """A child of a module, and its stand-in."""

    parent: nn.Module
    name: str
    own: nn.Module
    stand_in: nn.Module


class ServedModel:
    """user: the model that this was made of, and outline: as it was then. model, root: the shadows
    of it and of what it is a part of. autocast: of its forward. dtype: of products, queries, keys
    and values.

    layers: heads of every attention call of a forward, in order. channels: of every short
    convolution, recurrent: of every recurrent layer, in order of the modules. swapped: in the order
    of swapping.
    hidden: width of the last hidden states, where passes keep them in pages; else 0.
    bound: modules that call the attention interface. tiles: linears that run in tiles of rows.
    written: names of buffers, and parameters of the user's modules, that passes were seen to write
    to since weights changed otherwise.
    """

    def __init__(self, user: PreTrainedModel, root: nn.Module, autocast: Autocast):
        self.user, self.outline = user, Outline(root)
        self._shadow = shadow = Shadow(root)
        self._take_tensors({})
        self.root: Any = shadow.of(root)
        self.model: PreTrainedModel = shadow.of(user)
        self.autocast, self.context = autocast, AttentionContext(autocast)
        self.dtype = autocast.dtype or self.model.dtype
        self.layers: list[LayerShape] = []
        self.channels: list[int] = []
        self.recurrent: list[RecurrentShape] = []
        self.keeps_logits, self.hidden = True, 0
        self.swapped: list[Swapped] = []
        self.tiles = RowTiles(self.context)
        self.bound = [module for module in self.model.modules() if calls_interface(module)]
        for module in self.bound:
            vars(module)["tinyspec_context"] = self.context
        for module in self.model.modules():
            config = getattr(vars(module).get("config"), "__dict__", {})
            if ATTENTION_CHOICE in config:
                config[ATTENTION_CHOICE] = IMPLEMENTATION
        vars(self.model)["_tinyspec"] = self
        self.written: set[str] = set()
        self._marked = [
            (name, m, "_buffers") for name, m in self.model.named_modules() if m._buffers
        ]
        self._apart: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._own = self._attributes()

    def let_go(self) -> None:
        """Keep nothing of the user's model but its tensors: no change of it is followed any
        more."""
        self.outline.release()
        del self.user, self.outline, self._shadow

    def swap(self, made: Mapping[nn.Module, nn.Module]) -> None:
        """Let modules stand in for those by which they are found, wherever these are."""
        for parent in list(self.model.modules()):
            for name, own in list(parent._modules.items()):
                if own is not None and own in made:
                    self.swapped.append(Swapped(parent, name, own, made[own]))
                    parent._modules[name] = made[own]

    def undo(self, kept: int) -> None:
        """Undo all swaps but the first ``kept``."""
        while len(self.swapped) > kept:
            parent, name, own, _ = self.swapped.pop()
            parent._modules[name] = own

    def mark_parameters(self, of: Callable[[nn.Module], bool]) -> None:
        """``marks`` are of these modules' parameters too: no library's write to them."""
        named = self.model.named_modules()
        self._marked += [(n, m, "_parameters") for n, m in named if m._parameters and of(m)]

    def marks(self) -> Marks:
        """What changes when a buffer is written to or replaced."""
        return {
            (n, key): (id(held), *trace(held))
            for n, (_, module, table) in enumerate(self._marked)
            for key, held in vars(module)[table].items()
            if held is not None and not is_packed(held)
        }

    def written_since(self, before: Marks) -> set[str]:
        """Names of buffers that were written to since these were the ``marks``."""
        if (now := self.marks()) == before:
            return set()
        changed = (place for place, mark in before.items() if now.get(place, mark) != mark)
        return {f"{self._marked[n][0]}.{key}" for n, key in changed}

    def keep_apart(self, before: Marks) -> None:
        """After a pass, with the ``marks`` before it: modules whose buffers it wrote to have some
        of their own from now on."""
        found = self.written_since(before) - self.written
        if not found:
            return
        apart = {each.rpartition(".")[0] for each in found}
        for name, module, table in self._marked:
            if name in apart:
                own = vars(module)[table]
                self._apart.append((own, dict(own)))
                own.update({key: _clone(held) for key, held in own.items()})
        self.written |= found
        self.outline.take_weights(self.outline.tables)

    def follow_weights(self) -> bool:
        """Take the weights as they are now: what was computed from buffers is computed again.
        Returns whether more than numbers changed."""
        while self._apart:  # perhaps passes write no more
            own, shared = self._apart.pop()
            own.update(shared)
        self.written.clear()
        before = self.outline.tables
        others = self.outline.follow_weights()
        if others:
            self._take_tensors(before)
        repack_weights(self.model, self.model.dtype)
        for module in self.model.modules():
            if isinstance(module, RopeTable):
                module.renew()
        return others

    def _take_tensors(self, before: Tables) -> None:
        """Put what differs in the outline's tables from those of ``before`` into the shadow's."""
        for (module, table), now in self.outline.tables.items():
            own, then = getattr(self._shadow.of(module), table), before.get((module, table), {})
            own.update({key: x for key, x in now.items() if x is not then.get(key, own)})
            for key in then.keys() - now.keys():
                own.pop(key, None)

    def counters(self) -> set[str]:
        """Names of attributes that passes have changed, which are no settings."""
        now = self._attributes()
        return {name for name, held in self._own.items() if now.get(name, held) is not held}

    def _attributes(self) -> dict[str, Any]:
        """By name, what a pass may count with or keep on modules."""
        trees = self.root, self.model
        names = {m: name for tree in trees for name, m in tree.named_modules()}
        return {
            f"{name}.{key}".lstrip("."): value
            for module, name in names.items()
            for key, value in vars(module).items()
            if isinstance(value, COUNTED) and key not in IDLE
        }


def _clone(held: Tensor | None) -> Tensor | None:
    if isinstance(held, nn.Parameter):
        return nn.Parameter(held.detach().clone(), requires_grad=held.requires_grad)
    return None if held is None else held.clone()


def named(tree: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Names of modules as their shadows have them: without torch.compile's wrappers."""
    for name, module in tree.named_modules(remove_duplicate=False):
        yield name.replace("_orig_mod.", "").removesuffix("_orig_mod").rstrip("."), module


def served_of(model: PreTrainedModel) -> ServedModel:
    """Of the shadow that it holds."""
    return model.__dict__["_tinyspec"]
