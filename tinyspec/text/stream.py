"""Text of tokens: of all of them at once, and piece by piece as they come. Knows token ids and a
tokenizer, no requests.
"""

from __future__ import annotations

from typing import Any

from tinyspec.sampling_params import SamplingParams
from tinyspec.text.stop_strings import hidden

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
# Tokens that a piece of text is decoded behind: more of them, in which only few are shown, do not
# change it.
MOST_BEFORE = 64
# Tokens of a character, and those that are held back for one: more of them are none.
MOST_BYTES, MOST_HELD = 4, 16


def decode(tokenizer: Any, token_ids: list[int]) -> str | None:
    """Text of generated tokens without special tokens; None without a tokenizer."""
    if tokenizer is None:
        return None
    return tokenizer.decode(token_ids, skip_special_tokens=True)


def text_of(tokenizer: Any, token_ids: list[int], params: SamplingParams) -> str | None:
    """As a completion of these ``params`` has it: stop strings may be left out."""
    text = decode(tokenizer, token_ids)
    if text and params.hidden_stops:
        text = text[: len(text) - hidden(tokenizer, token_ids, params, last=True)]
    return text


class TextStream:
    """Text of a growing sequence, piece by piece and in whole characters; what is or may be a stop
    string that ``params`` leave out is held back. special: special tokens have a text, too.

    Each piece is decoded together with the last one before it that shows something, because some
    tokenizers decode a token differently at the start of a text.
    """

    def __init__(self, tokenizer: Any, params: SamplingParams | None = None, special: bool = False):
        self._tokenizer, self._params, self._special = tokenizer, params, special
        self._held = self._known = ""
        self._tokens: list[int] = []
        self._before: list[int] = []
        self._piece: list[int] = []

    def push(self, token_ids: list[int], last: bool) -> str | None:
        """The text that these tokens add; ``last`` adds an incomplete character too, and what was
        held back and is no stop string."""
        if self._tokenizer is None:
            return None
        self._piece += token_ids
        piece, known = self._piece, self._known
        text = self._decode(self._before + piece)
        if text.endswith(_INCOMPLETE) and not last:
            if len(piece) < MOST_HELD:
                return ""
            for end in range(-1, -MOST_BYTES, -1):  # the last whole character
                piece = self._piece[:end]
                text = self._decode(self._before + piece)
                if not text.endswith(_INCOMPLETE):
                    break
        rest = self._piece[len(piece) :]
        shows = len(text) > len(known)
        self._before = piece if shows else (self._before + piece)[:MOST_BEFORE]
        self._known = self._decode(self._before)
        self._tokens += piece
        self._piece, text = rest, self._held + text[len(known) :]
        params, held = self._params, 0
        if params is not None and params.hidden_stops:
            held = hidden(self._tokenizer, self._tokens, params, last)
        end = max(0, len(text) - held)
        self._held = text[end:]
        return text[:end]

    def peek(self, token: int) -> str:
        """What ``token`` would add, whole or not."""
        return self._decode([*self._before, *self._piece, token])[len(self._known) :]

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=not self._special))
