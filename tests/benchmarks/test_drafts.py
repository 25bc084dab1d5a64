"""What measures drafts runs, and prints a table; the pair that it measures with is what it says."""

import sys

import torch

from benchmarks import bench_drafts
from benchmarks.storyteller import pair


def test_smoke(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench_drafts", "--smoke", "--threads", "1"])
    bench_drafts.main()
    _, _, head, rule, *rows = capsys.readouterr().out.splitlines()
    rows, costs = rows[:6], rows[7:]
    assert all(row.startswith(("| stories |", "| repeats |")) for row in rows) and len(costs) == 2
    assert {line.count("|") for line in (head, rule, *rows)} == {len(bench_drafts.HEADER) + 1}


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
