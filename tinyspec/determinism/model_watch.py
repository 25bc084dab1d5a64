"""Whether a model has changed since it was last looked at, told in a fraction of a millisecond.

``changed`` walks over no module: it compares lists of what every module and config held, classes,
and address, version, shape and strides of every tensor. Only where one of them differs ``update``
describes the model anew and says by name what changed. Knows no request.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import PreTrainedConfig

from tinyspec.determinism.checksum import checksum
from tinyspec.determinism.model_state import (
    BASE,
    LIBRARIES,
    OWN,
    adapter_state,
    experts,
    function_settings,
    functions,
    identities,
    layouts,
    named_parts,
    tensors,
    top_package,
    uncounted,
    weight_state,
)
from tinyspec.model.patched_model import PatchedModel
from tinyspec.model.quantized import is_packed, repack_weights, trace
from tinyspec.model.torch_state import TorchState
from tinyspec.model.wrappers import hooks_of

logger = logging.getLogger("tinyspec")
THREADS, OBJECT = "the number of threads", "the object "
# Of the tables that torch gives every module, those whose contents enter a pass. Parameters and
# buffers are compared by themselves, as tensors have no plain equality.
_COMPARED = {"_modules", "_forward_hooks", "_forward_pre_hooks"}
_APART = BASE - _COMPARED
_ADDRESS, _VERSION, _FORM = Tensor.data_ptr, attrgetter("_version"), attrgetter("shape")
_FORWARD = attrgetter("forward")
_ABSENT = object()


@dataclass
class _Table:
    """A dict, list or set of a model, its name, and whether passes may change it: the user's."""

    name: str
    held: Any
    foreign: bool


