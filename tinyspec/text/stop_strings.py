"""Stop strings: which of them has ended a text, and what of the text is not shown then.

They are found in text with special tokens, and completions show text without them. Knows token ids
and a tokenizer; commits nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from tinyspec.sampling_params import SamplingParams
from tinyspec.text.decoding import INCOMPLETE, decode_behind

# Tokens that newest ones are decoded behind: the bytes of a character.
FEW = 4


def reach(stops: Sequence[str]) -> int:
    """How many of the newest tokens a stop string that is new can be in: a token has at least one
    byte."""
    return max(len(stop.encode()) for stop in stops) + 1


def decoded(
    tokenizer: Any, before: list[int], token_ids: list[int], exempt: int
) -> tuple[str, int]:
    """Their text behind the few tokens ``before`` them, and how many of its letters are whole with
    the first ``exempt`` of them."""
    decode = partial(decode_behind, tokenizer, before, special=True)
    early = decode(token_ids[:exempt]) if exempt > 0 else ""
    return decode(token_ids), len(early.rstrip(INCOMPLETE))


def first_stop(text: str, stops: Sequence[str], early: int) -> tuple[str, int] | None:
    """Which of ``stops`` would end ``text`` behind its first ``early`` letters if it came letter by
    letter, and where it begins; of two that end with one letter, the longer. None: none of them."""
    places = ((text.find(stop, max(0, early + 1 - len(stop))), stop) for stop in stops)
    ends = [(place + len(stop), place, stop) for place, stop in places if place >= 0]
    if not ends:
        return None
    _, place, stop = min(ends)
    return stop, place


def hidden(
    tokenizer: Any, token_ids: list[int], begin: int, params: SamplingParams, last: bool
) -> int:
    """How many letters at the end of the text of ``token_ids`` from ``begin`` on are not shown:
    from a stop string on, and if they are not the ``last``, what may be the beginning of one."""
    first = max(begin, len(token_ids) - reach(stops := params.hidden_stops))
    exempt = params.min_new_tokens - (first - begin)
    text, early = decoded(tokenizer, _few(token_ids, first), token_ids[first:], exempt)
    found, count = first_stop(text, stops, early), 0
    if found is not None:
        count = len(text) - found[1]
    elif not last:
        sizes = range(min(len(text), max(map(len, stops)) - 1), 0, -1)
        begins = (n for n in sizes if any(stop.startswith(text[-n:]) for stop in stops))
        count = next(begins, 0)
    return _shown(tokenizer, token_ids, first, count) if count else 0


def _shown(tokenizer: Any, token_ids: list[int], least: int, count: int) -> int:
    """How many of the last ``count`` letters, special tokens included and none of them of tokens
    before ``least``, are text without them."""
    first, whole, behind = len(token_ids), "", 0
    while first > least and len(whole) < count:
        first, behind = first - 1, len(whole)
        whole = decode_behind(tokenizer, _few(token_ids, first), token_ids[first:], special=True)
    few = _few(token_ids, first)
    before, shown = (
        len(decode_behind(tokenizer, few, token_ids[first:end]))
        for end in (first + 1, len(token_ids))
    )
    # Counted from the first one's end: without special tokens its front may have no space.
    return shown - max(0, before - max(0, count - behind))


def _few(token_ids: list[int], first: int) -> list[int]:
    """Those before ``first`` that it is decoded behind."""
    return token_ids[max(0, first - FEW) : first]
