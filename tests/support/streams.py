"""Streams of a device that is not there: they record which work is known to be done before which.

On a CPU, whose work an engine then orders as on CUDA.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import local
from typing import Any

import pytest
import torch

from tinyspec.model import torch_state
from tinyspec.runner.kv_cache import KVCache
from tinyspec.runner.model_runner import ModelRunner


class Stream:
    """before: the numbers of works that come before whatever it is given next."""

    def __init__(self, device: object = None):
        self.before: set[int] = set()

    def wait_stream(self, other: Stream) -> None:
        self.before |= other.before


class Work:
    """What was done, on which stream, and the numbers of works that were done before it."""

    def __init__(self, name: str, stream: Stream):
        self.name, self.stream, self.before = name, stream, frozenset(stream.before)


class Streams(local):
    """The current stream of every thread; all begin with the same."""

    def __init__(self, default: Stream) -> None:
        self.current = default


class Recorder:
    """works: in the order in which they were handed over. kept: streams for which tensors were
    recorded, by the tensor's address."""

    def __init__(self) -> None:
        self.works: list[Work] = []
        self.kept: dict[int, list[Stream]] = {}
        self._streams = Streams(Stream())

    @property
    def current(self) -> Stream:
        return self._streams.current

    def set_stream(self, stream: Stream) -> None:
        self._streams.current = stream

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """Another current stream of this thread."""
        before = self.current
        self.set_stream(stream)
        try:
            yield
        finally:
            self.set_stream(before)

    def work(self, name: str) -> Work:
        """Hand work over to the current stream."""
        self.works.append(Work(name, self.current))
        self.current.before.add(len(self.works) - 1)
        return self.works[-1]

    def named(self, *names: str) -> list[Work]:
        return [work for work in self.works if work.name in names]

    def ordered(self, works: list[Work]) -> bool:
        """Whether each is known to be done before the next one begins."""
        numbers = [self.works.index(work) for work in works]
        pairs = zip(numbers, works[1:], strict=False)
        return all(number in later.before for number, later in pairs)


# What writes to the pool or reads it: name, and class.
ON_THE_POOL = {"forward": ModelRunner, "copy_pages": KVCache}


def record(patches: pytest.MonkeyPatch, streams: bool = True) -> Recorder:
    """Streams of the CPU, and what works on the pool recorded; without ``streams`` all work runs on
    the caller's."""
    found = Recorder()

    def recorded(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            found.work(name)
            return function(*args, **kwargs)

        return call

    for name, owner in ON_THE_POOL.items():
        patches.setattr(owner, name, recorded(name, getattr(owner, name)))

    def on_device(device: object) -> AbstractContextManager[None]:
        return nullcontext()

    def keep(tensor: torch.Tensor, stream: Stream) -> None:
        found.kept.setdefault(tensor.data_ptr(), []).append(stream)

    patches.setattr(torch.cuda, "Stream", Stream)
    patches.setattr(torch.cuda, "stream", found.on)
    patches.setattr(torch.cuda, "device", on_device)
    patches.setattr(torch.cuda, "set_stream", found.set_stream)
    patches.setattr(torch.cuda, "empty_cache", lambda: found.work("empty_cache"))
    patches.setattr(torch.cuda, "current_stream", lambda device: found.current)
    patches.setattr(torch.Tensor, "record_stream", keep, raising=False)
    patches.setattr(torch_state, "WITH_STREAMS", ("cpu",) if streams else ())
    torch_state._streams.clear()
    return found
