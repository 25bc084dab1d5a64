"""What the text of a request is to be like: by which parameter, and which patterns it may have.

A pattern is read by automata that grow with what is repeated within repetitions, for minutes and
gigabytes; everybody's passes wait for them.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from typing import Any

from tinyspec.errors import refuse
from tinyspec.structured.schemas import walk

# Characters of a pattern, and the product of counts that stand within each other.
LONGEST_PATTERN, MOST_REPEATED = 1000, 5000
# An escape, a class, a count, or one character.
PARTS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]?|\{\s*\d[\d,\s]*\}|.", re.DOTALL)

DRAFT = "https://json-schema.org/draft/2020-12/schema"
# What a pattern of Lark's has no room for.
UNESCAPED, ESCAPED = re.compile(r"\\.|[/\n]", re.DOTALL), {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}


def checked(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema of a request, whose patterns are none that take long to read. Raises ValueError."""
    for found in walk(schema, schemas=False):  # a reference may make one of any of them
        named = found.get("patternProperties")
        patterns = found.get("pattern"), *(named if isinstance(named, dict) else ())
        for pattern in (each for each in patterns if isinstance(each, str)):
            if len(pattern) > LONGEST_PATTERN or repeated(pattern) > MOST_REPEATED:
                allowed = f"at most {LONGEST_PATTERN} characters, and counts within counts of "
                raise refuse("pattern", pattern, f"{allowed}at most {MOST_REPEATED} together")
    return schema


def embedded(schema: dict[str, Any], name: str) -> dict[str, Any]:
    """A schema for a place in another, whose references are its own by its id, a ``name``; under
    drafts of before 2019 an id beside a reference is none."""
    return {"$id": f"urn:{name}", **schema, "$schema": DRAFT}


def form_of(given: Any) -> dict[str, Any]:
    """The parameter for the text that a response_format wants; none where it may be any."""
    if given["type"] == "text":
        return {}
    schema = given.get("json_schema", given).get("schema", {"type": "object"})
    return {"json_schema": checked(schema)}


def structured(given: dict[str, Any]) -> dict[str, Any]:
    """That for vLLM's structured_outputs. Raises ValueError."""
    from llguidance.gbnf_to_lark import any_to_lark

    with suppress(RecursionError):
        match [*given.items()]:
            case [("json", dict() | str() as schema)]:
                schema = json.loads(schema) if isinstance(schema, str) else schema
                return {"json_schema": checked(schema)}
            case [("json_object", True)]:
                return {"json_schema": {"type": "object"}}
            case [("choice", [str(), *_] as texts)] if all(isinstance(t, str) for t in texts):
                return {"grammar": f"start: {' | '.join(map(json.dumps, texts))}"}
            case [("regex" | "grammar" as name, str(text))]:
                for line in text.splitlines():
                    checked({"pattern": line})
                try:
                    return {name: any_to_lark(text) if name == "grammar" else text}
                except Exception as error:  # any, and many
                    raise refuse(name, text, f"one of Lark's or GBNF ({error})") from None
    allowed = "one of json, json_object, regex, choice and grammar is"
    raise ValueError(f"{given!r:.200} is not allowed: {allowed}")


def answer_rule(form: dict[str, Any]) -> str:
    """What stands in a Lark grammar for a text of this ``form``, as ``form_of`` has it."""
    ((way, given),) = form.items()
    if way == "json_schema":
        return f"%json {json.dumps(given)}"
    if way == "grammar":
        return f"%lark {{\n{given}\n}}"
    return f"/{re.sub(UNESCAPED, lambda found: ESCAPED.get(found[0], found[0]), given)}/"


def repeated(pattern: str) -> int:
    """The largest product of counts that stand within each other: of ``(a{2,3}b){4}`` 12; 0 where
    none do."""
    most, groups, last = 0, [1], 1
    for part in PARTS.findall(pattern):
        count = max(map(int, re.findall(r"\d+", part))) if part[0] == "{" != part else 0
        if part == ")" and groups[1:]:
            last = groups.pop()
        elif part not in "?*+ ":
            most = max(most, last * count if last > 1 else 0)
            last = last * count or 1
        groups[-1] = max(groups[-1], last)
        groups += [1] * (part == "(")
    return most
