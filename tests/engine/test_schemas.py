"""JSON schemas as clients write them: what is unknown says nothing, what cannot be served is
refused by name, and white space does not fill a text."""

import enum
import json
import pathlib
import re
from typing import Annotated, Literal

import jsonschema
import pydantic
import pytest

from tests.support.serving import storyteller
from tinyspec import SamplingParams

pytest.importorskip("llguidance")
BLANKS = {"x-guidance": {"whitespace_flexible": True}}
NUMBERS = {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 2}
SHORT = {"type": "string", "maxLength": 3}
COUNT = {"type": "integer", "minimum": 0, "maximum": 9}


class Colour(enum.Enum):
    RED = "red"
    BLUE = "b.l"


class Given(pydantic.BaseModel):
    """Whose schema has formats and names that are pydantic's."""

    place: Annotated[pathlib.Path, pydantic.Field(max_length=3)]
    secret: Annotated[pydantic.SecretStr, pydantic.Field(max_length=3)]
    data: Annotated[bytes, pydantic.Field(max_length=3)]
    counts: dict[Colour, Literal[1, 2]]
    sizes: dict[Literal["a"], bool]


SERVED = {
    "pydantic": Given.model_json_schema(),
    "formats in data": {"enum": [{"format": "path"}, {"enum": {"format": "binary"}}]},
    "a property of that name": {
        "type": "object",
        "properties": {"format": {"const": "path"}, "enum": {**SHORT, "format": "path"}},
        "required": ["format", "enum"],
        "additionalProperties": False,
    },
    "of each": {"type": "array", "items": {**SHORT, "format": "decimal"}, "maxItems": 2},
    "a known one": {"type": "string", "format": "date"},
    "zod's record": {
        "type": "object",
        "propertyNames": {"type": "string"},
        "additionalProperties": COUNT,
    },
    "zod's record of names": {
        **{"type": "object", "propertyNames": {"enum": ["a", "b"], "type": "string"}},
        **{"additionalProperties": COUNT, "required": ["a", "b"]},
    },
    "names by pattern": {
        "propertyNames": {"pattern": "^[ab]{2}$", "type": "string"},
        **{"type": "object", "additionalProperties": COUNT},
    },
    "nothing more": {
        **{"type": "object", "properties": {"a": COUNT}, "required": ["a"]},
        **{"unevaluatedProperties": False, "propertyNames": True, "dependentRequired": {}},
    },
    "not unique": {**NUMBERS, "uniqueItems": False, "unevaluatedItems": True},
    "anything": True,
}
REFUSED = {
    "uniqueItems": pydantic.TypeAdapter(set[int]).json_schema(),
    "propertyNames": {"type": "object", "propertyNames": {"minLength": 2}},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "unevaluatedProperties": {"allOf": [{"type": "object"}], "unevaluatedProperties": False},
}


@pytest.fixture(scope="module")
def engine():
    with storyteller(num_pages=64) as engine:
        yield engine


@pytest.mark.parametrize("schema", SERVED.values(), ids=SERVED)
def test_texts_are_of_the_schema(engine, schema):
    """By another library, which reads the schema as the client wrote it."""
    style = {"temperature": 1.5, "seed": 1, "num_return_sequences": 6, "max_new_tokens": 200}
    params = SamplingParams(json_schema=json.dumps(schema), deterministic=True, **style)
    (output,) = engine.generate(["Once"], params)
    ended = [c.text for c in output.completions if c.finish_reason == "stop"]
    assert ended
    for text in ended:
        kept = jsonschema.FormatChecker()
        jsonschema.Draft202012Validator(schema, format_checker=kept).validate(json.loads(text))


def test_control_known_formats_and_names_hold(engine):
    """What a grammar keeps to, and texts of all that is allowed would not."""
    for schema, pattern in (
        ({"type": "string", "format": "date"}, r'"\d{4}-\d\d-\d\d"'),
        (
            {**SERVED["names by pattern"], "minProperties": 1, "maxProperties": 3},
            r'\{("[ab]{2}": \d(, )?)+\}',
        ),
    ):
        params = SamplingParams(json_schema=schema, max_new_tokens=60, temperature=1, seed=2)
        text = engine.generate(["Once"], params)[0].completions[0].text
        assert re.fullmatch(pattern, text)


@pytest.mark.parametrize("deterministic", [True, False], ids=["deterministic", "plain"])
def test_white_space_is_bounded(engine, deterministic):
    """A model that likes blanks best has none of them but where the user's own layout allows them;
    in the schemas of a grammar, too."""
    blanks = {n: 90.0 for n in range(512) if not engine.tokenizer.decode([n]).strip()}
    style = {"logit_bias": blanks, "max_new_tokens": 30, "deterministic": deterministic}
    found = {}
    for name, schema in (("own", {**BLANKS, **NUMBERS}), ("default", NUMBERS)):
        forms = {"json_schema": schema}, {"grammar": f'start: "<" %json {json.dumps(schema)} ">"'}
        params = [SamplingParams(**form, **style) for form in forms]
        outputs = engine.generate(["Once"] * 2, params)
        found[name] = [(o.completions[0].text, o.completions[0].finish_reason) for o in outputs]
    for (text, reason), form in zip(found["default"], (r"{}", r"<{}>"), strict=True):
        assert re.fullmatch(form.format(r"\[[12], [12]\]"), text) and reason == "stop"
    assert all(reason == "length" and "  " in text for text, reason in found["own"]), "control"


@pytest.mark.parametrize("keyword", REFUSED)
def test_what_would_be_left_out_is_refused(engine, keyword):
    with pytest.raises(ValueError, match=f'Unimplemented keys: ."{keyword}"'):
        engine.generate(["Once"], SamplingParams(json_schema=REFUSED[keyword]))
