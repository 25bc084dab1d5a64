"""What generated text of a chat consists of: thought, content, and calls of functions.

What is no call of a given function stays content. Markup that is a token of its own is told by that
token: spelled out it is text, and text may not show it. What comes in pieces is what comes at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Protocol

from tinyspec.outputs import StreamEvent
from tinyspec.sampling_params import SamplingParams
from tinyspec.text.decoding import decode
from tinyspec.text.stream import TextStream

# Stand in a text for tokens that begin and end a call, or a thought: no text has these, no JSON.
BEGIN, END, THINK, THOUGHT = "\x02\ud800", "\x03\ud800", "\x04\ud800", "\x05\ud800"
THINK_TOKENS = ("<think>", "</think>")
Call = dict[str, Any]


class Calls(Protocol):
    """How calls are written; see ``tools.ToolFormat``."""

    @property
    def tokens(self) -> dict[int, str]: ...
    @property
    def first(self) -> bool: ...
    @property
    def begin(self) -> str: ...
    def call(self, text: str, names: set[str]) -> tuple[list[Call], str, str]: ...


@dataclass(frozen=True)
class Thought:
    """The tokens that begin and end what a model thinks before it answers; of a tokenizer."""

    begin: int
    end: int
    tokenizer: Any

    @classmethod
    def of(cls, tokenizer: Any) -> Thought | None:
        """Those of its chat template, where it has any."""
        known = getattr(tokenizer, "added_tokens_encoder", {})
        there = THINK_TOKENS[1] in str(getattr(tokenizer, "chat_template", None))
        begin, end = map(known.get, THINK_TOKENS)
        return None if not there or None in (begin, end) else cls(begin, end, tokenizer)

    def is_open(self, prompt: list[int]) -> bool:
        """Whether a prompt ends with its beginning, but for white space: what a message says of
        one is none."""
        behind = next((n for n, token in enumerate(reversed(prompt)) if token == self.begin), None)
        if behind is None:
            return False
        return not decode(self.tokenizer, prompt[len(prompt) - behind :], special=True).strip()

    def rule(self, prompt: list[int]) -> str:
        """A grammar's, for what is thought behind ``prompt``."""
        rest = f"<[^{self.end}]>* <[{self.end}]> /\\n{{0,2}}/"
        return f"thought: {rest if self.is_open(prompt) else f'(<[{self.begin}]> {rest})?'}\n"


@dataclass
class Reading:
    """Splits a growing text into thought, content and calls of the functions ``names``: from where
    a call may begin it is held back to its end. Without a ``format`` there are no calls, without
    ``thought``'s tokens no thoughts. params: of the request, whose stop strings are no part of the
    text. prompt: token ids. thought_tokens: how many there were."""

    format: Calls | None = None
    names: set[str] = field(default_factory=set)
    tokenizer: Any = None
    params: SamplingParams | None = None
    prompt: list[int] | None = None
    thought: Thought | None = None
    thought_tokens: int = 0
    _held: str = ""
    _begins: bool = True

    def __post_init__(self) -> None:
        self._stream = TextStream(self.tokenizer, self.params, self.prompt)
        self._marks = {**self.format.tokens} if self.format else {}
        if self.thought is not None:
            self._marks |= {self.thought.begin: THINK, self.thought.end: THOUGHT}
        self._thinks = self.thought is not None and self.thought.is_open(self.prompt or [])

    def told(self, event: StreamEvent) -> tuple[str, str, list[Call]]:
        """Thought, content and calls that are known with an event."""
        last = event.finish_reason is not None
        if not self._marks:
            return "", *self.push(event.text or "", last)
        text, stream, thinks = "", self._stream, self._thinks
        for mark, group in groupby(event.token_ids, self._marks.get):
            tokens = [*group]
            if mark:
                text += (stream.push([], last=True) or "") + mark * len(tokens)
                stream.push(tokens, last=True)  # stop strings may reach over them
                thinks = mark == THINK if mark in (THINK, THOUGHT) else thinks
            else:
                self.thought_tokens += len(tokens) * thinks
                text += stream.push(tokens, last=False) or ""
        thought, text = self._split(text + (stream.push([], last) or ""))
        content, calls = self.push(text, last)
        return self._shown(thought), self._shown(content), calls

    def _split(self, text: str) -> tuple[str, str]:
        """What of it is thought, and what is not."""
        thought = rest = ""
        while text:
            part, found, text = text.partition(THOUGHT if self._thinks else THINK)
            if self._thinks:
                thought += part
            else:
                part = part.lstrip("\n") if self._begins and self.thought else part
                self._begins &= not part
                rest += part
            self._thinks ^= bool(found)
        return thought, rest

    def _shown(self, text: str) -> str:
        """With marks that are none as their tokens' own text."""
        for token, mark in self._marks.items():
            if mark in text:
                text = text.replace(mark, self.tokenizer.decode([token], skip_special_tokens=True))
        return text

    def push(self, text: str, last: bool) -> tuple[str, list[Call]]:
        """Content and calls that are known with ``text``."""
        if self.format is None:
            return text, []
        held, begin = self._held + text, self.format.begin
        if self.format.first and held and not begin.startswith(held[: len(begin)]):
            self.format = None  # it is no call, and none follows
            return held, []
        if not last:
            places = (n for n in range(len(held)) if begin.startswith(held[n : n + len(begin)]))
            # White space in front of a call is left out.
            place = len(held[: next(places, len(held))].rstrip())
            self._held = held[place:]
            return held[:place], []
        content, calls = "", list[Call]()
        while (start := held.find(begin)) >= 0:
            found, text, rest = self.format.call(held[start:], self.names)
            calls += found
            content, held = content + held[:start] + text, rest
        content += held
        return (content.rstrip() if calls else content), calls
