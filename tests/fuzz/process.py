"""What else goes on in the process, for the table of influences."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from tests.support.tiny import tiny
from tinyspec import Engine, EngineConfig, SamplingParams


@contextmanager
def _thread(work: Callable[[], object]) -> Iterator[None]:
    """``work`` over and over in another thread; its error, if any, is raised at the end."""
    ended = threading.Event()
    errors: list[BaseException] = []

    def run() -> None:
        try:
            while not ended.is_set():
                work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        if errors:
            raise errors[0]


def busy_thread() -> Any:
    """Matrix products in another thread."""
    a = torch.randn(160, 160)
    return _thread(lambda: a @ a)


@cache
def _other() -> Engine:
    config = EngineConfig(reference_rows=8, max_rows=16, page_size=16, num_pages=32)
    return Engine(tiny("gpt2"), config=config)


def engine_in_a_thread() -> Any:
    """Plain requests of another engine in another thread."""
    engine, params = _other(), SamplingParams(max_new_tokens=3)
    return _thread(lambda: engine.generate([[1, 2, 3]], params))


@contextmanager
def allocations(rng: random.Random) -> Iterator[None]:
    """Memory of many sizes, half of it given back."""
    kept = [torch.empty(rng.randrange(1, 1 << 14)) for _ in range(400)]
    del kept[::2]
    yield
    kept.clear()


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """NaN in the memory that is given out next."""
    sizes = [16 << n for n in range(13)] * 8
    made = [torch.full((size,), torch.nan) for size in sizes]
    made.clear()
    yield


@contextmanager
def one_core() -> Iterator[None]:
    """All threads on one core."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
