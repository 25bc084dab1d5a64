"""Weights of the probes' own making in the place of a module's, whose own are never written to.

Each has the shape, strides, dtype and alignment of the weight that it replaces, and none of its
numbers. All of one dtype are views of one buffer, as large as the largest of them, that begin at
different places. Knows modules; neither probes nor models by name.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from statistics import mode
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tinyspec.errors import DeterminismError
from tinyspec.model.quantized import (
    extra_parts,
    is_packed,
    layout,
    packed_like,
    parts,
    repack_weights,
    same_format,
    shared,
    unpacked,
)
from tinyspec.model.supported import failing_module

DRAWN = (
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
)
# Bytes: the longest vector of a CPU.
ALIGNMENT = 64
# Numbers that are drawn; buffers repeat them. A prime, so that no two rows of a matrix are equal.
PERIOD = 65_537
# Weights begin at one of so many places, ALIGNMENT bytes apart.
PLACES = 1021
# How the numbers of a weight are spread: of matrices, so that products keep the scale of rows; of
# norms, around one; of biases, from ordinary down to what is left of a sum that cancels.
MATRIX, SCALE, BIAS, VECTOR = "matrix", "scale", "bias", "vector"


class Form(NamedTuple):
    """What a scratch weight has in common with the weight that it replaces.

    place: its address modulo ALIGNMENT. inference: whether it is made in inference mode: torch's
    products of such weights may be others.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    place: int
    spread: str
    inference: bool = False

    @property
    def extent(self) -> int:
        """Bytes from its first number to the end of its last."""
        reach = sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))
        return (reach + 1) * self.dtype.itemsize if prod(self.shape) else 0

    @property
    def remainder(self) -> int:
        """Its address modulo the size of a number: in a file that was mapped it may be anywhere."""
        return self.place % self.dtype.itemsize

    @property
    def buffer(self) -> Hashable:
        """Which buffer it is a view of."""
        return self.spread, self.dtype, self.device, self.remainder, self.inference


def _form(name: str, weight: Tensor) -> Form:
    last = name.rpartition(".")[2]
    spread = SCALE if last == "weight" else BIAS if last.endswith("bias") else VECTOR
    return Form(
        tuple(weight.shape),
        weight.stride(),
        weight.dtype,
        weight.device,
        weight.data_ptr() % ALIGNMENT,
        MATRIX if weight.dim() > 1 else spread,
        weight.is_inference(),
    )


def contiguous_form(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Form:
    """Of contiguous matrices that begin where torch's own allocations do."""
    stride = tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))
    return Form(shape, stride, dtype, device, 0, MATRIX)


