"""What of the user's model a shadow was made from, compared in a fraction of a millisecond.

Structure: modules, hooks, settings; another one takes another shadow. Weights: address, version,
form of every tensor; other ones are another digest. Nothing is walked over unless a list of what
was held differs, and only then are settings left out that callers change between calls. Writes
that torch does not count are counted where they are known: by fused optimizers, and where PEFT
merges or swaps adapters in place. Others through ``.data`` leave no trace. Knows no engine.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Collection, Iterable
from functools import wraps
from itertools import chain
from operator import attrgetter, is_
from types import FunctionType
from typing import Any, NamedTuple
from weakref import WeakValueDictionary, finalize

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer, optimizer
from transformers import PreTrainedConfig

from tinyspec.model.checksum import checksum
from tinyspec.model.quantized import is_packed, packing_format, parts, trace
from tinyspec.model.shadow import CONTAINERS
from tinyspec.model.wrappers import hooks_of, underneath

# Settings of a config that users change from call to call, or ``save_pretrained`` does, and no
# bit depends on.
CALL_SETTINGS = {
    *("architectures", "use_cache", "dtype", "return_dict", "output_hidden_states"),
    *("output_attentions", "pad_token_id", "bos_token_id", "eos_token_id"),
}
# Attributes of modules of which the same is true, or that a shadow has none of.
IDLE = {
    *("training", "gradient_checkpointing", "_gradient_checkpointing_func", "_compiled_call_impl"),
    *("generation_config", "name_or_path", "warnings_issued", "generate", "generate_batch"),
    *("_is_full_backward_hook", "_is_hf_initialized"),
    *("_require_grads_hook", "_require_grads_hooks"),
}
# What every module holds.
BASE = frozenset(vars(nn.Module()))
_CONSTANT = (bool, float, str)  # integers of hooks count
_ABSENT = object()
_SHAPE, _ASKS = attrgetter("shape"), attrgetter("requires_grad")
_ADDRESS, _VERSION, _FORWARD = Tensor.data_ptr, attrgetter("_version"), attrgetter("forward")
WEIGHTS = "the weights"
Tables = dict[tuple[nn.Module, str], dict[str, Tensor | None]]


class Change(NamedTuple):
    """what: the first thing that differs. structure: it takes another shadow."""

    what: str
    structure: bool


class _Structure:
    """Of ``root`` and all inside of it: by name, what matters of modules, hooks and configs, and
    lists of what holds it, which are compared first.

    Classes and the forwards of these are told by ``_kinds`` and ``_forwards``, numbers and texts of
    hooks that are objects by ``_constants``.
    """

    def __init__(self, root: nn.Module):
        named = dict(root.named_modules())
        self.modules = list(named.values())
        self._kinds = list(map(type, self.modules))
        self._classes = list(dict.fromkeys(self._kinds))
        self._forwards = list(map(_FORWARD, self._classes))
        self._named: dict[str, Any] = {}
        self._tables: dict[int, Any] = {}
        for name, module in named.items():
            self._look_into(name or type(root).__name__, module)
        shared = nn.modules.module
        self._add("hooks of all modules", shared._global_forward_hooks)
        self._add("hooks before all modules", shared._global_forward_pre_hooks)
        self._held = [table for table in self._tables.values() if table]
        self._empty = [table for table in self._tables.values() if not table]
        self._contents = [_copy(table) for table in self._held]
        owners = (getattr(hook, "__self__", hook) for m in self.modules for hook in hooks_of(m))
        self._owners = [
            vars(owner)
            for owner in owners
            if not isinstance(owner, nn.Module) and hasattr(owner, "__dict__")
        ]
        self._constants = list(map(_constants, self._owners))

    def _look_into(self, name: str, module: nn.Module) -> None:
        self._look_through(name, vars(module), BASE | IDLE)
        self._add(name, module._modules)
        for table in (module._forward_hooks, module._forward_pre_hooks):
            self._tables[id(table)] = table
        self._named[f"hooks of {name}"] = list(map(id, hooks_of(module)))

    def _look_through(self, name: str, table: dict[str, Any], idle: Collection[str]) -> None:
        """Into the attributes of a module or config."""
        self._tables[id(table)] = table
        for key, value in table.items():
            if key in idle or (own := underneath(value, _ABSENT)) is _ABSENT:
                continue
            self._named[f"{name}.{key}"] = own
            if id(own) in self._tables:
                continue
            if isinstance(own, PreTrainedConfig):
                self._look_through(f"{name}.{key}", vars(own), CALL_SETTINGS)
            else:
                self._add(f"{name}.{key}", own)

    def _add(self, name: str, held: Any) -> None:
        """A plain container, and those inside of it."""
        if type(held) in CONTAINERS:
            self._tables[id(held)] = held
            self._named[name] = _copy(held)
            for number, inner in enumerate(held.values() if isinstance(held, dict) else held):
                self._add(f"{name}[{number}]", inner)

    def quick_difference(self) -> str | None:
        """What differs, by the lists; "" where something does that may not matter."""
        try:
            if self._kinds != list(map(type, self.modules)):
                return "the class of a module"
            if self._forwards != list(map(_FORWARD, self._classes)):
                return "the forward of a class"
            if self._constants != list(map(_constants, self._owners)):
                return "the settings of a hook"
            return None if not any(self._empty) and self._held == self._contents else ""
        except Exception:  # of a value without a plain equality
            return ""

    def difference(self, other: _Structure) -> str | None:
        """The name of the first thing that differs and matters, or None."""
        one, two = self._named, other._named
        pairs = ((key, one.get(key, _ABSENT), two.get(key, _ABSENT)) for key in {**one, **two})
        return next((key for key, a, b in pairs if not _equal(a, b)), None)


class Outline:
    """Of ``root`` and all inside of it, as it was when this was made; weights as they were at the
    last ``follow_weights``. uncounted: tensors that count no writes, whose bits are compared.
    tables: of parameters and buffers, as they were then."""

    def __init__(self, root: nn.Module):
        self.root = root
        self._structure = _Structure(root)
        self._writers = _count_more(self._structure.modules)
        self.take_weights()

    def release(self) -> None:
        """It is compared no more: nothing is counted for it, in classes and optimizers."""
        self._writers.clear()

    def changed(self, digest: bool, served: bool = False) -> Change | None:
        """What differs, or None. digest: the bits of what is ``uncounted``, too. served: of forms,
        those of the tensors that the shadow has, whatever the model's tables hold now."""
        if (what := self._other_structure()) is not None:
            return Change(what, structure=True)
        same = self._same_tensors() and self._numbers == self._count_writes()
        if same and not (digest and self._sums != [*map(checksum, self.uncounted)]):
            return None
        # Stand-ins are chosen by forms.
        held = self._tensors if served else chain.from_iterable(self._weights)
        return Change(WEIGHTS, structure=list(map(_form, held)) != self._forms)

    def _other_structure(self) -> str | None:
        if (what := self._structure.quick_difference()) != "":
            return what
        now = _Structure(self.root)
        if (what := self._structure.difference(now)) is None:
            self._structure = now  # settings that callers change, as they are now
        return what

    def follow_weights(self) -> bool:
        """Compare with the weights as they are now; whether more than their numbers changed."""
        if not (self._packed or self.uncounted) and self._same_tensors():
            self._numbers = self._count_writes()
            return False
        self.take_weights()
        return True

    def take_weights(self, tables: Tables | None = None) -> None:
        """Compare with the weights as they are now; of ``tables`` where they are given."""
        modules, names = self._structure.modules, ("_parameters", "_buffers")
        live = {(m, name): getattr(m, name) for m in modules for name in names}
        self._weights = [table.values() for table in live.values()]
        # Taken once: another thread may put others in at any moment.
        self.tables = tables or {place: dict(table) for place, table in live.items()}
        self._tensors = [x for table in self.tables.values() for x in table.values()]
        self._forms = list(map(_form, self._tensors))
        others = (x for m in modules for x in vars(m).values() if isinstance(x, Tensor))
        every = {id(x): x for x in (*self._tensors, *others) if x is not None}.values()
        self.uncounted = [p for x in every for p in parts(x).values() if p.is_inference()]
        self._packed = [x for x in every if is_packed(x)]
        known = {id(x) for x in (*self.uncounted, *self._packed)}
        self._counted = [x for x in every if id(x) not in known]
        self._refs = [StorageWeakRef(x.untyped_storage()) for x in self._counted]
        self._storages = list({ref.cdata for ref in self._refs})
        self._layouts, self._numbers = self._layouts_now(), self._count_writes()
        if tables is None:
            self._sums = [*map(checksum, self.uncounted)]

    def _layouts_now(self) -> list[list[Any]]:
        counted = self._counted
        return [
            list(map(_ADDRESS, counted)),
            list(map(_SHAPE, counted)),
            list(map(Tensor.stride, counted)),
            list(map(_ASKS, counted)),
        ]

    def _count_writes(self) -> list[list[Any]]:
        return [
            list(map(_VERSION, self._counted)),
            list(map(trace, self._packed)),
            list(map(_writes.__getitem__, self._storages)),
        ]

    def _same_tensors(self) -> bool:
        held = list(chain.from_iterable(self._weights))
        return (
            len(held) == len(self._tensors)
            and all(map(is_, held, self._tensors))
            and self._layouts == self._layouts_now()
            # An address is the same tensor's only as long as its memory was not freed.
            and not any(map(torch.UntypedStorage._expired, self._storages))
        )


