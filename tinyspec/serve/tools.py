"""Calls of functions: how they are written, in the format of the model's own chat template, and the
grammar that says so.

Hermes and Qwen write ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, Llama an object
with name and parameters. Where a call must be right (it is forced, ``strict``, the only one, or
stands beside a response format) a grammar says so: free text is tokens, so that whatever a template
has tokens for can stand in it, and a call begins with the token of its markup; without one, at the
first token.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from tinyspec.errors import refuse
from tinyspec.serve.schemas import checked, embedded

# Stand in a text for the tokens that begin and end a call: no text has these, no JSON.
BEGIN, END = "\x02\ud800", "\x03\ud800"
Call = dict[str, Any]
DECODER = json.JSONDecoder()
# One byte, as a token of its own.
BYTE = "<0x{:02X}>"


@dataclass(frozen=True)
class ToolFormat:
    """before, behind: what a call's object stands between, but for white space. arguments: what
    they are called. tokens: those of the markup, with what stands in a text for them. first:
    whether a text is a call from its first letter on, or none; known: and follows a grammar, so
    that what is cut is a call as well; answers: or the beginning of an answer in its place."""

    before: str
    behind: str
    arguments: str
    tokens: dict[int, str] = field(default_factory=dict)
    first: bool = False
    known: bool = False
    answers: bool = False

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

    def rules(
        self, functions: list[Any], tokenizer: Any, never: Set[int], forced: bool = True
    ) -> str:
        """Of a grammar: a ``call`` is one of ``functions``, ``free`` what stands beside, in which
        its tokens and those of ``never`` do not stand."""
        calls = []
        for function in functions:
            schema = arguments_of(function, forced)
            begin = f'{{"name": {json.dumps(function["name"])}, "{self.arguments}": '
            calls.append(f'{json.dumps(begin)} %json {json.dumps(schema)} "}}"')
        call = f"{json.dumps(self.before)} body {json.dumps(self.behind)}"
        for token, mark in self.tokens.items():
            call = call.replace(json.dumps(mark).strip('"'), f'" <[{token}]> "')
        never = never | self.tokens.keys()
        free = f"free: {_none_of(never)}\n"
        if self.first:
            free += f"first: {_none_of(never | beginning(tokenizer, self.begin[0]))}\n"
        return f"call: {call}\nbody: {' | '.join(calls)}\n{free}"

    def or_call(self, asked: dict[str, Any], functions: list[Any]) -> dict[str, Any]:
        """A form for what is as ``asked``, or a call. Raises ValueError for one that a call fits
        whose arguments do not follow theirs, and for what is no schema."""
        schema = asked.get("json_schema", {})
        names = schema.get("properties", {}).keys()
        if schema.get("additionalProperties") is not False or names >= {"name", self.arguments}:
            allowed = "an object without additionalProperties beside tools of Llama's format"
            raise refuse("json_schema", "...", f"{allowed}, and not of name and parameters")
        parts = [embedded(schema, "answer")]
        for number, function in enumerate(functions):
            arguments = embedded(arguments_of(function, forced=False), f"call{number}")
            about = {"name": {"const": function["name"]}, self.arguments: arguments}
            parts.append({"type": "object", "properties": about, "required": [*about]})
            parts[-1]["additionalProperties"] = False
        return {"json_schema": {"anyOf": parts}}

    def call(self, text: str, names: set[str]) -> tuple[list[Call], str, str]:
        """The call that ``text`` begins with, as OpenAI has it, or none; what in front of where
        another may follow is content then; and what is behind."""
        inner = text.removeprefix(self.before.strip()).lstrip()
        try:
            found, end = DECODER.raw_decode(inner)
        except (ValueError, RecursionError):
            if self.known:
                calls = self._cut(inner, names)
                return calls, text if self.answers and not calls else "", ""
            return [], self.begin, text[len(self.begin) :]
        rest, behind = inner[end:], self.behind.strip()
        closed = rest.lstrip() if behind else rest
        match found:
            case {"name": str(name), self.arguments: dict(arguments)} if len(found) == 2:
                if name in names and (self.known or closed.startswith(behind)):
                    written = json.dumps(arguments, ensure_ascii=False)
                    return [_call(name, written)], "", closed.removeprefix(behind)
        return [], text[: len(text) - len(rest)], rest

    def _cut(self, inner: str, names: set[str]) -> list[Call]:
        """The call that ``inner`` is the beginning of, with as much of its arguments as there is;
        none before its name is known."""
        for name in names:
            begin = f'{{"name": {json.dumps(name)}, "{self.arguments}": '
            if inner.startswith(begin):
                arguments = inner.removeprefix(begin)
                with suppress(ValueError, RecursionError):  # but what closes it all may be there
                    arguments = arguments[: DECODER.raw_decode(arguments)[1]]
                return [_call(name, arguments)]
        return []


def _call(name: str, arguments: str) -> Call:
    called = {"name": name, "arguments": arguments}
    return {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": called}


def arguments_of(function: dict[str, Any], forced: bool) -> dict[str, Any]:
    """The schema that arguments follow: any object's where nobody asked for more. Raises
    ValueError."""
    given = function.get("parameters") if forced or function.get("strict") else None
    return checked(given or {"type": "object"})


@lru_cache(maxsize=8)
def beginning(tokenizer: Any, letter: str) -> frozenset[int]:
    """Tokens that begin with a letter of ASCII, but for added ones."""
    added, spelled = {*tokenizer.added_tokens_encoder}, (letter, BYTE.format(ord(letter)))
    names = tokenizer.get_vocab().items()
    return frozenset(n for name, n in names if name.startswith(spelled) and name not in added)


def _none_of(tokens: Set[int]) -> str:
    """Any token but these, in a grammar."""
    return f"<[^{','.join(map(str, sorted(tokens)))}]>" if tokens else "<[*]>"


HERMES = ToolFormat("<tool_call>\n", "\n</tool_call>", "arguments")
LLAMA = ToolFormat("", "", "parameters")


def format_of(tokenizer: Any) -> ToolFormat:
    """That of its chat template. Raises ValueError where it has none that is known."""
    template = tokenizer.get_chat_template(tools=[{}]) if tokenizer.chat_template else ""
    named = {HERMES.begin: HERMES, '"parameters": ': LLAMA}
    found = next((form for marker, form in named.items() if marker in template), None)
    if found is None or "tools" not in template:
        raise refuse("tools", "...", "none: the chat template has no calls of Hermes or Llama")
    return found.of(tokenizer)