def weights_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of what a checkpoint holds: parameters and persistent buffers, each once.

    Other buffers are computed from the config.
    """
    seen = set()
    for prefix, part in module.named_modules():
        kept = {n: b for n, b in part._buffers.items() if n not in part._non_persistent_buffers_set}
        for own, weight in (*part._parameters.items(), *kept.items()):
            if weight is not None and id(weight) not in seen:
                seen.add(id(weight))
                yield f"{prefix}.{own}".lstrip("."), weight


def forms_of(module: nn.Module) -> dict[str, Form]:
    """Name -> form of every weight that is drawn: those in a floating-point dtype, not packed."""
    return {
        name: _form(name, weight)
        for name, weight in weights_of(module)
        if weight.dtype in DRAWN and not is_packed(weight)
    }


class ScratchBuffers:
    """The buffers that weights of the given forms are views of.

    nbytes: of all of them. Nothing is allocated before the first ``view``.
    """

    def __init__(self, forms: list[Form]):
        self._sizes: dict[Hashable, int] = {}
        for form in forms:
            size = max(form.extent, self._sizes.get(form.buffer, 0))
            self._sizes[form.buffer] = size
        widths = [form.shape[-1] for form in forms if form.spread == MATRIX]
        self._scale = max(1, mode(widths)) ** -0.5 if widths else 1.0
        self._held: dict[Hashable, Tensor] = {}
        self._views = 0

    @property
    def nbytes(self) -> int:
        return sum(size + (PLACES + 1) * ALIGNMENT for size in self._sizes.values())

    def view(self, form: Form) -> Tensor:
        """Random numbers in this form, at another place of the buffer than those before."""
        if form.buffer not in self._held:
            self._held[form.buffer] = self._filled(form)
        flat = self._held[form.buffer]
        self._views += 1
        first = self._views * 37 % PLACES * ALIGNMENT
        first += (form.place - flat.data_ptr()) % ALIGNMENT
        return flat.as_strided(form.shape, form.stride, first // form.dtype.itemsize)

    def _filled(self, form: Form) -> Tensor:
        """The buffer of this form."""
        dtype, device, size = form.dtype, form.device, self._sizes[form.buffer]
        count = -(-(size + (PLACES + 1) * ALIGNMENT) // dtype.itemsize)
        flat = torch.empty(count + 1, dtype=dtype, device=device)
        if form.remainder:
            # A view begins at a whole number: this one is of a part of the storage.
            part = flat.untyped_storage()[form.remainder :]
            flat = torch.empty(0, dtype=dtype, device=device).set_(part, 0, (count,), (1,))
        drawn = self._drawn(min(PERIOD, count), form.spread).to(device, dtype)
        for part in flat.split(len(drawn)):
            part.copy_(drawn[: len(part)])
        return flat

    def _drawn(self, count: int, spread: str) -> Tensor:
        # Another seed than inputs have.
        generator = torch.Generator().manual_seed(PERIOD)
        noise = torch.randn(count, generator=generator, dtype=torch.float32, device="cpu")
        if spread == MATRIX:
            return noise * self._scale
        if spread == BIAS:
            return noise * 2.0 ** (torch.arange(count, device="cpu") % 4 * -6)
        return noise / 4 + (spread == SCALE)


def scratch_like(weight: Tensor, buffers: ScratchBuffers, form: Form) -> Tensor:
    """A scratch weight of the class of ``weight``."""
    with torch.inference_mode(form.inference), torch.no_grad():
        drawn = buffers.view(form)
        if isinstance(weight, nn.Parameter):
            return nn.Parameter(drawn, requires_grad=weight.requires_grad)
        return drawn


@contextmanager
def other_weights(weights: Mapping[int, Tensor], *modules: nn.Module) -> Iterator[None]:
    """A block in which ``modules``, of a shadow, have ``weights`` by the ids of their own; tied
    ones stay tied, and buffers that stay are copied.

    Tables of weights are replaced as a whole: the model that shares them sees nothing of it.
    """
    parts = {id(part): part for module in modules for part in module.modules()}.values()
    before = [(part, part._parameters, part._buffers) for part in parts]
    copies: dict[int, Tensor | None] = dict(weights)
    for _, _, buffers in before:
        for own in buffers.values():
            if own is not None and id(own) not in copies:
                # Outside of inference mode tensors count writes.
                with torch.inference_mode(own.is_inference()), torch.no_grad():
                    copies[id(own)] = own.clone()
    try:
        for part, parameters, buffers in before:
            table = vars(part)
            table["_parameters"] = {n: weights.get(id(x), x) for n, x in parameters.items()}
            table["_buffers"] = {n: copies.get(id(x), x) for n, x in buffers.items()}
        yield
    finally:
        for part, parameters, buffers in before:
            vars(part).update(_parameters=parameters, _buffers=buffers)


@contextmanager
def scratch_weights(module: nn.Module, *others: nn.Module) -> Iterator[None]:
    """A block in which ``module``, and ``others`` that share its weights, have scratch weights;
    packed weights stay."""
    forms, own = forms_of(module), dict(weights_of(module))
    buffers = ScratchBuffers(list(forms.values()))
    drawn = {id(own[name]): scratch_like(own[name], buffers, form) for name, form in forms.items()}
    with other_weights(drawn, module, *others):
        yield


class ScratchModel:
    """Scratch weights of a model, whose own are not written to.

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

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """A block in which the model has scratch weights, the same ones every time.

        Raises DeterminismError for packed weights whose library has no function that packs others.
        """
        if not self._drawn:
            self._drawn = {
                id(self._own[name]): scratch_like(self._own[name], self._buffers, form)
                for name, form in self._forms.items()
            } | self._packed()

        with self._own_states():
            try:
                with other_weights(self._drawn, self._model):
                    repack_weights(self._model, self._model.dtype)
                    for name in self._sources:
                        if not same_format(self._model.get_parameter(name), self._own[name]):
                            raise self._refusal(name)
                    yield
            except (AssertionError, ValueError) as error:  # as of a quantizer's range
                why = failing_module(self._model, error)
                raise DeterminismError(f"on weights of the proof's own making {why}") from error

    def _packed(self) -> dict[int, Tensor]:
        """By the id of every packed weight a random one; those of one layout share their parts."""
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
            found[id(weight)] = shared(made[key])
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
