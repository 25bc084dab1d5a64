"""Weights of the probes' own making in the place of a module's, whose own are never written to.

Each has the shape, strides, dtype and alignment of the weight that it replaces, and none of its
numbers. All of one dtype are views of one buffer, as large as the largest of them, that begin at
different places; packed ones are redrawn, one of each format. Knows modules; neither probes nor
models by name.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from statistics import mode
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tinyspec.errors import DeterminismError
from tinyspec.model.quantized import extra_parts, for_another, is_packed, layout, parts, redrawn
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
T = TypeVar("T")


class Buffer(NamedTuple):
    """What views of one buffer have in common. torch's products of weights that were made in
    inference mode may be others."""

    spread: str
    dtype: torch.dtype
    device: torch.device
    inference: bool


def _buffer_of(name: str, weight: Tensor) -> Buffer:
    last = name.rpartition(".")[2]
    spread = SCALE if last == "weight" else BIAS if last.endswith("bias") else VECTOR
    spread = MATRIX if weight.dim() > 1 else spread
    return Buffer(spread, weight.dtype, weight.device, weight.is_inference())


def _extent(weight: Tensor) -> int:
    """Bytes from a weight's first number to the end of its last."""
    reach = sum((n - 1) * step for n, step in zip(weight.shape, weight.stride(), strict=True))
    return (reach + 1) * weight.element_size() if prod(weight.shape) else 0


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


class ScratchBuffers:
    """The buffers of the scratch weights of a module; packed weights have none.

    nbytes: of all of them. Nothing is allocated before ``draw``.
    """

    def __init__(self, module: nn.Module):
        self._own = {
            name: weight
            for name, weight in weights_of(module)
            if weight.dtype in DRAWN and not is_packed(weight)
        }
        self._sizes: dict[Buffer, int] = {}
        for name, weight in self._own.items():
            buffer = _buffer_of(name, weight)
            self._sizes[buffer] = max(_extent(weight), self._sizes.get(buffer, 0))
        self.nbytes = sum(size + (PLACES + 1) * ALIGNMENT for size in self._sizes.values())
        widths = [weight.shape[-1] for weight in self._own.values() if weight.dim() > 1]
        self._scale = max(1, mode(widths)) ** -0.5 if widths else 1.0

    def draw(self) -> dict[int, Tensor]:
        """A scratch weight, of its class, by the id of each weight."""
        held: dict[Buffer, Tensor] = {}
        found: dict[int, Tensor] = {}
        for number, (name, weight) in enumerate(self._own.items()):
            buffer = _buffer_of(name, weight)
            with torch.inference_mode(buffer.inference), torch.no_grad():
                if buffer not in held:
                    held[buffer] = self._filled(buffer)
                flat = held[buffer]
                first = (number + 1) * 37 % PLACES * ALIGNMENT
                first += (weight.data_ptr() - flat.data_ptr()) % ALIGNMENT
                place = first // weight.element_size()
                drawn = flat.as_strided(weight.shape, weight.stride(), place)
                if isinstance(weight, nn.Parameter):
                    drawn = nn.Parameter(drawn, requires_grad=weight.requires_grad)
            found[id(weight)] = drawn
        return found

    def _filled(self, buffer: Buffer) -> Tensor:
        count = -(-(self._sizes[buffer] + (PLACES + 1) * ALIGNMENT) // buffer.dtype.itemsize)
        flat = torch.empty(count, dtype=buffer.dtype, device=buffer.device)
        drawn = self._drawn(min(PERIOD, count), buffer.spread).to(buffer.device, buffer.dtype)
        for part in flat.split(len(drawn)):
            part.copy_(drawn[: len(part)])
        return flat

    def _drawn(self, count: int, spread: str) -> Tensor:
        # Another seed than inputs have.
        generator = torch.Generator("cpu").manual_seed(PERIOD)
        noise = torch.randn(count, generator=generator, dtype=torch.float32, device="cpu")
        if spread == MATRIX:
            return noise * self._scale
        if spread == BIAS:
            return noise * 2.0 ** (torch.arange(count, device="cpu") % 4 * -6)
        return noise / 4 + (spread == SCALE)


def with_weights(
    modules: nn.Module | tuple[nn.Module, ...],
    weights: Mapping[int, Tensor],
    function: Callable[[], T],
) -> T:
    """``function()`` while ``modules``, of a shadow, have ``weights`` by the ids of their own; tied
    ones stay tied, and buffers that stay are copied.

    Tables of weights are replaced as a whole: the model that shares them sees nothing of it.
    """
    roots = modules if isinstance(modules, tuple) else (modules,)
    parts = {id(part): part for root in roots for part in root.modules()}.values()
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
        return function()
    finally:
        for part, parameters, buffers in before:
            vars(part).update(_parameters=parameters, _buffers=buffers)


def with_scratch_weights(module: nn.Module, function: Callable[[], T], *others: nn.Module) -> T:
    """``function()`` while ``module``, and ``others`` that share its weights, have scratch weights;
    packed weights stay."""
    return with_weights((module, *others), ScratchBuffers(module).draw(), function)


class ScratchModel:
    """Runs functions while a model has scratch weights, packed ones of their own formats included;
    its own are not written to.

    nbytes: memory that this takes.
    """

    def __init__(self, model: PreTrainedModel):
        self._model = model
        self._buffers = ScratchBuffers(model)
        self._packed = [weight for _, weight in weights_of(model) if is_packed(weight)]
        kinds = {layout(weight): weight for weight in self._packed}
        packed = sum(part.nbytes for weight in kinds.values() for part in parts(weight).values())
        self.nbytes = self._buffers.nbytes + packed
        self._drawn: dict[int, Tensor] = {}

    def run(self, function: Callable[[], T]) -> T:
        """``function()`` on scratch weights, the same ones in every call."""
        if not self._drawn:
            self._drawn = self._buffers.draw()
            made: dict[Hashable, Tensor] = {}
            for weight in self._packed:
                # bitsandbytes replaces the data of its weights in calls.
                with torch.inference_mode(False), torch.no_grad():
                    if (key := layout(weight)) not in made:
                        made[key] = redrawn(weight)
                    self._drawn[id(weight)] = for_another(made[key])
        with self._own_states():
            try:
                return with_weights(self._model, self._drawn, function)
            except (AssertionError, ValueError) as error:  # as of a quantizer's range
                why = failing_module(self._model, error)
                raise DeterminismError(f"on weights of the proof's own making {why}") from error

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
