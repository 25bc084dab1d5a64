"""What the probes found: which buckets are canonical, why others are not, what each costs; and its
file, so that a model is probed once on a machine.

The key of a file covers everything that the results depend on, which no value of a weight is. A
file that is not as it was written here, or not this user's or root's, is ignored, and so is a
folder that cannot be written; the log says so once. Host only.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import stat
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from threading import get_ident
from typing import Any

from huggingface_hub import constants

import tinyspec

logger = logging.getLogger("tinyspec")
PACKAGE = Path(tinyspec.__file__).parent


@dataclass(frozen=True)
class BucketResult:
    """One bucket: whether its rows have the reference bucket's bits, and seconds of a pass.

    broken_by: the modules (one for all of their kind) whose rows differ there; "model" where only
    the model end to end does. seconds: of the fastest canonical pass that was compared; 0 where
    there was none. tiles: rows of these, by the first name of each kind of linears that runs in
    tiles, or TRANSPOSED. copies: whether prepacked weights had the bits of the weights themselves.
    proof: seconds that the bucket's own proof took.
    """

    rows: int
    canonical: bool
    broken_by: tuple[str, ...]
    seconds: float
    tiles: dict[str, int] = field(default_factory=dict)
    copies: bool = False
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
    """Rows of one function in other places than before, and how many had other bits there; truthy
    if none had."""

    name: str
    checked: int = 0
    differing: int = 0

    def __bool__(self) -> bool:
        return self.differing == 0


@dataclass(frozen=True)
class ProbeResults:
    """What is known so far of one model on one device.

    reference: the reference bucket. buckets: those that are known, in order of size. unsound: empty
    if the reference bucket is sound. kernel_linears: modules that must be served by the linear
    kernel, which makes it so. attention: of each kind of calls.
    confirmed: whether the reference bucket had its second look.
    """

    reference: int
    buckets: tuple[BucketResult, ...]
    unsound: tuple[Unsound, ...] = ()
    kernel_linears: tuple[str, ...] = ()
    attention: tuple[ComparedRows, ...] = ()
    confirmed: bool = False

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
    def copied(self) -> list[int]:
        """Canonical buckets in which prepacked weights have the bits of the weights themselves."""
        return [b.rows for b in self.buckets if b.canonical and b.copies]

    @property
    def tiles(self) -> dict[str, dict[int, int]]:
        """By linear, then by canonical bucket in which it runs in tiles, their rows."""
        found: dict[str, dict[int, int]] = {}
        for bucket in self.buckets:
            for name, height in bucket.tiles.items() if bucket.canonical else ():
                found.setdefault(name, {})[bucket.rows] = height
        return found

    def tile_of(self, name: str, rows: int) -> int:
        """Rows of the largest tile that bucket ``rows`` can be cut into for a linear: a canonical
        bucket in which it ran whole, so that each of its rows has the reference's bits."""
        whole = (b.rows for b in self.buckets if b.canonical and name not in b.tiles)
        return max(n for n in whole if n < rows and rows % n == 0 and n % self.reference == 0)

    @property
    def why_unsound(self) -> str:
        """Why no bucket can serve, and what may help."""
        first = self.unsound[0]
        remedy = first.remedy or (
            f"with reference_rows={self.reference} a row's bits must not depend on its place in "
            "the pass: try other reference_rows or another dtype"
        )
        return f"{first.why}; {remedy}"

    def with_bucket(self, bucket: BucketResult) -> ProbeResults:
        """After one more bucket became known."""
        others = (other for other in self.buckets if other.rows != bucket.rows)
        return replace(self, buckets=tuple(sorted((*others, bucket), key=lambda b: b.rows)))

    def with_unsound(self, unsound: Iterable[Unsound]) -> ProbeResults:
        """After something was found that breaks the reference bucket: no bucket can serve."""
        all_unsound = (*self.unsound, *unsound)
        buckets = (replace(b, canonical=b.canonical and not all_unsound) for b in self.buckets)
        return replace(self, unsound=all_unsound, buckets=tuple(buckets))

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> ProbeResults:
        """From what JSON held of ``asdict``."""
        made = {
            name: tuple(kind(**_with_tuples(part)) for part in found[name])
            for name, kind in _PARTS.items()
        }
        return cls(**{**_with_tuples(found), **made})


_PARTS: dict[str, Any] = {"buckets": BucketResult, "unsound": Unsound, "attention": ComparedRows}


def _with_tuples(found: dict[str, Any]) -> dict[str, Any]:
    """JSON has lists in their place."""
    return {name: tuple(x) if isinstance(x, list) else x for name, x in found.items()}


def key_of(fingerprint: str, *others: object) -> str:
    """The key of results under ``fingerprint``, ``others`` and the code of this package."""
    rest = json.dumps([code_digest(), *map(repr, others)])
    return f"{fingerprint}-{hashlib.sha256(rest.encode()).hexdigest()[:16]}"


@cache
def code_digest(*wings: str, root: Path = PACKAGE) -> str:
    """Digest of the Python files in these wings of the package at ``root``, or in all of it, by
    their paths there and their bytes."""
    digest = hashlib.sha256()
    for path in sorted(path for wing in wings or ("",) for path in (root / wing).rglob("*.py")):
        digest.update(f"{path.relative_to(root).as_posix()}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def load(key: str) -> ProbeResults | None:
    """The results stored under ``key``; None if there are none that can be read."""
    path = _path(key)
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("it is not a file")
        if found.st_uid not in (os.geteuid(), 0):
            raise ValueError(f"it belongs to user {found.st_uid}")
        entry = json.loads(path.read_bytes())
        if entry["key"] != key or entry["checksum"] != _checksum(entry["results"]):
            raise ValueError("its checksum is not that of its results")
        return ProbeResults.from_json(entry["results"])
    except (FileNotFoundError, NotADirectoryError):
        return None
    except Exception as error:  # of any bytes at all
        _warn_once(f"probe results in {path} are ignored", f"{type(error).__name__}: {error}"[:200])
        return None


def store(key: str, results: ProbeResults) -> None:
    """Keep ``results`` under ``key``, if the folder can be written."""
    plain = json.loads(json.dumps(asdict(results)))
    entry = {"key": key, "checksum": _checksum(plain), "results": plain}
    path = _path(key)
    draft = path.with_suffix(f".{os.getpid()}.{get_ident()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Renamed when complete: another process reads the old file or the new one.
        try:
            draft.write_text(json.dumps(entry, indent=1) + "\n")
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        _warn_once(f"probe results cannot be written to {path.parent}", type(error).__name__)


def _path(key: str) -> Path:
    """Beside the hub's cache."""
    return Path(constants.HF_HOME) / "tinyspec" / f"{key}.json"


def _checksum(results: object) -> str:
    return hashlib.sha256(json.dumps(results, sort_keys=True).encode()).hexdigest()


@cache
def _warn_once(what: str, why: str) -> None:
    logger.warning("%s, and are found anew: %s", what, why)
