"""Work for the device: handed over without waiting for it, its results fetched later.

On CUDA everything runs on one stream (``DeviceStream``), so work is done in the order in which it
was handed over. On a CPU it is done at once. Knows tensors, not what they mean.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tinyspec.scheduler.sequence_table import Array


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


class Pending:
    """Results of ``work``, which is handed over when this is made; it may ask for those of what was
    handed over before. ``results.tensors()``, some None, are on their way to the host. What it
    raised is raised where they are asked for."""

    def __init__(self, work: Callable[[], Any]):
        self.failed = False  # whether it is known to have raised
        self._error: Exception | None = None
        self._arrived: torch.cuda.Event | None = None
        try:
            self._results = work()
            tensors: list[Tensor | None] = self._results.tensors()
            self._host = [None if tensor is None else _to_host(tensor) for tensor in tensors]
            device = next((tensor.device for tensor in tensors if tensor is not None), None)
            if device is not None and device.type == "cuda":
                self._arrived = torch.cuda.Event()
                self._arrived.record(torch.cuda.current_stream(device))
        except Exception as error:
            self._error, self.failed = error, True

    @property
    def results(self) -> Any:
        """On the device, for work that comes after it."""
        if self.failed:
            raise self._error or RuntimeError("the work has raised, and its error was fetched")
        return self._results

    def fetch(self) -> list[Any]:
        """The tensors of the results on the host; waits for them. An error is raised once, so that
        its frames, and what they hold on the device, live no longer than the handling of it."""
        if self._error is not None:
            error, self._error = self._error, None
            try:
                raise error
            finally:
                del error
        if self._arrived is not None:
            self._arrived.synchronize()
        return [None if tensor is None else tensor.numpy() for tensor in self._host]


def _to_host(tensor: Tensor) -> Tensor:
    """``tensor`` in memory of the host, which it reaches later where it is on a GPU."""
    if tensor.device.type != "cuda":
        return tensor.cpu()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