def _form(x: Tensor | None) -> object:
    if x is None or is_packed(x):
        return packing_format(x)
    return type(x), x.shape, x.stride(), x.dtype, x.device, x.requires_grad, x.is_inference()


def _copy(table: Any) -> Any:
    # As a plain dict: an OrderedDict is slower to compare.
    return dict(table) if isinstance(table, dict) else table.copy()


def _equal(a: Any, b: Any) -> bool:
    try:
        return a is b or (type(a) is type(b) and not isinstance(a, Tensor) and bool(a == b))
    except Exception:  # of tensors among them
        return False


def _constants(table: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in table.items() if isinstance(value, _CONSTANT)}


# By memory, the writes that torch's version counters miss and others make known.
_writes: Counter[int] = Counter()


def _count(written: Iterable[Tensor]) -> None:
    _writes.update({t.untyped_storage()._cdata for t in written if t.layout == torch.strided})


class _Stepper:
    """As long as somebody holds this, steps of optimizers count as writes to their parameters, at
    their begin and end: version counters miss those of fused ones, Trainer's by default."""

    def __init__(self) -> None:
        def stepped(stepping: Optimizer, args: Any, kwargs: Any) -> None:
            _count(p for group in stepping.param_groups for p in group["params"])

        for when in ("pre", "post"):
            register = getattr(optimizer, f"register_optimizer_step_{when}_hook")
            finalize(self, register(stepped).remove)