class ModelWatch:
    """One model, as it was when ``update`` was last called.

    weights: address and version of every tensor, by name. counters: names of attributes that passes
    change, which are no settings. runs_user_code: whether passes run hooks or modules of no known
    library.
    """

    def __init__(self, patched: PatchedModel, torch_state: TorchState):
        self._patched = patched
        self._model = patched.model
        self._torch_state = torch_state
        self.counters: set[str] = set()
        self._warned = False
        self.record()

    @property
    def threads_changed(self) -> bool:
        """Whether torch runs on another number of threads."""
        return torch.get_num_threads() != self._described[THREADS]

    def changed(self) -> bool:
        """Whether anything may have changed since ``record``; to call in torch's state of a pass,
        in which no module is in training mode."""
        return self.threads_changed or not (self._same_tables() and self._same_tensors())

    def _same_tables(self) -> bool:
        try:
            return (
                all(map(is_, self._kinds, map(type, self._modules)))
                and not any(self._empty)
                and self._tables == self._contents
                and self._forwards == list(map(_FORWARD, self._classes))
            )
        except Exception:  # a value without a plain equality was replaced
            return False

    def _same_tensors(self) -> bool:
        held = list(chain.from_iterable(map(dict.values, self._tensor_tables)))
        return (
            len(held) == len(self._held)
            and all(map(is_, held, self._held))
            and self._traces == self._trace()
            # An address is the same tensor's only as long as its memory was not freed.
            and not any(map(torch.UntypedStorage._expired, self._storages))
            and self._bits == list(map(checksum, self._uncounted))
        )

    def _trace(self) -> list[list[Any]]:
        """Changes when a tensor is written to or gets other data."""
        counted = self._counted
        return [
            list(map(_ADDRESS, counted)),
            list(map(_VERSION, counted)),
            list(map(_FORM, counted)),
            list(map(Tensor.stride, counted)),
            list(map(trace, self._packed)),
        ]

    def update(self) -> list[str]:
        """Names of what changed since the last call; looks at everything only if ``changed``."""
        with self._torch_state():
            if not self.changed():
                return []
            before = self._state()
            if self.threads_changed or not self._same_tables():
                self.record()
            else:
                self._record_tensors()
        after = self._state()
        return [
            name
            for name in {**before, **after}
            if before.get(name, _ABSENT) != after.get(name, _ABSENT)
            if name not in self.counters and name.removeprefix(OBJECT) not in self.counters
        ]

    def _state(self) -> dict[str, Any]:
        return {**self.weights, **self.structure, **self._identities, **self.taken_over}

    @property
    def structure(self) -> dict[str, Any]:
        """All but the values of weights: what probe results depend on."""
        return {**self._layouts, **self._described}

    @property
    def taken_over(self) -> dict[str, Any]:
        """What stand-ins took from the model: passes follow no change of it."""
        return {**self._taken_settings, **self._taken_buffers}

    def record(self) -> None:
        """Look at everything."""
        self._torch_state.refresh_modules()
        model, ignored = self._model, self.counters
        with self._torch_state():
            self._described: dict[str, Any] = {
                **functions(model),
                **experts(model),
                **function_settings(model, ignored),
                "adapters": adapter_state(model),
                THREADS: torch.get_num_threads(),
            }
            objects = identities(model, ignored)
            self._identities = {f"{OBJECT}{name}": found for name, found in objects.items()}
            self._taken_settings = self._patched.taken_over()
            self._record_tables()
            self._record_tensors()

    def _record_tables(self) -> None:
        named = dict(named_parts(self._model))
        self._modules = list(named.values())
        self._kinds = list(map(type, self._modules))
        self._classes = list(dict.fromkeys(self._kinds))
        self._forwards = list(map(_FORWARD, self._classes))
        seen: set[int] = set()
        found: list[_Table] = []
        self.runs_user_code = False
        for name, module in named.items():
            package = top_package(type(module))
            hooks = hooks_of(module)
            self.runs_user_code |= package not in LIBRARIES or any(map(_is_users, hooks))
            found += _tables(name, vars(module), package not in OWN, seen)
            for hook in hooks:
                owner = getattr(hook, "__self__", hook)
                if not isinstance(owner, nn.Module) and hasattr(owner, "__dict__"):
                    found += _tables(f"a hook of {name}", vars(owner), True, seen)
            if isinstance(config := vars(module).get("config"), PreTrainedConfig):
                found += _configs(config, seen)
        shared = nn.modules.module
        for hooks_of_all in (shared._global_forward_hooks, shared._global_forward_pre_hooks):
            self.runs_user_code |= bool(hooks_of_all)
            found += _tables("hooks of all modules", hooks_of_all, False, seen)
        # Most of a library's are empty and stay so, which is quicker told.
        empty = [table for table in found if not table.held and not table.foreign]
        self._named = [table for table in found if table.held or table.foreign]
        own: list[dict[str, Any]] = [m._parameters for m in self._modules]
        own += [m._buffers for m in self._modules]
        self._tensor_tables = [table for table in own if table]
        self._empty = [table for table in own if not table]
        self._empty += [table.held for table in empty]
        self._tables = [table.held for table in self._named]
        self._contents = list(map(_copy, self._tables))
        self._foreign = [n for n, table in enumerate(self._named) if table.foreign]
        self._settled = False

    def _record_tensors(self) -> None:
        repack_weights(self._model, self._model.dtype)
        self.weights = weight_state(self._model, self.counters)
        self._layouts = layouts(self._model)
        self._taken_buffers = self._patched.taken_buffers()
        self._held = list(chain.from_iterable(map(dict.values, self._tensor_tables)))
        every = [tensor for _, tensor in tensors(self._model, self.counters)]
        self._uncounted = [part for tensor in every for part in uncounted(tensor)]
        self._packed = [tensor for tensor in every if is_packed(tensor)]
        known = {id(tensor) for tensor in (*self._uncounted, *self._packed)}
        self._counted = [tensor for tensor in every if id(tensor) not in known]
        self._storage_refs = [StorageWeakRef(tensor.untyped_storage()) for tensor in self._counted]
        self._storages = list({ref.cdata for ref in self._storage_refs})
        self._traces = self._trace()
        self._bits = list(map(checksum, self._uncounted))
        if self._uncounted and not self._warned:
            self._warned = True
            logger.warning(
                "%d tensors of the model were made in torch.inference_mode and count no writes: "
                "their bits are digested at every call and after code of the user's",
                len(self._uncounted),
            )

    def absorb(self, everything: bool = False) -> None:
        """After a pass: what it changed itself is no setting. Looks at modules and hooks of the
        user's, after the first pass at everything."""
        everything = everything or not self._settled
        for n in range(len(self._tables)) if everything else self._foreign:
            held, content = self._tables[n], self._contents[n]
            if not _equal(held, content):
                if isinstance(held, dict) and isinstance(content, dict):
                    changed = [
                        key
                        for key in {**held, **content}
                        if held.get(key, _ABSENT) is not content.get(key, _ABSENT)
                    ]
                    self.counters |= {f"{self._named[n].name}.{k}".lstrip(".") for k in changed}
                self._contents[n] = _copy(held)
        self._settled = True


def _is_users(hook: Any) -> bool:
    return top_package(hook if hasattr(hook, "__qualname__") else type(hook)) not in LIBRARIES


def _copy(table: Any) -> Any:
    # As a plain dict: an OrderedDict is slower to compare.
    return dict(table) if isinstance(table, dict) else table.copy()


def _equal(held: Any, content: Any) -> bool:
    try:
        return bool(held == content)
    except Exception:  # tensors have no plain equality
        return False


def _tables(name: str, table: Any, foreign: bool, seen: set[int]) -> Iterator[_Table]:
    """A dict, list or set and those inside of it, each once."""
    if id(table) in seen:
        return
    seen.add(id(table))
    yield _Table(name, table, foreign)
    items = table.items() if isinstance(table, dict) else enumerate(table)
    for key, value in items:
        if isinstance(value, (dict, list, set)) and key not in _APART:
            yield from _tables(f"{name}.{key}", value, foreign, seen)


def _configs(config: PreTrainedConfig, seen: set[int]) -> Iterator[_Table]:
    """What a config and the configs inside of it hold."""
    yield from _tables("config", vars(config), False, seen)
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig) and id(vars(value)) not in seen:
            yield from _configs(value, seen)
