"""What users may read of an engine's passes: sums, records, and the trace of their rows."""

from __future__ import annotations

from collections import deque

from tinyspec.config import EngineConfig
from tinyspec.engine.core import EngineCore
from tinyspec.engine.trace import PASSES_KEPT, Trace
from tinyspec.errors import refuse
from tinyspec.scheduler.passes import EngineStats, PassRecord

# Without a trace.
RECORDS_KEPT = 1000


class Observed:
    """Base of an engine."""

    core: EngineCore

    def stats(self) -> EngineStats:
        """Sums over all passes so far."""
        return self.core.stats

    @property
    def records(self) -> list[PassRecord]:
        """Records of the latest passes: 1000, or as many as ``EngineConfig(trace=...)`` says."""
        return list(self.core.records)

    @property
    def trace(self) -> Trace:
        """What every row of the latest passes was for, and what became of it.

        Raises ValueError unless ``EngineConfig(trace=True)`` keeps it.
        """
        if self.core.trace is None:
            raise refuse("trace", False, "an engine with EngineConfig(trace=True)")
        return self.core.trace


def records_of(config: EngineConfig) -> deque[PassRecord]:
    """A ring for the records of an engine."""
    return deque(maxlen=passes_traced(config) or RECORDS_KEPT)


def passes_traced(config: EngineConfig) -> int:
    """How many passes the trace keeps; 0: there is none."""
    return PASSES_KEPT if config.trace is True else int(config.trace)
