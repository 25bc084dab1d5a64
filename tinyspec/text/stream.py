"""Text of tokens: of all of them at once, and piece by piece as they come. Knows token ids and a
tokenizer, no requests.
"""

from __future__ import annotations

from typing import Any

from tinyspec.sampling_params import SamplingParams
from tinyspec.text.decoding import INCOMPLETE, MOST_BEFORE, decode, decode_behind
from tinyspec.text.stop_strings import hidden

# Tokens of a character, and those that are held back for one: more of them are none.
MOST_BYTES, MOST_HELD = 4, 16


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
