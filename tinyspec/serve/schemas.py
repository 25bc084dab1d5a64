"""JSON schemas of requests: which patterns one may have.

A pattern is read by automata that grow with what is repeated within repetitions, for minutes and
gigabytes; everybody's passes wait for them.
"""

from __future__ import annotations

import re
from typing import Any

from tinyspec.errors import refuse

# Characters of a pattern, and the product of counts that stand within each other.
LONGEST_PATTERN, MOST_REPEATED = 1000, 5000
# An escape, a class, a count, or one character.
PARTS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]?|\{\s*\d[\d,\s]*\}|.", re.DOTALL)


def laid_out(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema of a request, which the engine lays out. Raises ValueError."""
    left: list[Any] = [schema]
    for found in left:  # it grows
        if isinstance(found, list):
            left += found
        elif isinstance(found, dict):
            left += found.values()
            named = found.get("patternProperties")
            patterns = found.get("pattern"), *(named if isinstance(named, dict) else ())
            for pattern in (each for each in patterns if isinstance(each, str)):
                if len(pattern) > LONGEST_PATTERN or repeated(pattern) > MOST_REPEATED:
                    allowed = f"at most {LONGEST_PATTERN} characters, and counts within counts of "
                    raise refuse("pattern", pattern, f"{allowed}at most {MOST_REPEATED} together")
    return schema


def moved(schema: Any, place: str) -> Any:
    """With references that hold where it stands at ``place``, "#/.../", of another."""
    if isinstance(schema, list):
        return [moved(each, place) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: moved(each, place) for name, each in schema.items()}
    if isinstance(reference := found.get("$ref"), str) and reference.startswith("#"):
        found["$ref"] = place.rstrip("/") + reference[1:]
    return found


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
