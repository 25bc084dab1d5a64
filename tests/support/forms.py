"""Forms of texts at random, with large automata: patterns, schemas and Lark grammars, and whether
another library says that a text has one."""

import json
import re

import jsonschema
from hypothesis import strategies as st

WORDS = st.text("abe .", max_size=3).map(re.escape)
COUNTS = st.tuples(st.integers(0, 6), st.integers(1, 20)).map(lambda n: f"{{{n[0]},{sum(n)}}}")


def _larger(inner):
    repeated = st.tuples(inner, COUNTS).map(lambda x: f"({x[0]}){x[1]}")
    several = st.lists(inner, min_size=2, max_size=3)
    return repeated | several.map("".join) | several.map(lambda x: f"({'|'.join(x)})")


SIMPLE = st.sampled_from([".", "[a-e]", "[^b]", r"[a-e\s]"])
PATTERNS = st.recursive(WORDS | SIMPLE, _larger, max_leaves=8)


def schema_of(pattern, other):
    """JSON of an object with texts of both."""
    texts = [{"type": "string", "pattern": f"^({each})$"} for each in (pattern, other)]
    listed = {"type": "array", "items": {"anyOf": [texts[1], {"type": "integer"}]}, "maxItems": 3}
    return {
        "x-guidance": {"whitespace_flexible": False},
        "type": "object",
        "properties": {"<think>": texts[0], "b": listed},
        "required": ["<think>", "b"],
        "additionalProperties": False,
    }


PAIRS = st.tuples(PATTERNS, PATTERNS)
SCHEMAS = PAIRS.map(lambda pair: {"json_schema": schema_of(*pair)})
LARK = PAIRS.map(
    lambda pair: {"grammar": f'start: A ("-" B)*\nA: /{pair[0]}/\nB: /{pair[1]}/', "pair": pair}
)
ANY_FORM = PATTERNS.map(lambda pattern: {"regex": pattern}) | SCHEMAS | LARK


def has_form(text, form):
    """By ``re`` or ``jsonschema``."""
    if "json_schema" in form:
        return jsonschema.Draft202012Validator(form["json_schema"]).is_valid(json.loads(text))
    pattern = form["regex"] if "regex" in form else "({})(-({}))*".format(*form["pair"])
    return re.fullmatch(pattern, text) is not None
