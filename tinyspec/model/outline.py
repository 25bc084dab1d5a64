"""What of the user's model a shadow was made from, compared in a fraction of a millisecond.

Structure: modules, hooks, settings; another one takes another shadow. Weights: address, version,
form of every tensor; other ones are another digest. Nothing is walked over unless a list of what
was held differs, and only then are settings left out that callers change between calls. Writes
through ``.data`` leave no trace. Knows no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from operator import attrgetter, is_
from threading import Lock
from typing import Any, ClassVar, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
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
_BASE = frozenset(vars(nn.Module()))
_CONSTANT = (bool, float, str)  # integers of hooks count
_SHAPE, _ASKS = attrgetter("shape"), attrgetter("requires_grad")
_ADDRESS, _VERSION, _FORWARD = Tensor.data_ptr, attrgetter("_version"), attrgetter("forward")
WEIGHTS = "the weights"


class Change(NamedTuple):
    """what: the first thing that differs. structure: it takes another shadow."""

    what: str
    structure: bool


class Outline:
    """Of ``root`` and all inside of it, as it was when this was made; weights as they were at the
    last ``follow_weights``. uncounted: tensors that count no writes, whose bits are compared."""

    def __init__(self, root: nn.Module):
        self.root = root
        self._steps = OptimizerSteps()
        self._note_structure()
        self.follow_weights()

    def _note_structure(self) -> None:
        named = dict(self.root.named_modules())
        self.modules = list(named.values())
        self._kinds = list(map(type, self.modules))
        self._classes = list(dict.fromkeys(self._kinds))
        self._forwards = list(map(_FORWARD, self._classes))
        self._tables = [(n, *table) for n, m in named.items() for table in _tables(m)]
        shared = nn.modules.module
        for everywhere in (shared._global_forward_hooks, shared._global_forward_pre_hooks):
            self._tables.append(("hooks of all modules", everywhere, _same))
        held = [table for _, table, _ in self._tables]
        self._held = [table for table in held if table]
        self._empty = [table for table in held if not table]
        self._contents = [_copy(table) for table in self._held]
        owners = (getattr(hook, "__self__", hook) for m in self.modules for hook in hooks_of(m))
        self._owners = [
            vars(owner)
            for owner in owners
            if not isinstance(owner, nn.Module) and hasattr(owner, "__dict__")
        ]
        self._constants = list(map(_constants, self._owners))

    def changed(self) -> Change | None:
        """What differs, or None."""
        if (what := self._other_structure()) is not None:
            return Change(what, structure=True)
        if self._same_weights():
            return None
        # Stand-ins are chosen by forms.
        held = list(chain.from_iterable(self._weights))
        return Change(WEIGHTS, structure=list(map(_form, held)) != self._forms)

    def _other_structure(self) -> str | None:
        try:
            if self._kinds != list(map(type, self.modules)):
                return "the class of a module"
            if self._forwards != list(map(_FORWARD, self._classes)):
                return "the forward of a class"
            if self._constants != list(map(_constants, self._owners)):
                return "the settings of a hook"
            if not any(self._empty) and self._held == self._contents:
                return None
        except Exception:  # of a value without a plain equality
            pass
        contents = {id(held): was for held, was in zip(self._held, self._contents, strict=True)}
        for name, held, told in self._tables:
            if (key := told(contents.get(id(held), {}), held)) is not None:
                return f"{name}.{key}".strip(".") if key else name or type(self.root).__name__
        self._note_structure()  # of settings that callers change, as they are now
        return None

    def follow_weights(self) -> None:
        """Compare with the weights as they are now."""
        tables = [table for m in self.modules for table in (m._parameters, m._buffers)]
        self._weights = [table.values() for table in tables]
        self._tensors = list(chain.from_iterable(self._weights))
        self._forms = list(map(_form, self._tensors))
        others = (x for m in self.modules for x in vars(m).values() if isinstance(x, Tensor))
        every = {id(x): x for x in (*self._tensors, *others) if x is not None}.values()
        self.uncounted = [p for x in every for p in parts(x).values() if p.is_inference()]
        self._packed = [x for x in every if is_packed(x)]
        known = {id(x) for x in (*self.uncounted, *self._packed)}
        self._counted = [x for x in every if id(x) not in known]
        self._steps.follow(self._counted)
        self._refs = [StorageWeakRef(x.untyped_storage()) for x in self._counted]
        self._storages = list({ref.cdata for ref in self._refs})
        self._traces = self._trace()

    def _trace(self) -> list[list[Any]]:
        counted = self._counted
        return [
            list(map(_ADDRESS, counted)),
            list(map(_VERSION, counted)),
            list(map(_SHAPE, counted)),
            list(map(Tensor.stride, counted)),
            list(map(_ASKS, counted)),
            list(map(trace, self._packed)),
            list(map(checksum, self.uncounted)),
            [self._steps.count],
        ]

    def _same_weights(self) -> bool:
        held = list(chain.from_iterable(self._weights))
        return (
            len(held) == len(self._tensors)
            and all(map(is_, held, self._tensors))
            and self._traces == self._trace()
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


# Tells the first key of a table that differs, and matters; "" for all of it; None if none does.
_Tells = Callable[[Any, Any], "str | None"]


def _same(before: Any, held: Any) -> str | None:
    try:
        return None if not (held or before) or held == before else ""
    except Exception:  # of tensors among them
        return ""


def _of_dict(before: dict[str, Any], held: dict[str, Any], idle: set[str]) -> str | None:
    keys = (key for key in {**before, **held} if key not in idle and key not in _BASE)
    absent = object()

    def own(table: dict[str, Any], key: str) -> Any:
        return underneath(table.get(key, absent), absent)

    return next((key for key in keys if not _equal(own(before, key), own(held, key))), None)


def _equal(a: Any, b: Any) -> bool:
    try:
        return a is b or (type(a) is type(b) and not isinstance(a, Tensor) and bool(a == b))
    except Exception:
        return False


def _tables(module: nn.Module) -> Iterator[tuple[Any, _Tells]]:
    """The dicts, lists and sets of a module, and how they are compared where they differ."""
    yield vars(module), lambda before, held: _of_dict(before, held, IDLE)
    yield module._modules, _same
    known = hooks_of(module)

    def hooks(before: Any, held: Any) -> str | None:
        return None if _ids(hooks_of(module)) == _ids(known) else "hooks"

    yield module._forward_hooks, hooks
    yield module._forward_pre_hooks, hooks
    for name, value in list(vars(module).items()):
        if isinstance(value, PreTrainedConfig):
            yield from _of_config(value)
        elif name not in _BASE and name not in IDLE:
            yield from _inside(value)


def _ids(hooks: Iterable[Any]) -> list[int]:
    return list(map(id, hooks))


def _inside(value: Any) -> Iterator[tuple[Any, _Tells]]:
    if type(value) in CONTAINERS:
        yield value, _same
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _inside(inner)


def _of_config(config: PreTrainedConfig) -> Iterator[tuple[Any, _Tells]]:
    yield vars(config), lambda before, held: _of_dict(before, held, CALL_SETTINGS)
    for name, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            yield from _of_config(value)
        elif name not in CALL_SETTINGS:
            yield from _inside(value)


def _constants(table: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in table.items() if isinstance(value, _CONSTANT)}


class OptimizerSteps:
    """``count``: steps, since this was made, of any optimizer that has one of the followed tensors,
    or another tensor of the same memory, among its parameters.

    torch's version counters miss those of fused optimizers (``torch.optim.AdamW(..., fused=True)``,
    which transformers' Trainer takes by default).
    """

    _all: ClassVar[WeakSet[OptimizerSteps]] = WeakSet()
    _lock: ClassVar[Lock] = Lock()
    _listening: ClassVar[bool] = False  # whether torch calls this process's hook

    def __init__(self) -> None:
        self.count = 0
        self._storages: set[int] = set()
        with self._lock:
            if not self._listening:
                OptimizerSteps._listening = True
                register_optimizer_step_post_hook(self._stepped)
            self._all.add(self)

    def follow(self, tensors: Iterable[Tensor]) -> None:
        """From now on of these ``tensors``, which must live as long as they are followed."""
        self._storages = _storages(tensors)

    @classmethod
    def _stepped(cls, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        with cls._lock:
            told = list(cls._all)
        if told:
            written = _storages(p for group in optimizer.param_groups for p in group["params"])
            for steps in told:
                steps.count += not steps._storages.isdisjoint(written)


def _storages(tensors: Iterable[Tensor]) -> set[int]:
    return {t.untyped_storage()._cdata for t in tensors if t.layout == torch.strided}
