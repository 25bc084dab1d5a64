"""What measures models with recurrent layers runs, and prints a table."""

import sys

from benchmarks import bench_hybrid


def test_smoke(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench_hybrid", "--smoke"])
    bench_hybrid.main()
    head, rule, row = capsys.readouterr().out.splitlines()
    assert row.startswith("| smoke |") and len({line.count("|") for line in (head, rule, row)}) == 1
