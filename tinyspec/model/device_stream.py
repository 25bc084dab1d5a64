"""The CUDA stream that all of tinyspec's work on a device runs on, in order with the caller's.

Passes share memory: KV pages, static tables, what the allocator hands out again. On one stream
each comes after the one before, whichever streams and threads the callers have. On a CPU nothing
here does anything. Knows neither passes nor models.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import Lock, RLock, local
from typing import Any

import torch
from torch import Tensor

# Types of devices whose work is queued on streams.
WITH_STREAMS = ("cuda",)
_streams: dict[torch.device, DeviceStream] = {}
_making = Lock()


class _Callers(local):
    """The stream that was current in this thread before the block that it is in."""

    stream: Any = None


class DeviceStream:
    """The stream of one device; ``stream_of`` makes one for each.

    queues: whether the device has streams.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.queues = device.type in WITH_STREAMS
        self._callers = _Callers()
        self._own: torch.cuda.Stream | None = None
        # Held where a thread begins or ends its block, and throughout ``alone``.
        self._entering = RLock()
        self._threads_inside = 0

    @property
    def own(self) -> torch.cuda.Stream:
        if self._own is None:
            with _making:
                self._own = self._own or torch.cuda.Stream(self.device)
        return self._own

    def __reduce__(self) -> tuple[object, tuple[torch.device]]:
        return stream_of, (self.device,)  # of an engine that is copied

    def __call__(self) -> AbstractContextManager[object]:
        """Work of the block runs on this stream: after what the caller's current stream has been
        given so far, and before what that is given afterwards."""
        return self._block() if self.queues else nullcontext()

    @contextmanager
    def _block(self) -> Iterator[None]:
        caller, own = torch.cuda.current_stream(self.device), self.own
        with torch.cuda.device(self.device), torch.cuda.stream(own):
            if caller == own:  # within another block
                yield
                return
            outer = self._callers.stream
            with self._entering:
                self._threads_inside += 1
            try:
                own.wait_stream(caller)
                self._callers.stream = caller
                yield
            finally:
                self._callers.stream = outer
                caller.wait_stream(own)
                with self._entering:
                    self._threads_inside -= 1

    @contextmanager
    def alone(self) -> Iterator[bool]:
        """Within a block: whether no other thread is in one of its own. If so none begins one
        before this ends: whatever it handed over would be captured with the work of this thread."""
        with self._entering if self.queues else nullcontext():
            if alone := not self.queues or self._threads_inside == 1:
                yield True
        if not alone:
            yield False

    def again(self) -> None:
        """Within a block, after code of the user's that may have made another stream current."""
        if self.queues and (now := torch.cuda.current_stream(self.device)) != self.own:
            self.own.wait_stream(now)
            torch.cuda.set_stream(self.own)

    def hand_out(self, *tensors: Tensor | None) -> None:
        """Within a block: the caller gets ``tensors``. Once it drops one, its memory is not used
        again before the caller's stream has done what it was given until then."""
        for tensor in tensors:
            if tensor is not None and self.queues and self._callers.stream is not None:
                tensor.record_stream(self._callers.stream)

    def take(self, tensor: Tensor) -> None:
        """Within a block: work reads ``tensor``, which is the caller's."""
        if self.queues and tensor.device.type in WITH_STREAMS:
            tensor.record_stream(self.own)

    def give_back(self) -> None:
        """Memory that was freed goes back to the device: torch's allocator keeps it for the stream
        that used it, and gives it to others only when there is no more."""
        if self.queues:
            torch.cuda.empty_cache()


def stream_of(device: torch.device) -> DeviceStream:
    """One for all engines of a device: memory that one has freed, the next can have."""
    with _making:
        if device not in _streams:
            _streams[device] = DeviceStream(device)
        return _streams[device]
