"""The page that a newcomer opens: its wings, files and the way of a prompt are the package's."""

import re
import sys
from pathlib import Path

import pytest

import tinyspec
from tests.support.cases import engine_of, model_of
from tests.test_structure import WINGS
from tinyspec import SamplingParams

PACKAGE = Path(tinyspec.__file__).parent
PAGE = (PACKAGE / "README.md").read_text()
DRAWN, WAY = (PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0] for title in ("Rooms", "Way"))
STEPS = re.findall(r"^\| `([\w/]+\.py)` \| `([\w.]+)` \|", WAY, re.MULTILINE)


def entered(engine, prompt, params):
    """Functions of the package, (file, qualified name), in the order in which a request enters each
    for the first time."""
    found = {}

    def note(frame, event, _):
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(f"{PACKAGE}/"):
            name = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)
            found.setdefault((file.removeprefix(f"{PACKAGE}/"), name))

    engine.generate([prompt], params)  # what is made once
    sys.setprofile(note)
    try:
        engine.generate([[*prompt, 1]], params)
    finally:
        sys.setprofile(None)
    return list(found)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="functions do not know their classes")
def test_the_way_of_a_prompt():
    with engine_of(model_of("llama"), verify="always", backend="torch") as engine:
        order = entered(engine, [3, 4, 5], SamplingParams(max_new_tokens=6, deterministic=True))
    assert len(STEPS) > 10 and set(STEPS) <= set(order), set(STEPS) - set(order)
    assert sorted(STEPS, key=order.index) == STEPS


def test_every_wing_is_drawn_in_its_place():
    drawn = re.findall(r"^\| .*$", DRAWN, re.MULTILINE)[2:]
    rows = [set(re.findall(r"`(\w+)/`", line.split("|")[1])) for line in drawn]
    assert rows == [set(row) for row in WINGS]


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`([\w/]+\.(?:py|md))`", PAGE))))
def test_files_are_there(name):
    assert (PACKAGE / name).exists() or (PACKAGE.parent / name).exists(), name
