"""What tokens add to the text of those before them. Knows token ids and a tokenizer."""

from __future__ import annotations

import re
from typing import Any

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
# Tokens that others are decoded behind: more of them, in which only few are shown, change nothing.
MOST_BEFORE = 64
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
