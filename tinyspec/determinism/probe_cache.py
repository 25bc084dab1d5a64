"""Facts on disk, so that a model is probed once on a machine. Knows files, not what is in them.

A file is taken only if everything that its facts depend on is as it was: that is the key. Whatever
else lies there is ignored, and so is a folder that cannot be written.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path

from huggingface_hub import constants

from tinyspec.determinism.code_digest import file_digest
from tinyspec.determinism.probe_results import ProbeResults

FORMAT = 1


def folder() -> Path:
    """Where facts are kept: beside the hub's cache."""
    return Path(constants.HF_HOME) / "tinyspec"


def key_of(fingerprint: str, *others: object) -> str:
    """The key of facts under ``fingerprint`` and whatever else they depend on."""
    rest = json.dumps([FORMAT, file_digest(), *map(repr, others)])
    return f"{fingerprint}-{hashlib.sha256(rest.encode()).hexdigest()[:16]}"


def load(key: str) -> ProbeResults | None:
    """The facts stored under ``key``; None if there are none that can be read."""
    try:
        found = json.loads((folder() / f"{key}.json").read_text())
        if found["format"] == FORMAT and found["key"] == key:
            return ProbeResults.from_dict(found["facts"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None


def store(key: str, facts: ProbeResults) -> None:
    """Keep ``facts`` under ``key``, if the folder can be written."""
    entry = {"format": FORMAT, "key": key, "facts": facts.to_dict()}
    with suppress(OSError):
        folder().mkdir(parents=True, exist_ok=True)
        # A reader sees the old file or the new one, never half of it.
        draft = folder() / f"{key}.{os.getpid()}"
        draft.write_text(json.dumps(entry, indent=1) + "\n")
        draft.replace(folder() / f"{key}.json")
