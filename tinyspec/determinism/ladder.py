"""When a further bucket is worth its proof: once passes would have saved as much time as it takes.

Which buckets are proven changes speed, never a bit, so time may decide. Knows no model.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from statistics import median

from tinyspec.config import EngineConfig
from tinyspec.determinism.results import ProbeResults
from tinyspec.scheduler.buckets import MOST_DRAFTS, Buckets

logger = logging.getLogger("tinyspec")
# What a pass would have saved is looked at in one of so many passes.
EVERY = 4
# A proof of more seconds than SHORT waits for ``warm_up``, unless deterministic requests have run
# for PATIENCE times as long.
SHORT, PATIENCE = 2.0, 20
# Passes of a bucket that its proof takes: 3 to 1.2 of 48 to 2048 rows in a model of 43 linears,
# more of fewer rows.
PROOF_PASSES = 3


class Ladder:
    """When a further bucket is worth its proof: once passes would have saved as much time as it
    takes. Which buckets are proven changes speed, never a bit, so time may decide.

    saved: seconds that each unknown bucket would have saved so far. failed: buckets whose proof
    raised.
    """

    def __init__(self, buckets: Buckets, config: EngineConfig):
        self._buckets, self._most = buckets, config.draft_window or MOST_DRAFTS
        self.saved: dict[int, float] = defaultdict(float)
        self.failed: set[int] = set()
        self._served, self._passes, self._told = 0.0, 0, False

    def next(self, results: ProbeResults, seconds: float, accepted: float) -> int | None:
        """After a pass of so many seconds: the bucket to prove now, if there is one."""
        self._served += seconds
        self._passes += 1
        known = {*results.sizes, *self.failed}
        open_sizes = [rows for rows in self._buckets.sizes if rows not in known]
        if not open_sizes or self._passes % EVERY:
            return None
        gains = self._buckets.gains(open_sizes, self._most, accepted)
        for rows in sorted(gains, key=gains.__getitem__, reverse=True):
            self.saved[rows] += EVERY * gains[rows]
            saved, proof = self.saved[rows], proof_seconds(results, self._buckets, rows)
            if saved < proof:
                continue
            if proof < SHORT or self._served > PATIENCE * proof:
                return rows
            if not self._told:
                self._told = True
                gained = f"passes of {rows} rows would have saved {saved:.1f} of {self._served:.1f}"
                logger.info("%s s: engine.warm_up() proves them, in about %.0f s", gained, proof)
        return None


def proof_seconds(results: ProbeResults, buckets: Buckets, rows: int) -> float:
    """About what the proof of a bucket takes: some passes, and what other proofs took beyond
    theirs; but for the reference's, which looks for what the others go by."""

    def passes(size: int) -> float:
        return PROOF_PASSES * buckets.seconds(size, canonical=True)

    others = (b for b in results.buckets if b.proof and b.rows != results.reference)
    beyond = [max(0.0, b.proof - passes(b.rows)) for b in others]
    return passes(rows) + (median(beyond) if beyond else 0.0)
