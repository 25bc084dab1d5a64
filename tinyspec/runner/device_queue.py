"""Work for the device: handed over without waiting for it, its results fetched in one transfer.

On CUDA everything runs on one stream (``DeviceStream``), so work is done in the order in which it
was handed over. On a CPU it is done at once. Knows tensors, not what they mean.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from tinyspec.scheduler.sequence_table import Array


class HasTensors(Protocol):
    """Results of work on the device."""

    def tensors(self) -> list[Tensor | None]:
        """Those that the host wants to see."""
        ...


R = TypeVar("R", bound=HasTensors)


def to_device(values: Array, device: torch.device) -> Tensor:
    """``values`` on the device, without waiting for what runs there; they must not be written
    afterwards: on a CPU they are the tensor's memory."""
    tensor = torch.from_numpy(values)
    if device.type == "cpu":
        return tensor
    if device.type == "cuda":  # a copy from other memory would wait
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def overwrite(target: Tensor, values: Array) -> None:
    """Write ``values`` to ``target`` on the device, as ``to_device`` sends them."""
    tensor = torch.from_numpy(values)
    if target.device.type == "cuda":
        tensor = tensor.pin_memory()
    target.copy_(tensor, non_blocking=True)


class Pending(Generic[R]):
    """Results of work that was handed over; what it raised is raised where they are asked for."""

    def __init__(self, work: Callable[[], R]):
        self.failed = False  # whether it is known to have raised
        self._error: Exception | None = None
        try:
            self._results = work()
            self._transfer = Transfer(self._results.tensors())
        except Exception as error:
            self._error, self.failed = error, True

    @property
    def results(self) -> R:
        """On the device, for work that comes after it."""
        if self.failed:
            raise self._error or RuntimeError("the work has raised, and its error was fetched")
        return self._results

    def fetch(self) -> list[Array | None]:
        """The tensors of the results on the host; waits for them. An error is raised once, so that
        its frames, and what they hold on the device, live no longer than the handling of it."""
        if self._error is not None:
            error, self._error = self._error, None
            try:
                raise error
            finally:
                del error
        return self._transfer.fetch()


class DeviceQueue:
    """Hands work over, one after the other."""

    def launch(self, work: Callable[[], R]) -> Pending[R]:
        """Start ``work``, which may ask for the results of what was launched before it."""
        return Pending(work)


class Transfer:
    """Tensors on their way to the host, in one copy; a None among them stays one."""

    def __init__(self, tensors: list[Tensor | None]):
        self._tensors = tensors
        self._event: torch.cuda.Event | None = None
        there = [tensor for tensor in tensors if tensor is not None]
        self._is_there = there[0].is_cpu
        if not self._is_there:
            packed = pack(there)
            pinned = packed.device.type == "cuda"
            size = packed.shape
            self._host = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned)
            self._host.copy_(packed, non_blocking=pinned)
            if pinned:
                self._event = torch.cuda.Event()
                self._event.record(torch.cuda.current_stream(packed.device))

    def fetch(self) -> list[Array | None]:
        """Waits until they have arrived."""
        if self._is_there:
            return [None if tensor is None else tensor.numpy() for tensor in self._tensors]
        if self._event is not None:
            self._event.synchronize()
        return unpack(self._host.numpy(), self._tensors)


_NUMPY = {torch.int64: "int64", torch.int32: "int32", torch.float32: "float32"}


def pack(tensors: list[Tensor]) -> Tensor:
    """The bytes of ``tensors``, one after the other: [n] uint8."""
    parts = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def unpack(packed: Array, tensors: list[Tensor | None]) -> list[Array | None]:
    """Arrays in the shapes of ``tensors`` from their bytes."""
    found: list[Array | None] = []
    first = 0
    for tensor in tensors:
        if tensor is None:
            found.append(None)
            continue
        end = first + tensor.numel() * tensor.element_size()
        values = packed[first:end].view(_NUMPY[tensor.dtype])
        found.append(values.reshape(tuple(tensor.shape)))
        first = end
    return found
