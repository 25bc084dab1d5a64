"""The benchmark of thinking runs."""

import json

import pytest

from benchmarks import bench_thinking


@pytest.mark.slow("thinking", 6)
def test_against_chains_of_thought(tmp_path, capsys):
    """All answer the same prompts; here all are the model that thinks."""
    from tinyspec.tools.demo import THINKER

    found, model = tmp_path / "found.json", str(THINKER)
    given = [model, "--chain", model, "--retold", model, "--rounds", "1", "--flips", "3"]
    given += ["--batches", "2", "--operations", "3", "--count", "4", "--json", str(found)]
    bench_thinking.main(given)
    ways = json.loads(found.read_text())[-3:]
    assert [way["way"] for way in ways] == ["thoughts", "chain", "retold"]
    assert ways[0]["right"] == 1.0 and all(0 <= way["right"] <= 1 for way in ways)
    assert "thoughts: right | ms" in capsys.readouterr().out
