"""Tokens as text: what they add to the text of those before them, stop strings, and completions
piece by piece as they come. Knows token ids and a tokenizer; commits nothing.

Stop strings are found in text with special tokens, and completions show text without them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

from tinyspec.sampling_params import SamplingParams

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
# Tokens that others are decoded behind: more of them, in which only few are shown, change nothing.
MOST_BEFORE = 64
# Tokens that newest ones are decoded behind: the bytes of a character.
FEW = 4
# Tokens of a character, and those that are held back for one: more of them are none.
MOST_BYTES, MOST_HELD = 4, 16
# A byte as a token's name has it: in byte fallback, and at byte level, where those that cannot be
# printed have letters from 256 on (GPT-2's).
FALLBACK = re.compile("<0x([0-9A-F]{2})>")
PRINTED = [*range(33, 127), *range(161, 173), *range(174, 256)]
OTHERS = enumerate((byte for byte in range(256) if byte not in PRINTED), start=256)
BYTES = {**{chr(byte): byte for byte in PRINTED}, **{chr(n): byte for n, byte in OTHERS}}


def decode(tokenizer: Any, token_ids: list[int], special: bool = False) -> str:
    """Their text alone. special: with special tokens."""
    return str(tokenizer.decode(token_ids, skip_special_tokens=not special))


def decode_behind(
    tokenizer: Any,
    before: list[int],
    token_ids: list[int],
    special: bool = False,
    known: str | None = None,
) -> str:
    """The text that ``token_ids`` add to that of ``before``, of which the last few count; known:
    its text. A character that begins there and is complete now is added, one that stays incomplete
    is not."""
    before = before[-MOST_BEFORE:]
    known = decode(tokenizer, before, special) if known is None else known
    text = decode(tokenizer, [*before, *token_ids], special)
    if text.startswith(known):
        return text[len(known) :]
    if not known.endswith(INCOMPLETE):  # bytes of no character have taken others with them
        return decode(tokenizer, token_ids, special)
    differing = (n for n, (a, b) in enumerate(zip(known, text, strict=False)) if a != b)
    return text[next(differing, len(text)) :]


def bytes_of(tokenizer: Any, token: int) -> bytes | None:
    """Those of a token that is part of a character, by its name; None where that tells none."""
    name = str(tokenizer.convert_ids_to_tokens(token))
    if (found := FALLBACK.fullmatch(name)) is not None:
        return bytes([int(found[1], 16)])
    return bytes(map(BYTES.__getitem__, name)) if {*name} <= BYTES.keys() else None


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


def text_of(
    tokenizer: Any, prompt: list[int], token_ids: list[int], params: SamplingParams
) -> str | None:
    """Of a completion of ``prompt`` with these ``params``: stop strings may be left out. None
    without a tokenizer."""
    return TextStream(tokenizer, params, prompt).push(token_ids, last=True)


class TextStream:
    """Text of a sequence that grows behind ``prompt``, piece by piece and in whole characters; what
    is or may be a stop string that ``params`` leave out is held back. special: special tokens have
    a text, too.

    Each piece is decoded together with the last one before it that shows something, because some
    tokenizers decode a token differently at the start of a text.
    """

    def __init__(
        self,
        tokenizer: Any,
        params: SamplingParams | None = None,
        prompt: list[int] | None = None,
        special: bool = False,
    ):
        self._tokenizer, self._params, self._special = tokenizer, params, special
        self._before = (prompt or [])[-MOST_BEFORE:]
        self._known = self._decode(self._before) if tokenizer and self._before else ""
        self._held, self._tokens = "", [*self._before]
        self._num_before = len(self._before)
        self._piece: list[int] = []

    def push(self, token_ids: list[int], last: bool) -> str | None:
        """The text that these tokens add; ``last`` adds an incomplete character too, and what was
        held back and is no stop string."""
        if self._tokenizer is None:
            return None
        piece = [*self._piece, *token_ids]
        text = self._added(piece)
        if len(token_ids) > 1 and INCOMPLETE in text:  # bytes of none take others with them
            pieces = [self.push([token], last=False) or "" for token in token_ids]
            return "".join(pieces) + ((self.push([], last=True) or "") if last else "")
        self._piece = piece
        if text.endswith(INCOMPLETE) and not last:
            if len(piece) < MOST_HELD:
                return ""
            for end in range(-1, -MOST_BYTES, -1):  # the last whole character
                piece = self._piece[:end]
                text = self._added(piece)
                if not text.endswith(INCOMPLETE):
                    break
        rest, whole = self._piece[len(piece) :], self._before + piece
        self._before = piece if text else whole[:MOST_BEFORE]
        self._known = self._decode(self._before)
        if text and self._known.startswith(INCOMPLETE):  # it begins within a character
            self._before = whole[-MOST_BEFORE:]
            self._known = self._decode(self._before)
        self._tokens += piece
        self._piece, text = rest, self._held + text
        params, held = self._params, 0
        if params is not None and params.hidden_stops:
            held = hidden(self._tokenizer, self._tokens, self._num_before, params, last)
        end = max(0, len(text) - held)
        self._held = text[end:]
        return text[:end]

    def peek(self, token: int) -> str:
        """What ``token`` would add, whole or not."""
        return self._added([*self._piece, token])

    def _added(self, token_ids: list[int]) -> str:
        given = self._tokenizer, self._before, token_ids, self._special, self._known
        return decode_behind(*given)

    def _decode(self, token_ids: list[int]) -> str:
        return decode(self._tokenizer, token_ids, self._special)
