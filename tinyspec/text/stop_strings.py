"""Stop strings: which of them has ended a text, and what of the text is not shown then.

They are found in text with special tokens, and completions show text without them. Knows token ids
and a tokenizer; commits nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tinyspec.sampling_params import SamplingParams


def reach(stops: Sequence[str]) -> int:
    """How many of the newest tokens a stop string that is new can be in: a token has at least one
    byte."""
    return max(len(stop.encode()) for stop in stops) + 1


def decoded(tokenizer: Any, token_ids: list[int], exempt: int) -> tuple[str, int]:
    """Their text, and how many of its letters are whole with the first ``exempt`` of them."""
    text = tokenizer.decode(token_ids, skip_special_tokens=False)
    early = tokenizer.decode(token_ids[:exempt], skip_special_tokens=False) if exempt > 0 else ""
    return text, len(early.rstrip("\N{REPLACEMENT CHARACTER}"))


def first_stop(text: str, stops: Sequence[str], early: int) -> tuple[str, int] | None:
    """Which of ``stops`` would end ``text`` behind its first ``early`` letters if it came letter by
    letter, and where it begins; of two that end with one letter, the longer. None: none of them."""
    places = ((text.find(stop, max(0, early + 1 - len(stop))), stop) for stop in stops)
    ends = [(place + len(stop), place, stop) for place, stop in places if place >= 0]
    if not ends:
        return None
    _, place, stop = min(ends)
    return stop, place


def hidden(tokenizer: Any, token_ids: list[int], params: SamplingParams, last: bool) -> int:
    """How many letters at the end of the text of ``token_ids`` are not shown: from a stop string
    on, and if they are not the ``last``, what may be the beginning of one."""
    newest = token_ids[-reach(stops := params.hidden_stops) :]
    exempt = params.min_new_tokens - len(token_ids) + len(newest)
    text, early = decoded(tokenizer, newest, exempt)
    found, count = first_stop(text, stops, early), 0
    if found is not None:
        count = len(text) - found[1]
    elif not last:
        sizes = range(min(len(text), max(map(len, stops)) - 1), 0, -1)
        begins = (n for n in sizes if any(stop.startswith(text[-n:]) for stop in stops))
        count = next(begins, 0)
    return _shown(tokenizer, newest, count) if count else 0


def _shown(tokenizer: Any, token_ids: list[int], count: int) -> int:
    """How many of the last ``count`` letters, special tokens included, are text without them."""
    first, whole = len(token_ids), ""
    while first > 0 and len(whole) < count:
        first -= 1
        whole = tokenizer.decode(token_ids[first:], skip_special_tokens=False)
    before, shown = (
        len(tokenizer.decode(token_ids[first:end], skip_special_tokens=True))
        for end in (first + 1, len(token_ids))
    )
    return shown - min(len(whole) - count, before)
