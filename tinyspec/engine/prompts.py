"""Prompts in every form, as token ids: text, chat messages, tensors, what a tokenizer returns.

Knows no model: whether ids are of its vocabulary, and fit, is checked by the input processor.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tinyspec.errors import refuse
from tinyspec.scalars import is_array, plain, plain_list

logger = logging.getLogger("tinyspec")
Prompt = str | list[int] | list[dict[str, Any]] | Mapping[str, Any]
# What a conversation is made of; what of ``apply_chat_template`` its keyword arguments cannot set.
CHAT = ("messages", "tools", "chat_template_kwargs")
OURS = {"chat_template", "conversation", "messages", "padding", "tokenize", "tools", "truncation"}
OURS |= {"max_length", "return_assistant_tokens_mask", "return_dict", "return_tensors"}
OURS |= {"tokenizer_kwargs"}


def as_prompts(prompts: Any) -> list[Prompt]:
    """A list of prompts, from one prompt or several: a str, token ids, chat messages (also as a
    mapping of ``messages`` and, if wanted, ``tools`` and ``chat_template_kwargs``), or what a
    tokenizer returned; token ids may be tensors or arrays, one prompt a row."""
    if isinstance(prompts, str) or _is_chat(prompts):
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
    return isinstance(value, dict) and "input_ids" not in value and not _is_chat(value)


def _is_chat(value: Any) -> bool:
    """Whether it is a chat with more than its messages."""
    return isinstance(value, Mapping) and "messages" in value


def _rows(prompts: Any) -> list[Prompt] | None:
    """Token ids of each prompt of a tensor, an array or what a tokenizer returned, without padding;
    None for anything else."""
    if not isinstance(prompts, Mapping):
        return _lists("prompts", prompts) if is_array(prompts) else None
    if "input_ids" not in prompts:
        raise refuse("prompts", prompts, "messages, or input_ids as a tokenizer returns them")
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


def to_token_ids(prompt: Any, tokenizer: Any, field: str = "prompt") -> list[int]:
    """Token ids of one prompt, which errors call ``field``. Raises ValueError where that needs a
    tokenizer and there is none."""
    chat = prompt if _is_chat(prompt) else None
    if chat is None and not isinstance(prompt, str):
        if (rows := _rows(prompt)) is not None:
            if len(rows) != 1:
                raise refuse(field, prompt, "one prompt")
            return rows[0]  # type: ignore[return-value]
        if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
            raise refuse(field, prompt, "a str, token ids, or chat messages")
        if not (prompt and isinstance(prompt[0], dict)):
            return plain_list(prompt)
        chat = {"messages": prompt}
    if tokenizer is None:
        raise refuse(field, prompt, "token ids, as the engine has no tokenizer")
    if chat is None:
        return _text_ids("prompt", prompt, tokenizer)
    return _text_ids("prompt", _as_text(chat, tokenizer), tokenizer, add_special_tokens=False)


def _as_text(chat: Mapping[str, Any], tokenizer: Any) -> str:
    """A chat by the tokenizer's template. Raises ValueError naming what that does not take."""
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        raise refuse("prompt", chat, "text or token ids, as the tokenizer has no chat template")
    for name in chat.keys() - {*CHAT}:
        raise refuse(name, chat[name], f"one of {', '.join(CHAT)} beside the messages of a prompt")
    messages, tools, settings = (chat.get(name) for name in CHAT)
    if not isinstance(messages, (list, tuple)) or not messages:
        raise refuse("messages", messages, "a list of at least one message")
    if not isinstance(tools, (list, tuple, type(None))) or (tools and "tools" not in str(template)):
        raise refuse("tools", tools, "a list, and None where the chat template has none")
    if not isinstance(settings, (Mapping, type(None))) or OURS & {*(settings or ())}:
        allowed = f"a mapping of the template's own names, none of {sorted(OURS)}"
        raise refuse("chat_template_kwargs", settings, allowed)
    told = [_with_text(message) for message in messages]
    settings = {"tokenize": False, "add_generation_prompt": True, **(settings or {})}
    try:
        return str(tokenizer.apply_chat_template(told, tools=tools or None, **settings))
    except Exception as error:  # a template raises any
        allowed = f"messages that the chat template takes ({type(error).__name__}: {error})"
        raise refuse("messages", messages, allowed) from error


def _with_text(message: Any) -> Any:
    """A message of a chat whose content, if it is in parts as OpenAI has them, is their text."""
    parts = message.get("content") if isinstance(message, dict) else None
    if not isinstance(parts, (list, tuple)):
        return message
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or "text" not in part:
            raise refuse("content", part, '{"type": "text", "text": ...} in a message')
    return {**message, "content": "".join(part["text"] for part in parts)}


def _text_ids(field: str, text: str, tokenizer: Any, **settings: Any) -> list[int]:
    """Token ids of a text; a warning counts what the tokenizer does not know. Raises ValueError
    where half of a surrogate pair stands alone, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise refuse(f"{field}[{e.start}]", text[e.start], "no lone surrogates in text") from None
    ids = list(tokenizer(text, **settings)["input_ids"])
    unknown = getattr(tokenizer, "unk_token_id", None)
    if unknown in ids:
        # It may be the end token as well, put around every text or written on purpose.
        usual = list(tokenizer("", **settings)["input_ids"]).count(unknown)
        count = ids.count(unknown) - usual - text.count(tokenizer.unk_token)
        if count > 0:
            logger.warning("%s: %d tokens are unknown to the tokenizer", field, count)
    return ids


def continuation_ids(text: Prompt, tokenizer: Any) -> list[int]:
    """Token ids of a text that continues another, without special tokens."""
    if isinstance(text, str):
        if tokenizer is None:
            raise refuse("continuation", text, "token ids, as the engine has no tokenizer")
        return _text_ids("continuation", text, tokenizer, add_special_tokens=False)
    return to_token_ids(text, None, "continuation")
