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
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.recorded import as_on_a_gpu
from tinyspec import config
from tinyspec.runner import graphs


@dataclass
class Log:
    """captures, replays: how many there were. results: addresses of a graph's results, by the
    number of its capture."""

    captures: int = 0
    replays: int = 0
    results: dict[int, set[int]] = field(default_factory=dict)


class Undone(TorchDispatchMode):
    """A block after which all that its operators wrote to is as it was before: a state that moves
    in place must not move twice."""

    def __init__(self):
        super().__init__()
        self.before = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for n, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            for x in tree_leaves(args[n] if n < len(args) else kwargs.get(argument.name)):
                if isinstance(x, Tensor):
                    held = x.untyped_storage()
                    self.before.setdefault(held._cdata, (held, held.clone()))
        return func(*args, **kwargs)

    def __exit__(self, *raised):
        super().__exit__(*raised)
        for held, before in self.before.values():
            held.copy_(before)


class StandIn:
    """work: what was captured. before_replay: called before it is."""

    def __init__(self, log: Log, before_replay: Callable[[StandIn], None]):
        self.log, self._before = log, before_replay

    def capture(self, work: Callable[[], Tensor]) -> Tensor:
        self.log.captures += 1
        self.number, self.work = self.log.captures, work
        # Only its shape counts: a capture runs nothing.
        with Undone():
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

    patches.setattr(graphs, "CudaGraph", lambda stream, pool: StandIn(log, before_replay))
    patches.setattr(torch.cuda, "graph_pool_handle", object)
    # The twins read what they have computed.
    patches.setattr(graphs, "_asks_the_host", lambda *_: None)
    return log
