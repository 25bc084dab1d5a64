"""Controls of the fuzzer: with a mend taken back it has a finding within 50 runs of its class, and
none in the same run with the mend in place."""

from __future__ import annotations

import pytest

from tests.fuzz import worker
from tests.fuzz.draws import draw
from tests.fuzz.influences import TABLE
from tests.fuzz.mends import MENDS, take_back
from tests.fuzz.runs import run

RUNS = 50


@pytest.mark.slow("fuzz controls", 60)
@pytest.mark.parametrize("name", MENDS)
def test_what_is_taken_back_is_found(name):
    classes = MENDS[name].classes
    with pytest.MonkeyPatch.context() as patches:
        take_back(name, patches)
        patches.setattr(worker, "taken_back", name)
        number = next((n for n in range(RUNS) if run(draw("control", n, classes)).findings), None)
    assert number is not None, f"nothing found in {RUNS} runs of {classes}"
    assert run(draw("control", number, classes)).findings == []


def test_classes_are_in_the_table():
    assert {one for mend in MENDS.values() for one in mend.classes} <= set(TABLE)
