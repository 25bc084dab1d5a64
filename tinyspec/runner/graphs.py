"""Passes captured as graphs: a pass that comes again is one launch instead of hundreds.

What is captured is the work of a whole pass at fixed addresses, one graph for every shape of pass;
first passes of a shape, and passes that cannot be captured, run eagerly beside it. A graph is never
replayed when any memory that it knows has another address. Knows shapes and addresses, no rows.

A graph repeats launches with the arguments they had. So no operator may wait for what the device
has computed, nor return a shape that depends on it: ``GraphSafety`` looks at what operators ask of
the host in the first pass of each kind.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tinyspec.model.torch_state import DeviceStream

logger = logging.getLogger("tinyspec")
# Eager passes of a shape before it is captured: they compile and load what it launches, and a shape
# that does not come again is not worth a capture, which takes as long as several passes.
EAGER_PASSES = 4
# Graphs share the memory of their passes, but each has its own for its logits: of more bytes all
# are dropped. Those of all decode passes up to 256 rows have a fourth of them, for 150,000 tokens.
MOST_BYTES = 2 << 30
MASKS = (torch.bool, torch.uint8)
_ATEN = torch.ops.aten
INDEXING = (_ATEN.index, _ATEN._unsafe_index, _ATEN.index_put_, _ATEN.index_put)
Forward = Callable[[], Tensor]


class GraphSafety(TorchDispatchMode):
    """Runs operators; ``refusal``: the first that a graph cannot hold, and the module that called
    it."""

    def __init__(self) -> None:
        super().__init__()
        self.refusal: str | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.refusal is None and (why := _asks_the_host(func, (*args, kwargs), out)):
            self.refusal = f"{func.overloadpacket} {why}{_calling_module()}"
        return out


def _asks_the_host(func: Any, given: tuple[Any, ...], out: Any) -> str | None:
    """Why a graph cannot hold an operator, or None."""
    if torch.Tag.data_dependent_output in func.tags:
        return "reads what the device has computed"
    # Indexing has a shape that depends on data only with masks.
    indexes = func.overloadpacket in INDEXING
    if indexes and any(x.dtype in MASKS for x in _tensors(given[1])):
        return "takes or writes what a mask says"
    if torch.Tag.dynamic_output_shape in func.tags and not indexes:
        return "returns a shape that depends on what the device has computed"
    devices = {x.device for x in _tensors((given, out)) if x.dim()}
    return "copies between devices" if len(devices) > 1 else None


def _tensors(values: Any) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]


def _calling_module() -> str:
    """ " in X" for the innermost module that is running."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        for owner in (frame.f_locals.get("self"), frame.f_locals.get("module")):
            if isinstance(owner, nn.Module):
                return f" in {type(owner).__name__}"
        frame = frame.f_back
    return ""


class CudaGraph:
    """Work on the engine's own stream, which is current when it is captured and replayed. pool: of
    memory, which graphs that never run at the same time share."""

    def __init__(self, stream: DeviceStream, pool: Any):
        self._stream, self._pool = stream, pool
        self._graph = torch.cuda.CUDAGraph()

    def capture(self, work: Forward) -> Tensor:
        """Record ``work``, which does not run; where its result will lie."""
        # Other threads may use the device meanwhile, on other streams.
        own, mode = self._stream.own, "thread_local"
        try:
            with torch.cuda.graph(self._graph, self._pool, own, capture_error_mode=mode):
                return work()
        except Exception:
            # It has left torch's generator in capture mode. One that ends well takes it out.
            other = torch.cuda.CUDAGraph()
            with suppress(Exception), torch.cuda.graph(other, None, own, capture_error_mode=mode):
                torch.zeros(1, dtype=torch.float32, device=self._stream.device)
            raise

    def replay(self) -> None:
        """Run what was captured on what now lies at the same addresses."""
        assert torch.cuda.current_stream(self._stream.device) == self._stream.own
        self._graph.replay()


@dataclass
class _Captured:
    graph: CudaGraph
    result: Tensor
    canonical: bool
    addresses: tuple[int, ...]


