"""Probe results on disk, so that a model is probed once on a machine. Knows files only.

They are stored as they are found, beside what other processes have found.

The key covers everything that the results depend on, which no value of a weight is. A file that
cannot be read is ignored, and so is a folder that cannot be written.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from contextlib import suppress
from pathlib import Path

from huggingface_hub import constants

from tinyspec.determinism.code_digest import file_digest
from tinyspec.determinism.probe_results import ProbeResults

FORMAT = 3
# Seconds between two times that results are stored while they grow.
EVERY = 1.0


def folder() -> Path:
    """Where results are kept: beside the hub's cache."""
    return Path(constants.HF_HOME) / "tinyspec"


def key_of(fingerprint: str, *others: object) -> str:
    """The key of results under ``fingerprint``, ``others`` and the code of this package."""
    rest = json.dumps([FORMAT, file_digest(), *map(repr, others)])
    return f"{fingerprint}-{hashlib.sha256(rest.encode()).hexdigest()[:16]}"


def load(key: str) -> ProbeResults | None:
    """The results stored under ``key``; None if there are none that can be read."""
    try:
        entry = json.loads((folder() / f"{key}.json").read_text())
        if entry["format"] == FORMAT and entry["key"] == key:
            return ProbeResults.from_dict(entry["results"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None


def store(key: str, results: ProbeResults) -> None:
    """Keep ``results`` under ``key`` beside what is there, if the folder can be written."""
    there = load(key)
    results = results if there is None else results.merged(there)
    entry = {"format": FORMAT, "key": key, "results": results.to_dict()}
    with suppress(OSError):
        folder().mkdir(parents=True, exist_ok=True)
        # Renamed when complete: another process reads the old file or the new one.
        draft = folder() / f"{key}.{os.getpid()}"
        draft.write_text(json.dumps(entry, indent=1) + "\n")
        draft.replace(folder() / f"{key}.json")


def forget(key: str) -> None:
    """Remove what is stored under ``key``."""
    with suppress(OSError):
        (folder() / f"{key}.json").unlink()


class Growing:
    """Results of one key that grow: stored about once a second, and when they are ``saved``."""

    def __init__(self, key: str):
        self.key = key
        self._stored: ProbeResults | None = None
        self._at = -EVERY

    def keep(self, results: ProbeResults) -> None:
        """Store ``results`` unless others were stored a moment ago."""
        if time.monotonic() - self._at >= EVERY:
            self.save(results)

    def save(self, results: ProbeResults) -> None:
        """Store ``results``, if they are not stored."""
        if results is not self._stored:
            store(self.key, results)
            self._stored, self._at = results, time.monotonic()
