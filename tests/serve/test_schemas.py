"""Patterns in schemas: those are refused, by name, that a mask could take seconds for."""

import pytest

from tests.support.serving import CHAT, MESSAGES
from tinyspec.serve.schemas import repeated
from tinyspec.serve.tools import HERMES


@pytest.mark.parametrize(
    "pattern, product",
    [
        ("a{3}", 0),
        ("(a{2,3}b){4}", 12),
        (r"\{5\}(a{3,}){2}", 6),
        ("[({]{3}(a|[]{9}]){2}", 0),
        ("a{2}{3}", 6),
        ("((((.{1,9}){1,9}e){1,9}){1,9}x){1,9}", 9**5),
        ("(a{0}b{3})(c{9})", 0),
        (")(a{x}{", 0),
    ],
)
def test_counts_within_counts(pattern, product):
    assert repeated(pattern) == product


def bodies(pattern):
    """What a pattern may stand in."""
    schema = {"type": "array", "items": {"type": "string", "pattern": pattern}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    yield CHAT, {"messages": MESSAGES, "response_format": form}
    text = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
    yield "/v1/responses", {"input": "x", "text": text}


@pytest.mark.parametrize("pattern", ["(.{0,50}(the|a).{0,50}){1,30}", "a" * 1001])
def test_refused(served, pattern):
    for (path, body), (_, small) in zip(bodies(pattern), bodies("ab?"), strict=True):
        body["max_output_tokens" if "input" in body else "max_tokens"] = 2
        answer = served.post(path, **body)
        message = answer.json()["error"]["message"]
        assert answer.status_code == 400, message
        assert "pattern" in message and "at most" in message
        assert served.post(path, **{**body, **small}).status_code == 200
    served.settled()
    tool = {"name": "f", "parameters": {"type": "object", "patternProperties": {pattern: {}}}}
    with pytest.raises(ValueError, match=r"pattern.*at most"):
        HERMES.constraint([tool])