class PassGraphs:
    """The graphs of one engine. on: whether passes are to be captured.

    refusals: why passes cannot be, by whether they are canonical; known after the first pass of
    each kind, None where they can. runs_user_code: whether passes run code that a replay would
    leave out. settled: whether the latest pass ran as all later ones of its shape will; before
    they are replayed they take longer.
    """

    def __init__(self, stream: DeviceStream, on: bool):
        self._stream, self._on = stream, on
        self._pool: Any = None
        self._captured: dict[Hashable, _Captured] = {}
        self._eager: Counter[Hashable] = Counter()
        self.refusals: dict[bool, str | None] = {}
        self.runs_user_code, self.settled = False, True

    def __len__(self) -> int:
        return len(self._captured)

    def refusal(self, canonical: bool) -> str | None:
        """Why passes of this kind are not captured, as far as is known; None if they are."""
        if self.runs_user_code:
            return "modules or hooks of no known library run in them"
        return self.refusals.get(canonical)

    @contextmanager
    def looking(self, canonical: bool) -> Iterator[None]:
        """Around every forward: looks at the first of each kind."""
        if canonical in self.refusals:
            yield
            return
        with GraphSafety() as found:
            yield
        self.refusals[canonical] = found.refusal
        if found.refusal is not None and self._on:
            kind = "canonical" if canonical else "other"
            logger.info("%s passes are not captured as graphs: %s", kind, found.refusal)

    def run(
        self, shape: Hashable, canonical: bool, addresses: tuple[int, ...] | None, forward: Forward
    ) -> Tensor:
        """The result of ``forward``, whose work follows from ``shape`` and reads and writes memory
        at ``addresses``; None: no graph is to hold it."""
        refused = addresses is not None and self.refusal(canonical) is not None
        self.settled = not self._on or refused
        if self.settled or addresses is None:
            return forward()
        captured = self._captured.get(shape)
        if captured is not None and captured.addresses != addresses:
            self.clear()
            captured = None
        if captured is None:
            if canonical not in self.refusals or self._eager[shape] < EAGER_PASSES:
                self._eager[shape] += 1
                return forward()
            captured = self._capture(shape, canonical, addresses, forward)
            if captured is None:
                return forward()
        else:
            self.settled = True
        assert captured.addresses == addresses
        captured.graph.replay()
        return captured.result

    def _capture(
        self, shape: Hashable, canonical: bool, addresses: tuple[int, ...], forward: Forward
    ) -> _Captured | None:
        """A graph of ``forward``; None while other threads use the stream, where room is made for
        it, and where it failed, which is not tried again."""
        if sum(one.result.nbytes for one in self._captured.values()) > MOST_BYTES:
            self.clear()
            return None
        try:
            with self._stream.alone() as alone:
                if not alone:
                    return None
                self._pool = self._pool or torch.cuda.graph_pool_handle()
                graph = CudaGraph(self._stream, self._pool)
                result = graph.capture(forward)
        except Exception as error:
            self.refusals[canonical] = f"capturing {shape} raised {type(error).__name__}: {error}"
            self._pool = None  # torch takes it for one that is being recorded to
            logger.warning("passes run without graphs: %s", self.refusals[canonical])
            return None
        self._captured[shape] = found = _Captured(graph, result, canonical, addresses)
        logger.info("captured graph %d: %s", len(self), shape)
        return found

    def clear(self, canonical: bool = False) -> None:
        """Drop all graphs, or those of ``canonical`` passes: what they hold may have changed. No
        pass may be running."""
        if self._captured and self._stream.queues:
            with self._stream():  # not while another engine's pass is captured
                self._stream.own.synchronize()
        kinds = (False,) if canonical else ()  # that stay
        captured = self._captured.items()
        self._captured = {shape: one for shape, one in captured if one.canonical in kinds}
        self._eager.clear()
        self.refusals = {kind: why for kind, why in self.refusals.items() if kind in kinds}
        if not self._captured:
            self._pool = None