class _Writer:
    """The function ``name`` of a class or module, which writes to ``.data``: as long as somebody
    holds this, every call counts as a write to all that its first argument holds."""

    def __init__(self, place: Any, name: str):
        own = vars(place)[name]

        @wraps(own)
        def counted(model: nn.Module, *args: Any, **given: Any) -> Any:
            try:
                return own(model, *args, **given)
            finally:
                _count(chain(model.parameters(), model.buffers()))

        def take_off() -> None:
            if vars(place)[name] is counted:
                setattr(place, name, own)

        setattr(place, name, counted)
        finalize(self, take_off)


_writers: WeakValueDictionary[tuple[Any, ...], Any] = WeakValueDictionary()


def _count_more(modules: Iterable[nn.Module]) -> list[Any]:
    """Steps of optimizers; of layers with adapters (PEFT's) the classes' ``merge`` and ``unmerge``,
    and what swaps adapters in place; to hold while they matter."""
    bases = {b for kind in map(type, modules) if hasattr(kind, "unmerge") for b in kind.__mro__}
    places: list[tuple[Any, str]] = [(b, name) for b in bases for name in ("merge", "unmerge")]
    if any(base.__module__.startswith("peft.") for base in bases):
        swaps = importlib.import_module("peft.utils.hotswap")
        places.append((swaps, "hotswap_adapter_from_state_dict"))
    held = [(_Writer, at, n) for at, n in places if type(vars(at).get(n)) is FunctionType]
    kinds: list[tuple[Any, ...]] = [(_Stepper,), *held]
    return [_writers.get(each) or _writers.setdefault(each, each[0](*each[1:])) for each in kinds]
