"""Graphs of a CPU, which stand in for CUDA's: a replay calls the captured work again.

As on a GPU, what a capture has baked in is all that a replay knows: no argument reaches it, it
reads what lies in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from tests.support.recorded import as_on_a_gpu
from tinyspec import config
from tinyspec.model.torch_state import DeviceStream
from tinyspec.runner import graphs


@dataclass
class Log:
    """captures, replays: how many there were. results: addresses of a graph's results, by the
    number of its capture."""

    captures: int = 0
    replays: int = 0
    results: dict[int, set[int]] = field(default_factory=dict)


class StandIn:
    """work: what was captured. before_replay: called before it is."""

    def __init__(self, log: Log, before_replay: Callable[[StandIn], None]):
        self.log, self._before = log, before_replay

    def capture(self, work: Callable[[], Tensor]) -> Tensor:
        self.log.captures += 1
        self.number, self.work = self.log.captures, work
        # Only its shape counts: a capture runs nothing.
        self.result = torch.full_like(work(), torch.nan)
        return self.result

    def replay(self) -> None:
        self.log.replays += 1
        self._before(self)
        self.result.copy_(self.work())
        self.log.results.setdefault(self.number, set()).add(self.result.data_ptr())


def with_graphs(
    patches: pytest.MonkeyPatch, before_replay: Callable[[StandIn], None] = lambda graph: None
) -> Log:
    """Engines with ``backend="triton"`` compute with the twins and capture passes."""
    log = Log()
    as_on_a_gpu(patches)
    patches.setattr(config, "WITH_GRAPHS", ("cpu", "cuda"))

    def maker(stream: DeviceStream) -> Callable[[], StandIn]:
        return lambda: StandIn(log, before_replay)

    patches.setitem(graphs.MAKERS, "cpu", maker)
    # The twins read what they have computed.
    patches.setattr(graphs, "_asks_the_host", lambda *_: None)
    return log
