"""When a further bucket is proven: once passes would have used it often enough.

Which buckets are proven changes speed, never a bit, so time may decide. Knows no model.
"""

from __future__ import annotations

from collections import defaultdict
from statistics import median

from tinyspec.determinism.results import ProbeResults
from tinyspec.scheduler.buckets import Buckets

# Passes that would have used a bucket take so many times as long as its proof before that is made.
OFTEN = 4
# What a pass would have used is looked at in one of so many passes.
EVERY = 4
# Passes of a bucket that its proof takes: 10 to 1.3 of 4 to 2048 rows in a model of 43 linears.
PROOF_PASSES = 3


class Ladder:
    """used: seconds of passes that would have used each unknown bucket so far. failed: buckets
    whose proof raised."""

    def __init__(self, buckets: Buckets):
        self._buckets = buckets
        self.used: dict[int, float] = defaultdict(float)
        self.failed: set[int] = set()
        self._passes = 0

    def next(self, results: ProbeResults, seconds: float, accepted: float) -> int | None:
        """After a pass of so many seconds: the bucket to prove now, if there is one."""
        self._passes += 1
        if self._passes % EVERY:
            return None
        rows = self._buckets.would_use(accepted)
        if rows is None or rows in self.failed or rows in results.sizes:
            return None
        self.used[rows] += EVERY * seconds
        return (
            rows if self.used[rows] >= OFTEN * proof_seconds(results, self._buckets, rows) else None
        )


def proof_seconds(results: ProbeResults, buckets: Buckets, rows: int) -> float:
    """About what the proof of a bucket takes: some passes, and what other proofs took beyond
    theirs; but for the reference's, which looks for what the others go by."""

    def passes(size: int) -> float:
        return PROOF_PASSES * buckets.seconds(size, canonical=True)

    others = (b for b in results.buckets if b.proof and b.rows != results.reference)
    beyond = [max(0.0, b.proof - passes(b.rows)) for b in others]
    return passes(rows) + (median(beyond) if beyond else 0.0)
