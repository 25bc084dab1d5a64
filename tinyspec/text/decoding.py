"""What tokens add to the text of those before them. Knows token ids and a tokenizer."""

from __future__ import annotations

from typing import Any

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
# Tokens that others are decoded behind: more of them, in which only few are shown, change nothing.
MOST_BEFORE = 64


def decode(tokenizer: Any, token_ids: list[int], special: bool = False) -> str:
    """Their text alone. special: with special tokens."""
    return str(tokenizer.decode(token_ids, skip_special_tokens=not special))


def decode_behind(
    tokenizer: Any, before: list[int], token_ids: list[int], special: bool = False
) -> str:
    """The text that ``token_ids`` add to that of ``before``, of which the last few count."""
    before = before[-MOST_BEFORE:]
    known = decode(tokenizer, before, special)
    return added(known, decode(tokenizer, [*before, *token_ids], special))


def added(known: str, text: str) -> str:
    """What ``text`` has behind the one that was ``known``. A character that begins in that and is
    complete here is behind it, one that stays incomplete is not."""
    if text.startswith(known):
        return text[len(known) :]
    differing = (n for n, (a, b) in enumerate(zip(known, text, strict=False)) if a != b)
    return text[next(differing, len(text)) :]
