"""What the probes found: which buckets are canonical, why others are not, what each costs.

Before the first deterministic token the reference bucket is known, and the others one by one while
requests run. Host only: knows neither torch nor how anything was measured.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tinyspec.determinism.typed import typed
from tinyspec.scheduler.buckets import between


@dataclass(frozen=True)
class BucketResult:
    """One bucket: whether its rows have the reference bucket's bits, and seconds of a pass.

    broken_by: the modules (one for all of their kind) whose rows differ there; "model" where only
    the model end to end does. tiled: linears that a canonical pass runs in another way than fast
    mode does, in tiles of rows for example. canonical_seconds: of such a pass. Seconds are 0 where
    none were measured. timed: at how many moments they were.
    """

    rows: int
    canonical: bool
    broken_by: tuple[str, ...]
    seconds: float
    canonical_seconds: float
    tiled: tuple[str, ...] = ()
    timed: int = 0


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
class Alternative:
    """Other ``reference_rows``, each of which would make ``canonical`` buckets canonical, judged by
    linears and element-wise modules alone."""

    reference_rows: tuple[int, ...]
    canonical: int


# Of a bucket: 0 as the reference bucket, None where a row's place or neighbours change its bits.
# Others are equal where rows have the same bits, but for OTHER, which tells only that 0 is wrong.
Labels = dict[int, int | None]
OTHER = -1


@dataclass(frozen=True)
class ProbeResults:
    """What is known so far of one model on one device.

    buckets: those that are known, the reference bucket first of all. kernel_linears: those that the
    linear kernel serves because the reference bucket would be unsound without it. tiles: first name
    of a kind of linears, and the row counts of its tiles. swapped: likewise, and the buckets in
    which its operands are swapped. attention: how many rows of each kind were compared. labels: by
    function of rows (linear or element-wise module) and bucket. compared: passes of the reference
    bucket that were compared end to end. routed: most rows of a pass whose matmuls were found not
    to depend on values. costs: whether the reference bucket's are measured.
    """

    reference: int
    buckets: tuple[BucketResult, ...]
    unsound: tuple[Unsound, ...] = ()
    kernel_linears: tuple[str, ...] = ()
    tiles: dict[str, tuple[int, ...]] = field(default_factory=dict)
    swapped: dict[str, tuple[int, ...]] = field(default_factory=dict)
    attention: tuple[ComparedRows, ...] = ()
    labels: dict[str, Labels] = field(default_factory=dict)
    compared: int = 0
    routed: int = 0
    costs: bool = False

    @property
    def sizes(self) -> list[int]:
        return [bucket.rows for bucket in self.buckets]

    @property
    def canonical(self) -> list[int]:
        """The canonical buckets; none where the reference bucket is unsound."""
        return [bucket.rows for bucket in self.buckets if bucket.canonical]

    @property
    def seconds(self) -> dict[int, float]:
        """Seconds of a pass by bucket."""
        return {bucket.rows: bucket.seconds for bucket in self.buckets}

    @property
    def tiled(self) -> dict[int, float]:
        """Buckets that are canonical by tiles of rows, and seconds of a canonical pass."""
        found = (bucket for bucket in self.buckets if bucket.canonical and bucket.tiled)
        return {bucket.rows: bucket.canonical_seconds for bucket in found}

    @property
    def alternatives(self) -> tuple[Alternative, ...]:
        """Groups of probed buckets that agree in every function, larger than that of the reference
        bucket."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for rows in sorted({rows for own in self.labels.values() for rows in own}):
            labels = [own.get(rows) for own in self.labels.values()]
            known = tuple(label for label in labels if label is not None and label != OTHER)
            if len(known) == len(labels):
                groups.setdefault(known, []).append(rows)
        found = [
            Alternative(tuple(rows for rows in members if rows >= 4), len(members))
            for members in groups.values()
            if len(members) > len(self.canonical) and self.reference not in members
        ]
        usable = (a for a in found if a.reference_rows)
        return tuple(sorted(usable, key=lambda a: -a.canonical))

    def filled(self) -> ProbeResults:
        """With seconds between those measured for the buckets without any."""
        costs = {b.rows: b.seconds for b in self.buckets if b.seconds}
        own_way = {b.rows: b.canonical_seconds for b in self.buckets if b.tiled and b.seconds}
        buckets = []
        for bucket in self.buckets:
            if costs and not bucket.seconds:
                seconds = between(costs, bucket.rows)
                own = between(own_way, bucket.rows) if bucket.tiled and own_way else seconds
                bucket = replace(bucket, seconds=seconds, canonical_seconds=own)
            buckets.append(bucket)
        return replace(self, buckets=tuple(buckets))

    def known(self, name: str, rows: int) -> bool:
        """Whether the function of rows of this name was probed in bucket ``rows``."""
        return rows in self.labels[name]

    def differing(self, rows: int) -> list[str]:
        """The functions of rows that have other bits in bucket ``rows``, where all were probed."""
        return [name for name, own in self.labels.items() if own[rows] != 0]

    def with_labels(self, name: str, labels: Labels, swapped: Iterable[int]) -> ProbeResults:
        """After a function of rows was probed in more buckets."""
        both = {**self.labels[name], **labels}
        rows = sorted({*self.swapped.get(name, ()), *swapped})
        return replace(
            self,
            labels={**self.labels, name: dict(sorted(both.items()))},
            swapped=self.swapped | ({name: tuple(rows)} if rows else {}),
        )

    def with_bucket(self, bucket: BucketResult) -> ProbeResults:
        """After one more bucket became known, or its costs did."""
        others = (other for other in self.buckets if other.rows != bucket.rows)
        return replace(self, buckets=tuple(sorted((*others, bucket), key=lambda b: b.rows)))

    def with_unsound(self, unsound: Iterable[Unsound]) -> ProbeResults:
        """After something was found that breaks the reference bucket: no bucket can serve."""
        all_unsound = (*self.unsound, *unsound)
        buckets = (replace(b, canonical=b.canonical and not all_unsound) for b in self.buckets)
        return replace(self, unsound=all_unsound, buckets=tuple(buckets))

    def with_attention(
        self, attention: Iterable[ComparedRows], unsound: Iterable[Unsound]
    ) -> ProbeResults:
        """After more rows of attention were compared; ``unsound`` where some of them differed."""
        return replace(self, attention=tuple(attention)).with_unsound(unsound)

    def merged(self, other: ProbeResults) -> ProbeResults:
        """Both, where another process has found something since; of what both know, this, but of
        costs what was measured more often."""
        if self.unsound or other.unsound or self.labels.keys() != other.labels.keys():
            return self
        found = self
        for name, labels in other.labels.items():
            new = {rows: label for rows, label in labels.items() if not self.known(name, rows)}
            swapped = [rows for rows in other.swapped.get(name, ()) if rows in new]
            found = found.with_labels(name, new, swapped)
        mine = {bucket.rows: bucket for bucket in self.buckets}
        for bucket in other.buckets:
            own = mine.get(bucket.rows, bucket)
            if bucket.timed > own.timed:
                costs = ("seconds", "canonical_seconds", "timed")
                own = replace(own, **{name: getattr(bucket, name) for name in costs})
            found = found.with_bucket(own)
        more = {kind.name: kind for kind in other.attention}
        attention = (max(kind, more[kind.name], key=_checked) for kind in self.attention)
        return replace(
            found,
            tiles=other.tiles | self.tiles,
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
    others = [rows for a in results.alternatives for rows in a.reference_rows][:3]
    hint = f" ({', '.join(map(str, others))} may work)" if others else ""
    return (
        f"{first.why}; with reference_rows={results.reference} a row's bits must not depend on its "
        f"place in the pass: try other reference_rows{hint} or another dtype"
    )
