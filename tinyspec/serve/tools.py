"""Calls of functions in generated text, in the format of the model's own chat template.

Hermes and Qwen write ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, Llama an object
with name and parameters behind its text. What is no call of a given function stays text.
"""

from __future__ import annotations

import json
import re
import uuid
from dataclasses import dataclass
from typing import Any

from tinyspec.errors import refuse
from tinyspec.serve.protocol import LAYOUT

DECODER = json.JSONDecoder()


@dataclass(frozen=True)
class ToolFormat:
    """begin: of a call. opened, closed: what stands before and behind its object. arguments: what
    they are called. grammar: of a call alone, but for the rule ``call``, its object."""

    begin: str
    opened: re.Pattern[str]
    closed: re.Pattern[str]
    arguments: str
    grammar: str

    def constraint(self, functions: list[Any]) -> dict[str, Any]:
        """The SamplingParams that force a call of one of ``functions``."""
        calls = []
        for function in functions:
            schema = {"x-guidance": LAYOUT, **(function.get("parameters") or {"type": "object"})}
            begin = f'{{"name": {json.dumps(function["name"])}, "{self.arguments}": '
            calls.append(f'{json.dumps(begin)} %json {json.dumps(schema)} "}}"')
        return {"grammar": f"{self.grammar}\ncall: {' | '.join(calls)}"}

    def call(self, text: str, place: int, names: set[str]) -> tuple[dict[str, Any] | None, int]:
        """The call that begins at ``place``, as OpenAI has it, and where it ends; None if what is
        there is none, and where one may be behind it."""
        opened = self.opened.match(text, place)
        try:
            found, end = DECODER.raw_decode(text, opened.end() if opened else place)
        except (ValueError, RecursionError):
            return None, place + len(self.begin)
        closed = self.closed.match(text, end)
        if not closed or not isinstance(found, dict) or found.keys() != {"name", self.arguments}:
            return None, end
        name, arguments = found["name"], found[self.arguments]
        if not isinstance(name, str) or name not in names or not isinstance(arguments, dict):
            return None, end
        called = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
        call = {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": called}
        return call, closed.end()


HERMES = ToolFormat(
    begin="<tool_call>",
    opened=re.compile(r"<tool_call>\s*"),
    closed=re.compile(r"\s*</tool_call>"),
    arguments="arguments",
    grammar='start: "<tool_call>\\n" call "\\n</tool_call>"',
)
LLAMA = ToolFormat("{", re.compile(""), re.compile(""), "parameters", grammar="start: call")


def wanted_calls(body: Any, tokenizer: Any) -> tuple[ToolFormat | None, dict[str, Any]]:
    """The format of the calls that a request's text may have, None where it is only text, and the
    SamplingParams that force one. Raises ValueError."""
    functions = [tool["function"] for tool in getattr(body, "tools", ())]
    choice: Any = getattr(body, "tool_choice", "none")
    if choice == "none" or (choice == "auto" and not functions):
        return None, {}
    template = tokenizer.get_chat_template(tools=[{}]) if tokenizer.chat_template else ""
    named = {HERMES.begin: HERMES, '"parameters": ': LLAMA}
    found = next((form for marker, form in named.items() if marker in template), None)
    if found is None or "tools" not in template:
        raise refuse("tools", "...", "none: the chat template has no calls of Hermes or Llama")
    if choice == "auto":
        if any(function.get("strict") for function in functions) or not body.parallel_tool_calls:
            allowed = "a tool_choice that forces a call, with strict or parallel_tool_calls=false"
            raise refuse("tool_choice", choice, allowed)
        return found, {}
    if choice != "required":
        functions = [f for f in functions if f["name"] == choice["function"]["name"]]
    if not functions:
        raise refuse("tool_choice", choice, "that of a function among the tools")
    if getattr(body, "json_schema", None) is not None:
        raise refuse("json_schema", "...", "text where a call is forced")
    return found, found.constraint(functions)


@dataclass
class ToolText:
    """Splits a growing text into content and calls of the functions ``names``: from where a call
    may begin it is held back to its end. Without a ``format`` all is content."""

    format: ToolFormat | None
    names: set[str]
    _held: str = ""

    def push(self, text: str, last: bool) -> tuple[str, list[dict[str, Any]]]:
        """Content and calls that are known with ``text``."""
        if self.format is None:
            return text, []
        held, begin = self._held + text, self.format.begin
        if not last:
            places = range(len(held))
            found = (n for n in places if begin.startswith(held[n : n + len(begin)]))
            # White space in front of a call is left out.
            place = len(held[: next(found, len(held))].rstrip())
            self._held = held[place:]
            return held[:place], []
        content, calls, kept, place = "", [], 0, 0
        while (start := held.find(begin, place)) >= 0:
            call, place = self.format.call(held, start, self.names)
            if call is not None:
                calls.append(call)
                content, kept = content + held[kept:start], place
        content += held[kept:]
        return (content.rstrip() if calls else content), calls
