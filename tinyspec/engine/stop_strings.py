"""Stop strings: which of them has ended a text.

Knows texts; commits nothing.
"""

from __future__ import annotations

from collections.abc import Sequence


def first_stop(text: str, stops: Sequence[str]) -> str | None:
    """Which of ``stops`` would end ``text`` if it came letter by letter; of two that end with one
    letter, the longer. None: none of them."""
    ends = [(place + len(stop), place, stop) for stop in stops if (place := text.find(stop)) >= 0]
    return min(ends)[2] if ends else None
