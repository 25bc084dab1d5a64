"""What an OpenAI-compatible server answered, streamed or not, and where two answers differ.

Knows no HTTP and no model. Numbers with a point stay the digits that were sent.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

# Where servers put text: completions, chat, and two names for reasoning.
TEXTS = ("text", "content", "reasoning", "reasoning_content")
COMPARED = ("text", "token_ids", "logprobs", "finish_reason")
# Characters shown on each side of a difference.
AROUND = 24


@dataclass
class Answer:
    """text: all that was generated. token_ids, logprobs: empty where the server gave none; a
    log-probability is a token's text and the digits. error: why there is no answer. refused:
    whether that is about the request, so that another one may be answered."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[tuple[str, str]] = field(default_factory=list)
    finish_reason: str | None = None
    fingerprint: str | None = None
    error: str | None = None
    refused: bool = False

    @classmethod
    def of(cls, texts: Iterable[str]) -> Answer:
        """The answer in the JSON of a response, or in that of all chunks of a stream.

        Raises ValueError, TypeError, LookupError or AttributeError for what is none."""
        answer, parts = cls(), dict.fromkeys(TEXTS, "")
        for text in texts:
            chunk = json.loads(text, parse_float=str)
            if chunk.get("error"):
                return cls(error=f"error in an answer: {chunk['error']}", refused=True)
            answer.fingerprint = chunk.get("system_fingerprint") or answer.fingerprint
            for choice in chunk["choices"]:
                message = choice.get("message") or choice.get("delta") or choice
                for name in TEXTS:
                    parts[name] += message.get(name) or ""
                answer.token_ids += choice.get("token_ids") or []
                answer.logprobs += _logprobs(choice.get("logprobs") or {})
                answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
        answer.text = "".join(parts.values())
        return answer if answer.finish_reason else cls(error="an answer without an end")

    def around(self, character: int, token: int | None) -> str:
        """Its text at a place, and the token there with its log-probability."""
        text = repr(self.text[max(character - AROUND, 0) : character + AROUND])
        if token is None or token >= len(self.logprobs):
            return text
        return f"{text}, token {' '.join(self.logprobs[token])}"


def _logprobs(choice: dict[str, Any]) -> list[tuple[str, str]]:
    """In the form of chat, or in that of completions."""
    if choice.get("content"):
        return [(token["token"], str(token["logprob"])) for token in choice["content"]]
    digits = map(str, choice.get("token_logprobs") or [])
    return list(zip(choice.get("tokens") or [], digits, strict=True))


def difference(alone: Answer, other: Answer) -> str | None:
    """Where a request's answer alone and another one differ first, with both texts around it; None
    where the text, and what else both have, is equal."""
    places = {}
    for name in COMPARED:
        first, second = getattr(alone, name), getattr(other, name)
        if first != second and (name == "text" or (first and second)):
            places[name] = _place(first, second)
    if not places:
        return None
    token = min((places[name] for name in places if name in COMPARED[1:3]), default=None)
    before = "".join(text for text, _ in alone.logprobs[:token])
    character = places.get("text", len(before))
    where = f"character {character}" if token is None else f"token {token}"
    sides = alone.around(character, token), other.around(character, token)
    return f"{where} ({', '.join(places)})\n  alone: {sides[0]}\n  other: {sides[1]}"


def _place(first: Sequence[Any], second: Sequence[Any]) -> int:
    """The index of the first element that differs."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(first), len(second)))
