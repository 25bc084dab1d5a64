"""What a call says while it waits."""

import io
import sys

import pytest

from tinyspec.determinism import notice


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("kind", [Terminal, io.StringIO])
def test_at_first_nothing_then_more_and_more_rarely(monkeypatch, caplog, kind):
    now, file, pauses = [0.0], kind(), []
    monkeypatch.setattr(notice.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(sys, "stderr", file)
    said = notice.Notice("proving", lambda: pauses.append(1))
    with caplog.at_level("INFO", logger="tinyspec"):
        for second in range(1, 31):
            now[0] = float(second)
            said()
    lines = ["proving", "proving (7 steps in 7 s)", "proving (15 steps in 15 s)"]
    assert caplog.messages == lines and len(pauses) == 30
    shown = [f"tinyspec: {line}" for line in lines] if kind is Terminal else []
    assert file.getvalue().splitlines() == shown


def test_it_tells_how_far(monkeypatch, caplog):
    now, stages = [0.0], iter(["1 of 4, linear layers: 2 of 7", "3 of 4, attention"])
    monkeypatch.setattr(notice.time, "perf_counter", lambda: now[0])
    said = notice.Notice("proving", stage=lambda: next(stages))
    with caplog.at_level("INFO", logger="tinyspec"):
        for second in (3, 9):
            now[0] = float(second)
            said()
    first, second = caplog.messages
    assert first == "proving (step 1 of 4, linear layers: 2 of 7)"
    assert second == "proving (step 3 of 4, attention; 2 steps in 9 s)"
