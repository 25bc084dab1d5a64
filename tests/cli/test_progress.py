"""What a run says on a terminal, and that it says nothing elsewhere."""

import io
import sys

import pytest

from tinyspec import SamplingParams
from tinyspec.cli import progress as module
from tinyspec.cli.progress import Progress, summed_up


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(module, "PATIENCE", 0.0)
    monkeypatch.setattr(module, "EVERY", 0.0)


def run(engine, file, live=True):
    """Two prompts, one of them twice."""
    params = [SamplingParams(max_new_tokens=n, ignore_eos=True) for n in (3, 5, 5)]
    with engine.stream(["Once", "One day", "One day"], params) as events:
        most = {(r.request_id, 0): r.params.max_new_tokens for r in events.requests}
        progress = Progress(engine, most, file, live)
        with summed_up(engine, file, len(most)):
            for event in events:
                progress.event(event)
            progress.clear()
    return progress


def test_a_line_that_changes_and_one_that_stays(bundled, impatient):
    file = Terminal()
    before = bundled.stats().committed
    progress = run(bundled, file)
    assert bundled.stats().committed - before == 13
    *changing, last = file.getvalue().split("\r")
    assert last.startswith("tinyspec: 3 completions, 13 tokens in ") and last.endswith("\n")
    assert "prompt tokens cached" in last and "passes canonical" in last
    lines = [line.strip() for line in changing if line.strip()]
    assert lines[0].startswith("0 of 3 completions, ")
    assert lines[-1].startswith("3 of 3 completions, ") and lines[-1].endswith("at most 0:00 left")
    assert all(f" of {bundled.pool.num_pages} pages" in line for line in lines)
    assert len(changing[-1]) == len(changing[-2].rstrip("\r")), "it is written over"
    progress._most["another", 0] = 26
    assert progress.line(60.0).endswith("at most 2:00 left"), "by tokens: twice as many"


def test_quiet_elsewhere(bundled, impatient):
    file = io.StringIO()
    run(bundled, file)
    assert file.getvalue() == ""
    file = Terminal()
    run(bundled, file, live=False)
    assert "\r" not in file.getvalue() and file.getvalue().count("\n") == 1


def test_the_command_tells_it(command, served, monkeypatch, impatient, tmp_path):
    file = Terminal()
    monkeypatch.setattr(sys, "stderr", file)
    options = ("--max-new-tokens", 2, "--output", tmp_path / "outputs.jsonl")
    assert command("generate", "Once", *options)[0] == 0
    text = file.getvalue()
    assert "\r0 of 1 completions" in text or "\r1 of 1 completions" in text
    assert text.rstrip("\n").rpartition("\r")[2].startswith("tinyspec: 1 completions, ")


def test_scores_and_audits_are_summed_up(command, served, monkeypatch, tmp_path):
    """One line at the end, of this run alone; none where standard error is no terminal."""
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text('{"prompt": "One", "continuation": [5, 6, 7]}\n' * 2)
    assert command("score", "--file", pairs)[2] == ""
    file = Terminal()
    monkeypatch.setattr(sys, "stderr", file)
    assert command("score", "--file", pairs)[0] == 0
    last = file.getvalue().splitlines()[-1]
    assert last.startswith("tinyspec: 2 completions, 6 tokens in ") and "tokens/s" in last
    assert "prompt tokens cached" in last and "passes canonical" in last
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    _, out, _ = command("generate", "Once", "--deterministic", "--json", "--max-new-tokens", 4)
    outputs = tmp_path / "outputs.jsonl"
    outputs.write_text(out)
    file = Terminal()
    monkeypatch.setattr(sys, "stderr", file)
    assert command("audit", outputs, "--dtype", "float32")[0] in (0, 1)
    assert "tinyspec: 1 completions, " in file.getvalue()
