"""JSON schemas as llguidance reads them: the text's layout, formats that it does not know, and
keywords that say nothing or that others say as well. What is left for it to refuse it names.

Knows no tokenizer and no request. Its ``lenient`` would leave out whatever it does not know.
"""

from __future__ import annotations

import json
import re
from typing import Any

# JSON as models learn it. A model that may write any white space may write no end of it.
LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# Others are annotations, as the specification says.
FORMATS = "date-time date time duration email hostname ipv4 ipv6 uri uuid"
# Keywords that say nothing where they are false or empty, or true or empty; and of all names.
EMPTY = {"uniqueItems", "dependentRequired", "dependentSchemas"}
ANY = {"unevaluatedItems", "unevaluatedProperties", "propertyNames"}
STRINGS = "propertyNames", {"type": "string"}
# Whose values are data, or schemas by names that are no keywords.
DATA = {"const", "enum", "default", "examples", "x-guidance"}
NAMED = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
# What evaluates properties in place of the object itself.
IN_PLACE = {"allOf", "anyOf", "oneOf", "$ref"}
# Keywords that say nothing of a value.
ABOUT = {"title", "description", "$comment"}
# Of a Lark grammar: texts, patterns and comments, and what stands before a schema.
LARK = re.compile(r'"(?:\\.|[^"\\\n])*"?|(?://|#)[^\n]*|/(?:\\.|[^/\\\n])+/?|%json\s*')


def readable(text: str) -> str:
    """A JSON schema as llguidance reads it; an ``x-guidance`` of its own is kept as it is. Raises
    ValueError, and RecursionError, for what is none."""
    return json.dumps(_readable(json.loads(text)))


def readable_grammar(text: str) -> str:
    """A Lark grammar, with the schemas in it as ``readable`` has them."""
    found, place = "", 0
    while part := LARK.search(text, place):
        found, place = found + text[place : part.end()], part.end()
        if part[0].startswith("%json"):
            schema, place = json.JSONDecoder().raw_decode(text, place)
            found += json.dumps(_readable(schema))
    return found + text[place:]


def walk(schema: Any, schemas: bool) -> list[dict[str, Any]]:
    """Every object in a JSON schema, those within others behind them. schemas: no data and no
    objects of names, but schemas alone."""
    inner: list[Any] = [schema]
    for found in inner:  # it grows
        if isinstance(found, list):
            inner += found
        elif isinstance(found, dict):
            for key, value in found.items():
                named = schemas and key in NAMED and isinstance(value, dict)
                inner += value.values() if named else [value] * (not schemas or key not in DATA)
    return [found for found in inner if isinstance(found, dict)]


def _readable(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return {"x-guidance": LAYOUT} if schema is True else schema
    for found in reversed(walk(schema, schemas=True)):
        _simplify(found, schema)
    return {"x-guidance": LAYOUT, **schema}


def _simplify(found: dict[str, Any], whole: dict[str, Any]) -> None:
    """Leave out of a schema within ``whole`` what says nothing, and say in other words what can be
    said so."""
    if isinstance(known := found.get("format"), str) and known not in FORMATS.split():
        del found["format"]
    for key, x in [*found.items()]:
        if (key in EMPTY and not x) or (key in ANY and x in (True, {})) or (key, x) == STRINGS:
            del found[key]
    if not found.keys() & IN_PLACE and "unevaluatedProperties" in found:
        found.setdefault("additionalProperties", found.pop("unevaluatedProperties"))
    pattern, most = _names(found.get("propertyNames"), whole)
    if pattern and not (found.get("properties") or found.get("patternProperties")):
        del found["propertyNames"]
        found["patternProperties"] = {pattern: found.get("additionalProperties", True)}
        found["additionalProperties"] = False
        if most:  # or a text could repeat them without end
            found.setdefault("maxProperties", most)


def _names(names: Any, whole: Any) -> tuple[str, int]:
    """The pattern that says the same as a schema of names, and how many there are; none, and 0
    where that is not known."""
    place = names.get("$ref") if isinstance(names, dict) and len(names) == 1 else None
    for part in place.split("/")[1:] if isinstance(place, str) else ():
        whole = names = whole.get(part) if isinstance(whole, dict) else None
    given = names.items() if isinstance(names, dict) else ()
    match [x for x in given if x[0] not in ABOUT and x != ("type", "string")]:
        case [("pattern", str(pattern))]:
            return pattern, 0
        case [("const", str(value))]:
            return f"^{re.escape(value)}$", 1
        case [("enum", [_, *_] as values)] if all(isinstance(value, str) for value in values):
            return f"^({'|'.join(map(re.escape, values))})$", len(values)
    return "", 0
