"""What was found out about the buckets: which are canonical, why others are not, what each costs.

Host only: knows neither torch nor how anything was measured.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class BucketResult:
    """One bucket: whether its rows are the reference bucket's, and seconds of a pass.

    broken_by: the modules (one for all of their kind) whose rows differ there; "model" where only
    the model end to end does. tiled: linears that would, if they did not run another way in a
    canonical pass: in tiles of rows, or not by what is quickest. canonical_seconds: of such a pass.
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

    remedy: where another reference bucket would be none.
    """

    name: str
    why: str
    remedy: str = ""


@dataclass(frozen=True)
class Alternative:
    """Other ``reference_rows``, any of which would make ``canonical`` buckets canonical.

    By linears and element-wise ops alone: the model end to end was not tried.
    """

    reference_rows: tuple[int, ...]
    canonical: int


@dataclass(frozen=True)
class ProbeResults:
    """Everything found for one model on one device. kernel_linears: served by the linear kernel
    because without it the reference bucket would be unsound. tiles: name of a kind of linears, and
    the row counts that they may run in tiles of. straight: the same, and the row counts at which
    turned linears need not turn."""

    reference: int
    buckets: tuple[BucketResult, ...]
    unsound: tuple[Unsound, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    kernel_linears: tuple[str, ...] = ()
    tiles: dict[str, tuple[int, ...]] = field(default_factory=dict)
    direct: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def sizes(self) -> list[int]:
        return [fact.rows for fact in self.buckets]

    @property
    def canonical(self) -> list[int]:
        """The canonical buckets; none where the reference bucket is unsound."""
        return [fact.rows for fact in self.buckets if fact.canonical]

    @property
    def seconds(self) -> dict[int, float]:
        """Seconds of a pass by bucket."""
        return {fact.rows: fact.seconds for fact in self.buckets}

    @property
    def tiled(self) -> dict[int, float]:
        """Buckets that are canonical by tiles of rows, and seconds of a canonical pass."""
        found = (fact for fact in self.buckets if fact.canonical and fact.tiled)
        return {fact.rows: fact.canonical_seconds for fact in found}

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> ProbeResults:
        """The inverse of ``to_dict``; raises ValueError, KeyError or TypeError on anything else."""
        return cls(
            reference=int(found["reference"]),
            buckets=tuple(
                BucketResult(
                    rows=int(fact["rows"]),
                    canonical=bool(fact["canonical"]),
                    broken_by=tuple(map(str, fact["broken_by"])),
                    seconds=float(fact["seconds"]),
                    canonical_seconds=float(fact["canonical_seconds"]),
                    tiled=tuple(map(str, fact["tiled"])),
                )
                for fact in found["buckets"]
            ),
            unsound=tuple(Unsound(**entry) for entry in found["unsound"]),
            alternatives=tuple(
                Alternative(tuple(map(int, entry["reference_rows"])), int(entry["canonical"]))
                for entry in found["alternatives"]
            ),
            kernel_linears=tuple(map(str, found["kernel_linears"])),
            tiles=_counts(found["tiles"]),
            direct=_counts(found["direct"]),
        )


def _counts(found: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return {str(name): tuple(map(int, counts)) for name, counts in found.items()}
