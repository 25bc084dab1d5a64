"""When a further bucket is worth its proof: once passes would have saved as much time as it takes.

Which buckets are proven changes speed, never a bit, so time may decide. Host only.
"""

from __future__ import annotations

import logging

from tinyspec.config import EngineConfig
from tinyspec.determinism.probe_results import ProbeResults
from tinyspec.scheduler.buckets import MOST_DRAFTS, Buckets, estimate

logger = logging.getLogger("tinyspec")
# What a pass would have saved is looked at in one of so many passes.
EVERY = 4
# A proof of more seconds than SHORT waits for ``warm_up``, unless deterministic requests have run
# for PATIENCE times as long.
SHORT, PATIENCE = 2.0, 20


class Ladder:
    """Of one engine. saved: seconds that each unknown bucket would have saved so far. failed:
    buckets whose proof raised."""

    def __init__(self, buckets: Buckets, config: EngineConfig):
        self._buckets, self._most = buckets, config.draft_window or MOST_DRAFTS
        self.saved: dict[int, float] = {}
        self.failed: set[int] = set()
        self._served = 0.0
        self._passes = 0
        self._told = False

    def next(self, results: ProbeResults, seconds: float, accepted: float) -> int | None:
        """After a pass of so many seconds: the bucket to prove now, if there is one."""
        self._served += seconds
        self._passes += 1
        open_sizes = [
            n for n in self._buckets.sizes if n not in results.sizes and n not in self.failed
        ]
        if not open_sizes or self._passes % EVERY:
            return None
        gains = self._buckets.gains(open_sizes, self._most, accepted)
        for rows, gain in gains.items():
            self.saved[rows] = self.saved.get(rows, 0.0) + EVERY * gain
        for rows in sorted(gains, key=gains.__getitem__, reverse=True):
            proof = proof_seconds(results, rows)
            if self.saved[rows] < proof:
                continue
            if proof < SHORT or self._served > PATIENCE * proof:
                return rows
            if not self._told:
                self._told = True
                logger.info(
                    "passes of %d rows would have saved %.1f of %.1f s: engine.warm_up() proves "
                    "them, in about %.0f s",
                    rows,
                    self.saved[rows],
                    self._served,
                    proof,
                )
        return None


def proof_seconds(results: ProbeResults, rows: int) -> float:
    """About what the proof of a bucket takes, from those that were made."""
    known = {b.rows: b.proof for b in results.buckets if b.proof}
    return estimate(known, rows) if known else 0.0
