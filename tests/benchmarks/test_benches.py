"""What measures drafts, models with recurrent layers and thinking runs, and prints a table; the
pair that drafts are measured with is what it says."""

import json
import sys

import pytest
import torch

from benchmarks import bench_drafts, bench_hybrid, bench_thinking
from benchmarks.storyteller import pair
from tinyspec.tools.demo import THINKER


def printed(bench, monkeypatch, capsys, *options):
    """The lines that it prints when it is to be short."""
    monkeypatch.setattr(sys, "argv", [bench.__name__, "--smoke", *options])
    bench.main()
    return capsys.readouterr().out.splitlines()


def test_drafts(monkeypatch, capsys):
    _, _, head, rule, *rows = printed(bench_drafts, monkeypatch, capsys, "--threads", "1")
    rows, costs = rows[:6], rows[7:]
    assert all(row.startswith(("| stories |", "| repeats |")) for row in rows) and len(costs) == 2
    assert {line.count("|") for line in (head, rule, *rows)} == {len(bench_drafts.HEADER) + 1}


def test_hybrid(monkeypatch, capsys):
    lines = printed(bench_hybrid, monkeypatch, capsys)
    assert lines[2].startswith("| smoke |") and len(lines) == 3
    assert len({line.count("|") for line in lines}) == 1


def test_assistants_learn(tmp_path):
    """A few steps bring one closer; what was made is not made again."""
    small = pair.bundled()
    ids, _ = next(pair.documents())
    ids = torch.tensor([ids])

    def distance(model):
        with torch.no_grad():
            return pair.divergence(model(ids).logits, small(ids).logits).item()

    before = distance(pair.distilled(small, 1, steps=0))
    path = pair.made("1", tmp_path, steps=12)
    written = (path / "model.safetensors").stat().st_mtime_ns
    assert distance(pair.bundled(path)) < 0.8 * before
    assert pair.made("1", tmp_path).joinpath("model.safetensors").stat().st_mtime_ns == written


@pytest.mark.slow("thinking", 6)
def test_against_chains_of_thought(tmp_path, capsys):
    """All answer the same prompts; here all are the model that thinks."""
    found, model = tmp_path / "found.json", str(THINKER)
    given = [model, "--chain", model, "--retold", model, "--rounds", "1", "--flips", "3"]
    given += ["--batches", "2", "--operations", "3", "--count", "4", "--json", str(found)]
    bench_thinking.main(given)
    ways = json.loads(found.read_text())[-3:]
    assert [way["way"] for way in ways] == ["thoughts", "chain", "retold"]
    assert ways[0]["right"] == 1.0 and all(0 <= way["right"] <= 1 for way in ways)
    assert "thoughts: right | ms" in capsys.readouterr().out
