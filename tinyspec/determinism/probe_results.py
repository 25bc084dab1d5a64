"""What the probes found: which buckets are canonical, why others are not, what each costs.

Host only: knows neither torch nor how anything was measured.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class BucketResult:
    """One bucket: whether its rows have the reference bucket's bits, and seconds of a pass.

    broken_by: the modules (one for all of their kind) whose rows differ there; "model" where only
    the model end to end does. tiled: linears that a canonical pass runs in another way than fast
    mode does, in tiles of rows for example. canonical_seconds: of such a pass.
    """

    rows: int
    canonical: bool
    broken_by: tuple[str, ...]
    seconds: float
    canonical_seconds: float
    tiled: tuple[str, ...] = ()


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


@dataclass(frozen=True)
class ProbeResults:
    """Everything found for one model on one device.

    kernel_linears: those that the linear kernel serves because the reference bucket would be
    unsound without it. tiles: first name of a kind of linears, and the row counts of its tiles.
    direct: first name of a kind of transposed linears, and the buckets of the direct product.
    attention: how many rows of each kind were compared.
    """

    reference: int
    buckets: tuple[BucketResult, ...]
    unsound: tuple[Unsound, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    kernel_linears: tuple[str, ...] = ()
    tiles: dict[str, tuple[int, ...]] = field(default_factory=dict)
    direct: dict[str, tuple[int, ...]] = field(default_factory=dict)
    attention: tuple[ComparedRows, ...] = ()

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

    def with_attention(
        self, attention: Iterable[ComparedRows], unsound: Iterable[Unsound]
    ) -> ProbeResults:
        """After more rows of attention were compared; ``unsound`` where some of them differed."""
        all_unsound = (*self.unsound, *unsound)
        buckets = (replace(b, canonical=b.canonical and not all_unsound) for b in self.buckets)
        return replace(
            self, attention=tuple(attention), unsound=all_unsound, buckets=tuple(buckets)
        )

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> ProbeResults:
        """The inverse of ``to_dict``; raises KeyError or TypeError on anything else."""
        found = _tuples(found)
        return cls(
            reference=found["reference"],
            buckets=tuple(BucketResult(**entry) for entry in found["buckets"]),
            unsound=tuple(Unsound(**entry) for entry in found["unsound"]),
            alternatives=tuple(Alternative(**entry) for entry in found["alternatives"]),
            kernel_linears=found["kernel_linears"],
            tiles=found["tiles"],
            direct=found["direct"],
            attention=tuple(ComparedRows(**entry) for entry in found["attention"]),
        )


def _tuples(value: Any) -> Any:
    """``value`` with tuples for lists: JSON has no tuples."""
    if isinstance(value, dict):
        return {name: _tuples(entry) for name, entry in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
