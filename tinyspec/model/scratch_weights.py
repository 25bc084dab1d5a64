"""Weights of the probes' own making in the place of a module's, whose own are never written to.

Each has the shape, strides, dtype and alignment of the weight that it replaces, and none of its
numbers. All of one dtype are views of one buffer, as large as the largest of them, that begin at
different places. Knows modules; neither probes nor models by name.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from statistics import mode
from typing import Any

import torch
from torch import Tensor, nn

from tinyspec.errors import DeterminismError
from tinyspec.model.quantized import FILLED, extra_parts, filled, is_packed, layout, parts
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


def _spread(name: str, weight: Tensor) -> str:
    last = name.rpartition(".")[2]
    if weight.dim() > 1:
        return MATRIX
    return SCALE if last == "weight" else BIAS if last.endswith("bias") else VECTOR


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


@contextmanager
def other_weights(weights: Mapping[int, Tensor], *modules: nn.Module) -> Iterator[None]:
    """A block in which ``modules``, of a shadow, have ``weights`` by the ids of their own; tied
    ones stay tied, and buffers that stay are copied.

    Tables of weights are replaced as a whole.
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


class ScratchModel:
    """Scratch weights of a model or module, whose own are not written to.

    They are views of one buffer for each dtype and spread. nbytes: memory that this takes, once the
    weights are first in place. Packed weights of a format that is not known stay.
    """

    def __init__(self, model: nn.Module):
        self._model = model
        own = dict(weights_of(model))
        self._packed = [w for w in own.values() if type(w).__name__ in FILLED]
        self._plain = {n: w for n, w in own.items() if w.dtype in DRAWN and not is_packed(w)}
        self._sizes: dict[Hashable, int] = {}
        widths = []
        for name, weight in self._plain.items():
            key = self._key(spread := _spread(name, weight), weight)
            axes = zip(weight.shape, weight.stride(), strict=True)
            last = sum((n - 1) * step for n, step in axes)
            extent = (last + 1) * weight.itemsize if weight.numel() else 0
            self._sizes[key] = max(extent, self._sizes.get(key, 0))
            widths += [weight.shape[-1]] if spread == MATRIX else []
        # Of the numbers of matrices.
        self._scale = max(1, mode(widths)) ** -0.5 if widths else 1.0
        kinds = {layout(w): sum(part.nbytes for part in parts(w).values()) for w in self._packed}
        buffers = (size + (PLACES + 1) * ALIGNMENT for size in self._sizes.values())
        self.nbytes = sum((*buffers, *kinds.values()))
        self._held: dict[Hashable, Tensor] = {}
        self._drawn: dict[int, Tensor] = {}
        self._placed: ExitStack | None = None

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """A block in which the model has scratch weights, the same ones every time. Raises
        DeterminismError where what runs in it does not take them."""
        try:
            with ExitStack() as self._placed:
                self._placed.enter_context(self.shared())
                yield
        except (AssertionError, ValueError) as error:  # as of a quantizer's range
            why = failing_module(self._model, error)
            raise DeterminismError(f"on weights of the proof's own making {why}") from error
        finally:
            self._placed = None

    @contextmanager
    def aside(self) -> Iterator[None]:
        """A block, within ``in_place`` or not, in which the model has its own weights."""
        if (placed := self._placed) is not None:
            placed.close()
        yield
        if placed is not None:  # what is raised leaves ``in_place`` as well
            placed.enter_context(self.shared())

    @contextmanager
    def shared(self, *others: nn.Module) -> Iterator[None]:
        """A block in which the model, and ``others`` that share its weights, have these."""
        if not self._drawn:
            kinds = {layout(weight): weight for weight in self._packed}
            packed = {kind: filled(weight, self._scale) for kind, weight in kinds.items()}
            for number, (name, weight) in enumerate(self._plain.items(), 1):
                self._drawn[id(weight)] = self._like(number, name, weight)
            self._drawn |= {id(weight): packed[layout(weight)] for weight in self._packed}
        models = self._model, *others
        with other_weights(self._drawn, *models), _scratch_states(self._scale, models):
            yield

    def _key(self, spread: str, weight: Tensor) -> Hashable:
        # In a file that was mapped a weight may begin anywhere; and torch's products of tensors of
        # inference mode may be others.
        remainder = weight.data_ptr() % weight.itemsize
        return spread, weight.dtype, weight.device, remainder, weight.is_inference()

    def _like(self, number: int, name: str, weight: Tensor) -> Tensor:
        """Random numbers in the form of ``weight``, and of its class, at the place of the buffer
        that this number has."""
        key = self._key(spread := _spread(name, weight), weight)
        with torch.inference_mode(weight.is_inference()), torch.no_grad():
            if key not in self._held:
                self._held[key] = self._filled(spread, weight, self._sizes[key])
            flat = self._held[key]
            first = number * 37 % PLACES * ALIGNMENT
            first += (weight.data_ptr() - flat.data_ptr()) % ALIGNMENT
            view = flat.as_strided(weight.shape, weight.stride(), first // weight.itemsize)
            if isinstance(weight, nn.Parameter):
                return nn.Parameter(view, requires_grad=weight.requires_grad)
            return view

    def _filled(self, spread: str, weight: Tensor, size: int) -> Tensor:
        """A buffer of so many bytes and more, for weights like this one."""
        dtype, device, itemsize = weight.dtype, weight.device, weight.itemsize
        count = -(-(size + (PLACES + 1) * ALIGNMENT) // itemsize)
        flat = torch.empty(count + 1, dtype=dtype, device=device)
        if remainder := weight.data_ptr() % itemsize:
            # A view begins at a whole number: this one is of a part of the storage.
            part = flat.untyped_storage()[remainder:]
            flat = torch.empty(0, dtype=dtype, device=device).set_(part, 0, (count,), (1,))
        drawn = self._noise(min(PERIOD, count), spread).to(device, dtype)
        for part in flat.split(len(drawn)):
            part.copy_(drawn[: len(part)])
        return flat

    def _noise(self, count: int, spread: str) -> Tensor:
        # Another seed than inputs have.
        generator = torch.Generator().manual_seed(PERIOD)
        noise = torch.randn(count, generator=generator, dtype=torch.float32, device="cpu")
        if spread == MATRIX:
            return noise * self._scale
        if spread == BIAS:
            return noise * 2.0 ** (torch.arange(count, device="cpu") % 4 * -6)
        return noise / 4 + (spread == SCALE)


@contextmanager
def _scratch_states(scale: float, models: Iterable[nn.Module]) -> Iterator[None]:
    """What 8-bit linears of bitsandbytes keep beside their weights fits these in the block."""
    modules: list[Any] = [m for model in models for m in model.modules() if extra_parts(m)]
    before = [module.state for module in modules]
    for module in modules:
        module.state = copy.copy(module.state)
        module.state.CB = module.weight.data
        module.state.SCB = torch.full_like(module.state.SCB, scale)
    try:
        yield
    finally:
        for module, state in zip(modules, before, strict=True):
            module.state = state


def scratch_weights(module: nn.Module, *others: nn.Module) -> AbstractContextManager[None]:
    """A block in which ``module``, and ``others`` that share its weights, have scratch weights."""
    return ScratchModel(module).shared(*others)
