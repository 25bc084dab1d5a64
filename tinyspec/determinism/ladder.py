"""When a further bucket is worth its proof: once passes would have saved as much time as it takes.

Which buckets are proven changes speed, never a bit, so time may decide. Knows no model.
"""

from __future__ import annotations

from collections import defaultdict
from statistics import median

from tinyspec.determinism.results import ProbeResults
from tinyspec.scheduler.buckets import Buckets

# What a pass would have used is looked at in one of so many passes.
EVERY = 4
# Passes of a bucket that its proof takes: 10 to 1.3 of 4 to 2048 rows in a model of 43 linears.
PROOF_PASSES = 3


class Ladder:
    """saved: seconds that passes would have saved so far in each unknown bucket. failed: buckets
    whose proof raised."""

    def __init__(self, buckets: Buckets):
        self._buckets = buckets
        self.saved: dict[int, float] = defaultdict(float)
        self.failed: set[int] = set()
        self._passes = 0

    def next(self, results: ProbeResults, accepted: float) -> int | None:
        """After a pass: the bucket to prove now, if there is one."""
        self._passes += 1
        unknown = {*self._buckets.sizes} - {*results.sizes, *self.failed}
        if not unknown or self._passes % EVERY:
            return None
        found = self._buckets.would_use(accepted)
        if found is None or found[0] not in unknown:
            return None
        rows, seconds = found
        self.saved[rows] += EVERY * seconds
        enough = proof_seconds(results, self._buckets, rows)
        return rows if self.saved[rows] >= enough else None


def proof_seconds(results: ProbeResults, buckets: Buckets, rows: int) -> float:
    """About what the proof of a bucket takes: some passes, and what other proofs took beyond
    theirs, but for the reference's; with the first of them goes a second look at the reference,
    which takes as long as that did."""

    def passes(size: int) -> float:
        return PROOF_PASSES * buckets.seconds(size, canonical=True)

    (first,) = (b.proof for b in results.buckets if b.rows == results.reference)
    others = (b for b in results.buckets if b.proof and b.rows != results.reference)
    beyond = [max(0.0, b.proof - passes(b.rows)) for b in others]
    second = 0.0 if results.confirmed else first
    return passes(rows) + second + (median(beyond) if beyond else 0.0)
