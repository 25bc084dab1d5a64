"""Runs of the fuzzer in processes that were started with other environment variables.

``outputs_of`` starts such a process; as a script this module is one: it reads a mend that is taken
back and what says which run it is, and writes outputs, lines of JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tinyspec import DeterminismError, RequestOutput

if TYPE_CHECKING:
    from tests.fuzz.draws import RunDraw

ROOT = Path(__file__).parents[2]
_MARK = "outputs "
# A mend that the processes are to take back (see mends.py).
taken_back = ""


def outputs_of(draw: RunDraw) -> list[tuple[str, Any]]:
    """(where, numbered outputs) of a run, alone and in the crowd, in a process with the variables
    of its influence."""
    assert draw.influence is not None
    asked = {"seed": draw.seed, "number": draw.number, "classes": draw.classes}
    process = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.worker"],
        input=json.dumps([taken_back, asked]),
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, **dict(draw.influence.environment)},
        check=True,
    )
    found: list[tuple[str, Any]] = []
    for line in process.stdout.splitlines():
        if not line.startswith(_MARK):
            continue
        answer = json.loads(line.removeprefix(_MARK))
        if "error" in answer:
            raise (DeterminismError if answer["refused"] else RuntimeError)(answer["error"])
        outputs = [(n, RequestOutput.from_json(output)) for n, output in answer["outputs"]]
        found.append((answer["where"], outputs))
    return found


def _tell(**answer: Any) -> None:
    print(_MARK + json.dumps(answer), flush=True)


def _outputs(where: str, outputs: Any) -> None:
    _tell(where=where, outputs=[(number, output.to_json()) for number, output in outputs])


def _carry_out(asked: dict[str, Any]) -> None:
    from tests.fuzz import draws, runs

    draw = replace(draws.draw(**asked), influence=None, inside=False)
    try:
        with runs.threads(draw.threads):
            found = runs.alone(draw, None)
            _outputs("alone", found)
            crowded: list[Any] = []
            runs.crowd(draw, runs.truths_of(draw, found), crowded)
            for where, outputs in crowded:
                _outputs(where, outputs)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        _tell(error=text, refused=runs.refused(error))


if __name__ == "__main__":
    import torch

    from tests.fuzz.mends import take_back

    torch.set_num_threads(1)
    mend, question = json.load(sys.stdin)
    with pytest.MonkeyPatch.context() as patches:
        if mend:
            take_back(mend, patches)
        _carry_out(question)
