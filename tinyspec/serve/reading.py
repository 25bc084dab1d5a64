"""What generated text of a chat consists of: thought, content, and calls of functions; and what a
request asks of it.

What is no call of a given function stays content. Markup that is a token of its own is told by that
token: spelled out it is text, and text may not show it. What comes in pieces is what comes at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import Any

from tinyspec.errors import refuse
from tinyspec.outputs import StreamEvent
from tinyspec.sampling_params import STRUCTURES, SamplingParams
from tinyspec.serve.schemas import answer_rule
from tinyspec.serve.tools import Call, ToolFormat, format_of
from tinyspec.text.decoding import TextStream, decode

# Stand in a text for the tokens that begin and end a thought, as those of ``tools`` for calls.
THINK, THOUGHT = "\x04\ud800", "\x05\ud800"
THINK_TOKENS = ("<think>", "</think>")


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

    format: ToolFormat | None = None
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
        said, stream = {True: "", False: ""}, self._stream  # thought, and what is not
        for mark, group in groupby(event.token_ids, self._marks.get):
            tokens = [*group]
            if not mark:
                self.thought_tokens += len(tokens) * self._thinks
                said[self._thinks] += stream.push(tokens, last=False) or ""
                continue
            said[self._thinks] += stream.push([], last=True) or ""
            stream.push(tokens, last=True)  # stop strings may reach over them
            for _ in tokens:
                if mark == (THOUGHT if self._thinks else THINK):
                    self._thinks = not self._thinks
                else:
                    said[self._thinks] += mark
        said[self._thinks] += stream.push([], last) or ""
        text = said[False].lstrip("\n") if self._begins and self.thought else said[False]
        self._begins &= not text
        content, calls = self.push(text, last)
        return self._shown(said[True]), self._shown(content), calls

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


def chosen(choice: Any, functions: list[Any]) -> tuple[str, list[Any]]:
    """How a ``tool_choice`` chooses ("none", "auto", "required"), and among which functions.
    Raises ValueError."""
    how, names = choice, None
    if isinstance(choice, dict):
        allowed = choice.get("allowed_tools")
        how = allowed["mode"] if allowed else "required"
        named = [choice]
        if allowed:  # what pydantic has there can be read once
            named = allowed["tools"] = [*allowed["tools"]]
        names = [each.get("function", each).get("name") for each in named]
    known = {function["name"] for function in functions}
    if (names is not None and not {*names} <= known) or (how == "required" and not known):
        raise refuse("tool_choice", choice, "that of a function among the tools")
    return how, [each for each in functions if names is None or each["name"] in names]


def wanted_calls(
    body: Any, tokenizer: Any, prompts: list[list[int]]
) -> tuple[Callable[..., Reading], dict[str, Any]]:
    """What reads the text of each completion of a request, given its ``params`` and ``prompt``, and
    those that make it say what is asked for. Raises ValueError."""
    every = [tool["function"] for tool in getattr(body, "tools", ())]
    how, functions = chosen(getattr(body, "tool_choice", "none"), every)
    asked = body.form
    thought = Thought.of(tokenizer) if hasattr(body, "tools") else None
    read, rules = partial(Reading, tokenizer=tokenizer, thought=thought), ""
    wanted = "answer" if asked and thought else None
    if how != "none" and functions:
        form = format_of(tokenizer)
        if how == "required" and asked:
            raise refuse("json_schema", "...", "none where a call is forced")
        several, forced = body.parallel_tool_calls, how == "required"
        exact = any(function.get("strict") for function in functions) or not several
        if exact or forced or asked or len(functions) < len(every):
            form = replace(form, known=True, first=not form.tokens, answers=bool(asked))
            wanted = "(free | call)*" if several else "free* call?"
            if asked or forced:
                wanted = "(call | answer)" if asked else "call"
            elif form.first:
                wanted = "(call | first free*)?"
            rules = form.rules(functions, tokenizer, {thought.begin} if thought else set(), forced)
        names = {function["name"] for function in functions}
        read = partial(read, form, names)
    if wanted is None:
        return read, {}
    if asked:
        if rules and form.begin == "{":  # one reader of both: no letter tells which it is
            asked, wanted = form.or_call(asked, functions), "answer"
        rules += f"answer: {answer_rule(asked)}\n"
    if thought is not None:
        wanted, rules = f"thought {wanted}", rules + thought.rule(prompts[0])
    return read, dict.fromkeys(STRUCTURES) | {"grammar": f"start: {wanted}\n{rules}"}
