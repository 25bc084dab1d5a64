"""Texts of requests that grow together, one after the other."""

import io

from tinyspec import Completion, RequestOutput, SamplingParams, StreamEvent
from tinyspec.cli.generate import TextWriter

KEYS = [("a", 0), ("a", 1), ("b", 0)]
EVENTS = [("b", 0, "x"), ("a", 0, "1"), ("b", 0, "y."), ("a", 1, "3."), ("a", 0, "2.")]


def test_live():
    """The first unfinished one at once, the others when it is their turn."""
    file = io.StringIO()
    writer = TextWriter(KEYS, file, live=True)
    seen = []
    for name, index, text in EVENTS:
        end = "stop" if text.endswith(".") else None
        writer.event(StreamEvent(name, index, [1], text, finish_reason=end))
        seen.append(file.getvalue())
    assert seen == ["", "1", "1", "1", "12.\n3.\nxy.\n"]


def test_as_a_whole():
    """Not from the pieces, which may lack what only the whole text shows."""
    file = io.StringIO()
    writer = TextWriter(KEYS, file, live=False)

    def output(name, *texts):
        completions = [Completion([1], text, finish_reason="stop") for text in texts]
        return RequestOutput(name, [1], SamplingParams(), completions)

    writer.event(StreamEvent("a", 0, [1], "piece"))
    writer.output(output("b", "third"))
    assert file.getvalue() == ""
    writer.output(output("a", "first", "second"))
    assert file.getvalue() == "first\nsecond\nthird\n"
