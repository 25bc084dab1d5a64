"""The fuzzer: random models, crowds, settings and influences from outside, against requests alone.

pytest tests/fuzz/test_fuzz.py -m slow --seed 3            # ten minutes, resumed next time
pytest tests/fuzz/test_fuzz.py -m slow --seed 3 --number 17
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.fuzz.draws import draw
from tests.fuzz.influences import TABLE
from tests.fuzz.runs import command, run
from tests.fuzz.tally import ROOT, Tally
from tests.support.budget import first, quota

MINUTES = 10


def told(result):
    """A finding, and how to have it again."""
    found = "\n  ".join(result.findings)
    return f"\n{command(result.draw)}\n{result.draw}\n  {found}"


@pytest.mark.parametrize("number", first(1, (1, 0), 7))
def test_a_few_runs(number):
    result = run(draw("smoke", number))
    assert result.findings == [], told(result)
    assert result.counts["compared"] > 0


def test_a_draw_is_a_function_of_seed_and_number():
    for number in range(6):
        assert str(draw("a", number)) == str(draw("a", number))
    assert len({str(draw("a", number)) for number in range(6)}) == 6
    assert str(draw("a", 1)) != str(draw("b", 1))


@pytest.mark.slow("fuzz", 60 * MINUTES)
@pytest.mark.usefixtures("proven_on_demand")
def test_fuzz(request):
    """With engines that prove buckets while requests run."""
    option = request.config.getoption
    seed, number = option("--seed"), option("--number")
    classes = tuple(filter(None, (option("--influences") or "").split(",")))
    assert set(classes) <= set(TABLE), f"influences are: {', '.join(TABLE)}"
    if number is not None:
        result = run(draw(seed, number, classes))
        print(result.draw, dict(result.counts), *result.refusals, sep="\n")
        assert result.findings == [], told(result)
        return
    path = Path(option("--tally") or ROOT / ".pytest_cache" / "fuzz.json")
    tally = Tally(path, f"{seed} {','.join(classes)}".strip())
    ends = time.monotonic() + (quota(request.config, "fuzz") or 60 * MINUTES)
    before = len(tally.findings)
    while time.monotonic() < ends:
        began = time.monotonic()
        result = run(draw(seed, tally.runs, classes))
        tally.add(result, command(result.draw), time.monotonic() - began)
        if result.findings:
            print(told(result), flush=True)
    print(tally)
    new = tally.findings[before:]
    assert new == [], "\n".join(f"{one['command']}\n  {one['found'][0]}" for one in new)
