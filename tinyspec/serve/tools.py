"""Calls of functions in generated text, in the format of the model's own chat template.

Hermes and Qwen write ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, Llama an object
with name and parameters behind its text. What is no call of a given function stays text. Markup
that is a token of its own is told by that token: spelled out it is text, and text may not show it.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import Any

from tinyspec.errors import refuse
from tinyspec.outputs import StreamEvent
from tinyspec.sampling_params import SamplingParams
from tinyspec.serve.schemas import laid_out
from tinyspec.text.stream import TextStream

DECODER = json.JSONDecoder()
# Stand in a text for tokens that begin and end a call: no text has these, and no JSON.
BEGIN, END = "\x02\ud800", "\x03\ud800"


@dataclass(frozen=True)
class ToolFormat:
    """before, behind: what a call's object stands between, but for white space. arguments: what
    they are called. tokens: those of the markup, with what stands in a text for them."""

    before: str
    behind: str
    arguments: str
    tokens: dict[int, str] = field(default_factory=dict)

    def of(self, tokenizer: Any) -> ToolFormat:
        """With marks for the tokens of a tokenizer."""
        known, own = getattr(tokenizer, "added_tokens_encoder", {}), self
        for name, mark in (("before", BEGIN), ("behind", END)):
            if (markup := (text := getattr(self, name)).strip()) in known:
                tokens = {**own.tokens, known[markup]: mark}
                own = replace(own, tokens=tokens, **{name: text.replace(markup, mark)})
        return own

    @property
    def begin(self) -> str:
        """Of a call."""
        return self.before.strip() or "{"

    def constraint(self, functions: list[Any]) -> dict[str, Any]:
        """The SamplingParams that force a call of one of ``functions``."""
        calls = []
        for function in functions:
            schema = laid_out(function.get("parameters") or {"type": "object"})
            begin = f'{{"name": {json.dumps(function["name"])}, "{self.arguments}": '
            calls.append(f'{json.dumps(begin)} %json {json.dumps(schema)} "}}"')
        call = f"{json.dumps(self.before)} call {json.dumps(self.behind)}"
        for token, mark in self.tokens.items():
            call = call.replace(json.dumps(mark).strip('"'), f'" <[{token}]> "')
        return {"grammar": f"start: {call}\ncall: {' | '.join(calls)}"}

    def call(self, text: str, names: set[str]) -> tuple[dict[str, Any] | None, str]:
        """The call that ``text`` begins with, as OpenAI has it, and what is behind it; None if it
        is none, and where one may follow."""
        inner = text.removeprefix(self.before.strip()).lstrip()
        try:
            found, end = DECODER.raw_decode(inner)
        except (ValueError, RecursionError):
            return None, text[len(self.begin) :]
        rest, behind = inner[end:], self.behind.strip()
        closed = rest.lstrip() if behind else rest
        match found:
            case {"name": str(name), self.arguments: dict(arguments)} if len(found) == 2:
                if name in names and closed.startswith(behind):
                    called = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
                    about = {"id": f"call_{uuid.uuid4().hex}", "type": "function"}
                    return {**about, "function": called}, closed.removeprefix(behind)
        return None, rest


HERMES = ToolFormat("<tool_call>\n", "\n</tool_call>", "arguments")
LLAMA = ToolFormat("", "", "parameters")


def wanted_calls(body: Any, tokenizer: Any) -> tuple[Callable[..., ToolText], dict[str, Any]]:
    """What splits the text of each completion of a request, given its ``params``, and those that
    force a call. Raises ValueError."""
    functions = [tool["function"] for tool in getattr(body, "tools", ())]
    choice: Any = getattr(body, "tool_choice", "none")
    if choice == "none" or (choice == "auto" and not functions):
        return ToolText, {}
    template = tokenizer.get_chat_template(tools=[{}]) if tokenizer.chat_template else ""
    named = {HERMES.begin: HERMES, '"parameters": ': LLAMA}
    found = next((form for marker, form in named.items() if marker in template), None)
    if found is None or "tools" not in template:
        raise refuse("tools", "...", "none: the chat template has no calls of Hermes or Llama")
    found, names = found.of(tokenizer), {function["name"] for function in functions}
    split = partial(ToolText, found, names, tokenizer)
    if choice == "auto":
        if any(function.get("strict") for function in functions) or not body.parallel_tool_calls:
            allowed = "a tool_choice that forces a call, with strict or parallel_tool_calls=false"
            raise refuse("tool_choice", choice, allowed)
        return split, {}
    if choice != "required":
        functions = [f for f in functions if f["name"] == choice["function"]["name"]]
    if not functions:
        raise refuse("tool_choice", choice, "that of a function among the tools")
    if getattr(body, "json_schema", None) is not None:
        raise refuse("json_schema", "...", "text where a call is forced")
    return split, found.constraint(functions)


@dataclass
class ToolText:
    """Splits a growing text into content and calls of the functions ``names``: from where a call
    may begin it is held back to its end. Without a ``format`` all is content. params: of the
    request, whose stop strings are no part of it. prompt: token ids."""

    format: ToolFormat | None = None
    names: set[str] = field(default_factory=set)
    tokenizer: Any = None
    params: SamplingParams | None = None
    prompt: list[int] | None = None
    _held: str = ""

    def __post_init__(self) -> None:
        self._stream = TextStream(self.tokenizer, self.params, self.prompt)

    def told(self, event: StreamEvent) -> tuple[str, list[dict[str, Any]]]:
        """Content and calls that are known with an event."""
        last, marks = event.finish_reason is not None, self.format.tokens if self.format else {}
        if not marks:
            return self.push(event.text or "", last)
        text, stream = "", self._stream
        for mark, tokens in groupby(event.token_ids, marks.get):
            if mark:
                text += (stream.push([], last=True) or "") + mark * len(run := [*tokens])
                stream.push(run, last=True)  # stop strings may reach over them
            else:
                text += stream.push([*tokens], last=False) or ""
        content, calls = self.push(text + (stream.push([], last) or ""), last)
        for token, mark in marks.items():  # of what is no call
            content = content.replace(
                mark, self.tokenizer.decode([token], skip_special_tokens=True)
            )
        return content, calls

    def push(self, text: str, last: bool) -> tuple[str, list[dict[str, Any]]]:
        """Content and calls that are known with ``text``."""
        if self.format is None:
            return text, []
        held, begin = self._held + text, self.format.begin
        if not last:
            found = (n for n in range(len(held)) if begin.startswith(held[n : n + len(begin)]))
            # White space in front of a call is left out.
            place = len(held[: next(found, len(held))].rstrip())
            self._held = held[place:]
            return held[:place], []
        content, calls = "", list[dict[str, Any]]()
        while (start := held.find(begin)) >= 0:
            call, rest = self.format.call(held[start:], self.names)
            calls += [call] if call else []
            content += held[: start if call else len(held) - len(rest)]
            held = rest
        content += held
        return (content.rstrip() if calls else content), calls
