"""A whole model on scratch weights, packed ones included.

Memory is as much as the largest weight of each dtype takes, and one packed weight of each format.
Knows modules; not what is probed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tinyspec.errors import DeterminismError
from tinyspec.model.blame import failure
from tinyspec.model.packing import packed_like, same_format, shared, unpacked
from tinyspec.model.quantized import extra_parts, is_packed, layout, parts, repack_weights
from tinyspec.model.scratch_weights import (
    Form,
    ScratchBuffers,
    contiguous_form,
    forms_of,
    scratch_like,
    weights_of,
    with_weights,
)

T = TypeVar("T")


class ScratchModel:
    """Runs functions while a model has scratch weights; its own are not written to.

    nbytes: memory that this takes.
    """

    def __init__(self, model: PreTrainedModel):
        self._model = model
        self._own = dict(weights_of(model))
        self._forms = forms_of(model)
        self._sources: dict[str, Form] = {}
        kinds: dict[Hashable, int] = {}
        for name, weight in self._own.items():
            if is_packed(weight):
                self._sources[name] = contiguous_form(*unpacked(weight), weight.device)
                kinds[layout(weight)] = sum(part.nbytes for part in parts(weight).values())
        self._buffers = ScratchBuffers([*self._forms.values(), *self._sources.values()])
        self.nbytes = self._buffers.nbytes + sum(kinds.values())
        self._drawn: dict[int, Tensor] = {}

    def run(self, function: Callable[[], T]) -> T:
        """``function()`` on scratch weights, the same ones in every call.

        Raises DeterminismError for packed weights whose library has no function that packs others.
        """
        if not self._drawn:
            drawn = {
                name: scratch_like(self._own[name], self._buffers, form)
                for name, form in self._forms.items()
            } | self._packed()
            self._drawn = {id(self._own[name]): weight for name, weight in drawn.items()}

        def repacked() -> T:
            repack_weights(self._model, self._model.dtype)
            for name in self._sources:
                found: Any = self._model.get_parameter(name)
                if not same_format(found, self._own[name]):
                    raise self._refusal(name)
            return function()

        with self._own_states():
            try:
                return with_weights(self._model, self._drawn, repacked)
            except (AssertionError, ValueError) as error:  # as of a quantizer's range
                why = failure(self._model, error)
                raise DeterminismError(f"on weights of the proof's own making {why}") from error

    def _packed(self) -> dict[str, Tensor]:
        """A random packed weight for every packed one; those of one layout share their parts."""
        made: dict[Hashable, Any] = {}
        found = {}
        for name, form in self._sources.items():
            weight = self._own[name]
            key = layout(weight)
            if key not in made:
                # As loaded weights are made: bitsandbytes replaces their data in the first call.
                with torch.inference_mode(False), torch.no_grad():
                    made[key] = packed_like(weight, self._buffers.view(form))
            if made[key] is None:
                raise self._refusal(name)
            found[name] = shared(made[key])
        return found

    @contextmanager
    def _own_states(self) -> Iterator[None]:
        """What 8-bit linears of bitsandbytes keep beside their weights comes back afterwards."""
        before: list[Any] = [module for module in self._model.modules() if extra_parts(module)]
        states = [module.state for module in before]
        for module in before:
            module.state = copy.copy(module.state)
        try:
            yield
        finally:
            for module, state in zip(before, states, strict=True):
                module.state = state

    def _refusal(self, name: str) -> DeterminismError:
        owner, _, own = name.rpartition(".")
        module = type(self._model.get_submodule(owner)).__name__
        kind = type(self._own[name]).__name__
        return DeterminismError(
            f"{owner} ({module}) has packed weights ({own}: {kind}), and no function of their "
            "library is known that packs others alike, which a proof needs; deterministic=True "
            "needs weights without quantization, or in another format"
        )
