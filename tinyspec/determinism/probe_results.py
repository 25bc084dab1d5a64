"""What the probes found: which buckets are canonical, why others are not, what each costs.

Before the first deterministic token the reference bucket is known, and the others one by one.
Host only: knows neither torch nor how anything was measured.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from tinyspec.determinism.typed import typed


@dataclass(frozen=True)
class BucketResult:
    """One bucket: whether its rows have the reference bucket's bits, and seconds of a pass.

    broken_by: the modules (one for all of their kind) whose rows differ there; "model" where only
    the model end to end does. seconds: of the fastest canonical pass that was compared; 0 where
    there was none. own_way: linears that a canonical pass runs in another way than fast mode does,
    in tiles of rows for example. proof: seconds that the bucket's own proof took.
    """

    rows: int
    canonical: bool
    broken_by: tuple[str, ...]
    seconds: float
    own_way: tuple[str, ...] = ()
    proof: float = 0.0


@dataclass(frozen=True)
class Unsound:
    """What breaks fact 1 in the reference bucket, or fact 3: without these no bucket can serve.

    remedy: what helps where another reference bucket would not.
    """

    name: str
    why: str
    remedy: str = ""


@dataclass(frozen=True)
class ComparedRows:
    """One kind of attention calls: rows that were compared with themselves in a prompt, and how
    many of these differed."""

    name: str
    checked: int
    differing: int


@dataclass(frozen=True)
class ProbeResults:
    """What is known so far of one model on one device.

    reference: the reference bucket. buckets: those that are known, in order of size. unsound: empty
    if the reference bucket is sound. kernel_linears: modules that must be served by the linear
    kernel, which makes it so. tiled: the first name of each kind of linears that run in tiles of
    the reference bucket's rows in larger canonical passes. attention: of each kind of calls.
    compared, routed: passes of the reference bucket that were compared end to end; rows of those
    whose matmuls were.
    """

    reference: int
    buckets: tuple[BucketResult, ...]
    unsound: tuple[Unsound, ...] = ()
    kernel_linears: tuple[str, ...] = ()
    tiled: tuple[str, ...] = ()
    attention: tuple[ComparedRows, ...] = ()
    compared: int = 0
    routed: int = 0

    @property
    def sizes(self) -> list[int]:
        return [bucket.rows for bucket in self.buckets]

    @property
    def canonical(self) -> list[int]:
        """The canonical buckets; none where the reference bucket is unsound."""
        return [bucket.rows for bucket in self.buckets if bucket.canonical]

    @property
    def seconds(self) -> dict[int, float]:
        """Seconds of a canonical pass by canonical bucket, where they are known."""
        return {b.rows: b.seconds for b in self.buckets if b.canonical and b.seconds}

    @property
    def own_way(self) -> list[int]:
        """Canonical buckets whose canonical passes run another way than fast mode."""
        return [b.rows for b in self.buckets if b.canonical and b.own_way]

    def with_bucket(self, bucket: BucketResult) -> ProbeResults:
        """After one more bucket became known."""
        others = (other for other in self.buckets if other.rows != bucket.rows)
        return replace(self, buckets=tuple(sorted((*others, bucket), key=lambda b: b.rows)))

    def with_unsound(self, unsound: Iterable[Unsound]) -> ProbeResults:
        """After something was found that breaks the reference bucket: no bucket can serve."""
        all_unsound = (*self.unsound, *unsound)
        buckets = (replace(b, canonical=b.canonical and not all_unsound) for b in self.buckets)
        return replace(self, unsound=all_unsound, buckets=tuple(buckets))

    def merged(self, other: ProbeResults) -> ProbeResults:
        """Both, where another process has found something since; of what both know, this."""
        if self.unsound or other.unsound or self.kernel_linears != other.kernel_linears:
            return self
        found = self
        for bucket in other.buckets:
            if bucket.rows not in self.sizes:
                found = found.with_bucket(bucket)
        more = {kind.name: kind for kind in other.attention}
        attention = (max(k, more.get(k.name, k), key=_checked) for k in self.attention)
        return replace(
            found,
            tiled=tuple(dict.fromkeys((*self.tiled, *other.tiled))),
            attention=tuple(attention),
            compared=max(self.compared, other.compared),
            routed=max(self.routed, other.routed),
        )

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, found: Any) -> ProbeResults:
        """From what JSON held of ``to_dict``; raises TypeError on anything else."""
        results: ProbeResults = typed(cls, found)
        return results


def _checked(kind: ComparedRows) -> int:
    return kind.checked


def unsound_message(results: ProbeResults) -> str:
    """Why the reference bucket is unsound, and what may help."""
    first = results.unsound[0]
    if first.remedy:
        return f"{first.why}; {first.remedy}"
    return (
        f"{first.why}; with reference_rows={results.reference} a row's bits must not depend on its "
        "place in the pass: try other reference_rows or another dtype"
    )
