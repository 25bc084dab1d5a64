"""Text and tokens: prompts in every accepted form, streamed text, stop strings."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tinyspec.errors import refuse
from tinyspec.scalars import is_array, plain, plain_list

Prompt = str | list[int] | list[dict[str, Any]]
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


def as_prompts(prompts: Any) -> list[Prompt]:
    """A list of prompts, from one prompt or several: a str, token ids, chat messages, or what a
    tokenizer returned; token ids may be tensors or arrays, one prompt a row."""
    if isinstance(prompts, str):
        return [prompts]
    if (rows := _rows(prompts)) is not None:
        return rows
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise refuse("prompts", prompts, "a str, token ids, chat messages, or a list of these")
    if prompts and (isinstance(plain(prompts[0]), int) or _is_message(prompts[0])):
        return [list(prompts)]
    return list(prompts)


def _is_message(value: Any) -> bool:
    """Whether it is a message of a chat."""
    return isinstance(value, dict) and "input_ids" not in value


def _rows(prompts: Any) -> list[Prompt] | None:
    """Token ids of each prompt of a tensor, an array or what a tokenizer returned, without padding;
    None for anything else."""
    if not isinstance(prompts, Mapping):
        return _lists("prompts", prompts) if is_array(prompts) else None
    if "input_ids" not in prompts:
        raise refuse("prompts", prompts, "input_ids, as a tokenizer returns them")
    rows = _lists("input_ids", prompts["input_ids"])
    if (mask := prompts.get("attention_mask")) is None:
        return rows
    masks = _lists("attention_mask", mask)
    if [len(row) for row in rows] != [len(row) for row in masks]:
        raise refuse("attention_mask", mask, "of the shape of input_ids")
    return [_unpadded(row, own) for row, own in zip(rows, masks, strict=True)]


def _lists(field: str, values: Any) -> list[Any]:
    """A list for each row of ``values``, one row or several."""
    rows = plain_list(values)
    if rows and isinstance(rows[0], Iterable):
        rows = [plain_list(row) for row in rows]
        if not any(row and isinstance(row[0], list) for row in rows):
            return rows
        raise refuse(field, values, "one or two dimensions")
    return [rows]


def _unpadded(row: list[int], mask: list[int]) -> list[int]:
    """The tokens of ``row`` whose ``mask`` is not 0, which are side by side."""
    there = [place for place, kept in enumerate(mask) if kept]
    if there and there[-1] - there[0] != len(there) - 1:
        raise refuse("attention_mask", mask, "0 before and after the prompt alone")
    return [row[place] for place in there]


def to_token_ids(prompt: Any, tokenizer: Any) -> list[int]:
    """Token ids of one prompt. Raises ValueError where that needs a tokenizer and there is none."""
    if (rows := None if isinstance(prompt, str) else _rows(prompt)) is not None:
        if len(rows) != 1:
            raise refuse("prompt", prompt, "one prompt")
        return rows[0]  # type: ignore[return-value]
    if not isinstance(prompt, (str, Sequence)) or isinstance(prompt, bytes):
        raise refuse("prompt", prompt, "a str, token ids, or chat messages")
    text = isinstance(prompt, str)
    if not text and not (prompt and isinstance(prompt[0], dict)):
        return plain_list(prompt)
    if tokenizer is None:
        raise refuse("prompt", prompt, "token ids, as the engine has no tokenizer")
    if isinstance(prompt, str):
        return list(tokenizer(sound("prompt", prompt))["input_ids"])
    if not getattr(tokenizer, "chat_template", None):
        raise refuse("prompt", prompt, "text or token ids, as the tokenizer has no chat template")
    chat = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(sound("prompt", chat), add_special_tokens=False)["input_ids"])


def sound(field: str, text: str) -> str:
    """``text``. Raises ValueError where half of a surrogate pair stands alone: it is no character,
    and no tokenizer takes it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = text[error.start]
        raise refuse(f"{field}[{error.start}]", found, "no lone surrogates in text") from None
    return text


def continuation_ids(text: Prompt, tokenizer: Any) -> list[int]:
    """Token ids of a text that continues another, without special tokens."""
    if isinstance(text, str):
        if tokenizer is None:
            raise refuse("continuation", text, "token ids, as the engine has no tokenizer")
        return list(tokenizer(sound("continuation", text), add_special_tokens=False)["input_ids"])
    return to_token_ids(text, None)


def decode(tokenizer: Any, token_ids: list[int]) -> str | None:
    """Text of generated tokens without special tokens; None without a tokenizer."""
    if tokenizer is None:
        return None
    return tokenizer.decode(token_ids, skip_special_tokens=True)


def text_digest(tokenizer: Any, vocab_size: int) -> str:
    """Digest of what stop strings see: the text of every token, alone and after the others.

    Bytes of one character have the same text alone, and settings may enter the text of several
    tokens only: so vocabulary, class, decoder and clean-up count as well, where there are any.
    """

    def text(token_ids: list[int]) -> str:
        try:
            return str(tokenizer.decode(token_ids, skip_special_tokens=False))
        except Exception as error:  # of an id beyond the tokenizer's
            return type(error).__name__

    kind, ids = type(tokenizer), list(range(vocab_size))
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    cleans_up = getattr(tokenizer, "clean_up_tokenization_spaces", None)
    tokens = sorted(tokenizer.get_vocab().items()) if hasattr(tokenizer, "get_vocab") else None
    found = (kind.__module__, kind.__qualname__, repr(decoder), cleans_up, tokens)
    texts = [text(ids), *(text([token]) for token in ids)]
    return hashlib.sha256(repr((found, texts)).encode()).hexdigest()


class TextStream:
    """Text of a growing sequence, piece by piece and in whole characters.

    Each piece is decoded together with the one before it, because some tokenizers decode a token
    differently at the start of a text.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._start = 0
        self._end = 0

    def push(self, token_ids: list[int], last: bool) -> str | None:
        """The text that these tokens add; ``last`` adds an incomplete character too."""
        if self._tokenizer is None:
            return None
        self._tokens += token_ids
        known = decode(self._tokenizer, self._tokens[self._start : self._end]) or ""
        text = decode(self._tokenizer, self._tokens[self._start :]) or ""
        if text.endswith(_INCOMPLETE) and not last:
            return ""
        self._start, self._end = self._end, len(self._tokens)
        return text[len(known) :]


def ends_in_stop_string(tokenizer: Any, generated: list[int], stops: Sequence[str]) -> bool:
    """Whether the newest of the ``generated`` tokens completes one of ``stops``."""
    # A token has at least one byte, so the match begins in these last tokens.
    reach = max(len(stop.encode()) for stop in stops) + 1
    text = tokenizer.decode(generated[-reach:], skip_special_tokens=False)
    return any(stop in text for stop in stops)
