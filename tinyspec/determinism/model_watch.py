"""Whether a model has changed since it was last looked at, told in a fraction of a millisecond.

``changed`` walks over no module: it compares lists of what every module and config held, classes,
and address, version and form of every tensor. Only where one of them differs ``update``
describes the model anew and says by name what changed. Knows no request.
"""

from __future__ import annotations

import logging
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from tinyspec.determinism.beside import Beside
from tinyspec.determinism.checksum import checksum
from tinyspec.determinism.environment import ambient
from tinyspec.determinism.model_state import (
    adapter_state,
    experts,
    function_settings,
    functions,
    identities,
    layouts,
    tensors,
    uncounted,
    weight_state,
)
from tinyspec.determinism.model_tables import ModelTables
from tinyspec.determinism.optimizer_steps import OptimizerSteps
from tinyspec.determinism.tensor_forms import TensorForms
from tinyspec.model.patched_model import PatchedModel
from tinyspec.model.quantized import is_packed, repack_weights, trace
from tinyspec.model.torch_state import TorchState

logger = logging.getLogger("tinyspec")
THREADS, PROCESS = "the number of threads", "the state of the process"
OBJECT, STEPS = "the object ", "steps of optimizers"
_ADDRESS, _VERSION = Tensor.data_ptr, attrgetter("_version")
_ABSENT, _END = object(), (object(),)


class ModelWatch:
    """One model, as it was when ``update`` was last called.

    weights: address and version of every tensor, by name, and steps of optimizers. counters: names
    of attributes that passes change, which are no settings. suspects: names of what changed while
    requests ran. by_passes: those that passes were seen to write to since the model last changed
    otherwise, which are not followed. beside: other modules that run, which are watched as well.
    """

    def __init__(
        self, patched: PatchedModel, torch_state: TorchState, beside: Beside | None = None
    ):
        self._beside, self._none = beside, nn.Module()
        self._patched = patched
        self._model = patched.model
        self._torch_state = torch_state
        self.counters: set[str] = set()
        self.suspects: set[str] = set()
        self.by_passes: set[str] = set()
        self._steps = OptimizerSteps()
        self._warned = False
        self.record()

    @property
    def runs_user_code(self) -> bool:
        """Whether passes run hooks or modules of no known library."""
        return self._tables.runs_user_code

    @property
    def threads_changed(self) -> bool:
        """Whether torch runs on another number of threads."""
        return torch.get_num_threads() != self._ambient[0]

    def _same_process(self) -> bool:
        return self._ambient == ambient(self._model.device)

    def changed(self) -> bool:
        """Whether anything may have changed since ``record``."""
        return not (self._same_process() and self._same_tables() and self._same_tensors())

    def _same_tables(self) -> bool:
        self._others()
        return self._tables.same() and self._others_tables.same()

    def _others(self) -> nn.Module:
        """What runs beside the model, as it is now."""
        return self._none if self._beside is None else self._beside.modules()

    def _same_tensors(self) -> bool:
        # Both have one mark behind them: the first that is not where it was shows another length.
        held = chain(chain.from_iterable(self._tensor_tables), _END)
        return (
            all(map(is_, held, self._held))
            and self._traces == self._trace()
            and self._forms.same()
            and self.weights[STEPS] == self._steps.count
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
            list(map(trace, self._packed)),
        ]

    def update(self) -> list[str]:
        """Names of what changed since the last call; looks at everything only if ``changed``."""
        with self._torch_state():
            if not self.changed():
                return []
            before, others = self._state(), self._others_described
            if not (self._same_process() and self._same_tables()):
                self.record()
            else:
                self._record_tensors()
        if self._beside is not None:
            self._beside.on_change(self._others_described != others)
        after = self._state()
        changes = [
            name
            for name in {**before, **after}
            if before.get(name, _ABSENT) != after.get(name, _ABSENT)
            if name not in self.counters and name.removeprefix(OBJECT) not in self.counters
        ]
        if changes:  # perhaps passes write no more
            self.counters -= self.by_passes
            self.by_passes.clear()
        return changes

    def written(self) -> None:
        """Weights were written to in a way that torch does not record."""
        if self._beside is not None:
            self._beside.on_change(False)

    def _state(self) -> dict[str, Any]:
        own = {**self.weights, **self.structure, **self._identities, **self.taken_over}
        return own | self._others_described

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
            self._ambient = ambient(model.device)
            self._described: dict[str, Any] = {
                **functions(model),
                **experts(model),
                **function_settings(model, ignored),
                "adapters": adapter_state(model),
                THREADS: self._ambient[0],
                PROCESS: self._ambient[1:],
            }
            objects = identities(model, ignored)
            self._identities = {f"{OBJECT}{name}": found for name, found in objects.items()}
            self._taken_settings = self._patched.taken_over()
            others = self._others()
            found = {**functions(others), **function_settings(others, ignored)}
            objects = identities(others, ignored)
            self._others_described = found | {f"{OBJECT}{n}": each for n, each in objects.items()}
            self._tables, self._others_tables = ModelTables(model), ModelTables(others)
            modules = (*self._tables.modules, *self._others_tables.modules)
            tables = [t for m in modules for t in (m._parameters, m._buffers)]
            self._tensor_tables = [table.values() for table in tables if table]
            self._record_tensors()

    def _record_tensors(self) -> None:
        repack_weights(self._model, self._model.dtype)
        self.weights = {
            **weight_state(self._model, self.counters),
            **weight_state(self._others(), self.counters),
            STEPS: self._steps.count,
        }
        self._layouts = layouts(self._model)
        # ``Module.to`` changes these and no module.
        self._taken_settings |= {"dtype": self._model.dtype, "device": self._model.device}
        self._taken_buffers = self._patched.taken_buffers()
        self._held = [*chain.from_iterable(self._tensor_tables), *_END]
        found = (
            *tensors(self._model, self.counters),
            *tensors(self._others(), self.counters),
        )
        every = list({id(tensor): tensor for _, tensor in found}.values())
        self._uncounted = [part for tensor in every for part in uncounted(tensor)]
        self._packed = [tensor for tensor in every if is_packed(tensor)]
        known = {id(tensor) for tensor in (*self._uncounted, *self._packed)}
        self._counted = [tensor for tensor in every if id(tensor) not in known]
        self._steps.follow(self._counted)
        self._storage_refs = [StorageWeakRef(tensor.untyped_storage()) for tensor in self._counted]
        self._storages = list({ref.cdata for ref in self._storage_refs})
        self._traces, self._forms = self._trace(), TensorForms(self._counted)
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
        user's, after the first pass at everything. Tensors that it wrote to are followed no more.
        """
        self.counters |= self._tables.absorb(everything) | self._others_tables.absorb(everything)
        if self.suspects:
            now = {**weight_state(self._model), **weight_state(self._others())}
            known = self.weights.keys() & self.suspects & now.keys()
            self.by_passes |= {name for name in known if now[name] != self.weights[name]}
            self.counters |= self.by_passes
