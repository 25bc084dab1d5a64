"""Probe results on disk, so that a model is probed once on a machine. Knows files only.

They are stored as they are found, beside what other processes have found.

The key covers everything that the results depend on, which no value of a weight is. A file that is
not as it was written here, or not this user's or root's, is ignored, and so is a folder that cannot
be written; the log says so once.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import stat
from contextlib import suppress
from pathlib import Path
from threading import get_ident

from huggingface_hub import constants

from tinyspec.determinism.code_digest import file_digest
from tinyspec.determinism.probe_results import ProbeResults

FORMAT = 5
# Bytes of a file that is read. Ours have a thousandth of it.
MOST_BYTES = 1 << 26

logger = logging.getLogger("tinyspec")
_said: set[tuple[str, Path]] = set()


def folder() -> Path:
    """Where results are kept: beside the hub's cache."""
    return Path(constants.HF_HOME) / "tinyspec"


def key_of(fingerprint: str, *others: object) -> str:
    """The key of results under ``fingerprint``, ``others`` and the code of this package."""
    rest = json.dumps([FORMAT, file_digest(), *map(repr, others)])
    return f"{fingerprint}-{hashlib.sha256(rest.encode()).hexdigest()[:16]}"


def load(key: str) -> ProbeResults | None:
    """The results stored under ``key``; None if there are none that can be read."""
    path = folder() / f"{key}.json"
    try:
        entry = json.loads(_read(path))
        if entry["format"] != FORMAT or entry["key"] != key:
            raise ValueError("it is of another version or another model")
        if entry["checksum"] != _checksum(entry["results"]):
            raise ValueError("its checksum is not that of its results")
        return ProbeResults.from_dict(entry["results"])
    except (FileNotFoundError, NotADirectoryError):
        return None
    except Exception as error:  # of any bytes at all
        _say_once("are ignored", path, error)
        return None


def store(key: str, results: ProbeResults) -> None:
    """Keep ``results`` under ``key`` beside what is there, if the folder can be written."""
    there = load(key)
    found = (results if there is None else results.merged(there)).to_dict()
    plain = json.loads(json.dumps(found))
    entry = {"format": FORMAT, "key": key, "checksum": _checksum(plain), "results": plain}
    path = folder() / f"{key}.json"
    draft = folder() / f"{key}.{os.getpid()}.{get_ident()}"
    try:
        folder().mkdir(parents=True, exist_ok=True)
        # Renamed when complete: another process reads the old file or the new one.
        try:
            draft.write_text(json.dumps(entry, indent=1) + "\n")
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        _say_once("cannot be written", path, error)


def forget(key: str) -> None:
    """Remove what is stored under ``key``."""
    with suppress(OSError):
        (folder() / f"{key}.json").unlink()


def _read(path: Path) -> bytes:
    """What a file holds. Raises OSError or ValueError where it may not be trusted."""
    # Without waiting for the other end of a pipe.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("it is not a file")
        if found.st_uid not in (os.geteuid(), 0):
            raise ValueError(f"it belongs to user {found.st_uid}")
        if found.st_size > MOST_BYTES:
            raise ValueError(f"it has {found.st_size} bytes")
        with open(handle, "rb", closefd=False) as file:
            return file.read(MOST_BYTES)
    finally:
        os.close(handle)


def _checksum(results: object) -> str:
    return hashlib.sha256(json.dumps(results, sort_keys=True).encode()).hexdigest()


def _say_once(what: str, path: Path, error: Exception) -> None:
    """Once for a file that is read, and once for a folder that is written."""
    place = path if what == "are ignored" else path.parent
    if (what, place) not in _said:
        _said.add((what, place))
        why = f"{type(error).__name__}: {error}"[:200]
        logger.warning("probe results in %s %s, and are found anew: %s", place, what, why)
