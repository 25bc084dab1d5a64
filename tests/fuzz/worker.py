"""Runs of the fuzzer in processes that were started with other environment variables.

``outputs_of`` asks such a process, which lives as long as few others are needed; started as a
script this module is one: it reads (seed, number, threads) and writes outputs, lines of JSON.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import pytest

from tests.fuzz.tally import ROOT

if TYPE_CHECKING:
    from tests.fuzz.draws import RunDraw

# Processes that are kept; each holds a few hundred MiB.
KEPT = 2
_MARK = "outputs "
# A mend that the processes are to take back (see mends.py).
taken_back = ""
_workers: OrderedDict[tuple[tuple[str, str], ...], subprocess.Popen[str]] = OrderedDict()


def _worker(variables: tuple[tuple[str, str], ...]) -> subprocess.Popen[str]:
    """The process with these variables; the one that was used longest ago makes room."""
    if variables not in _workers:
        while len(_workers) >= KEPT:
            _end(_workers.popitem(last=False)[1])
        _workers[variables] = subprocess.Popen(
            [sys.executable, "-m", "tests.fuzz.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, **dict(variables)},
        )
    _workers.move_to_end(variables)
    return _workers[variables]


def _end(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    process.wait()


@atexit.register
def end_all() -> None:
    """End all processes."""
    while _workers:
        _end(_workers.popitem()[1])


def outputs_of(draw: RunDraw) -> list[tuple[str, Any]]:
    """(where, numbered outputs) of a run, alone and in the crowd, in a process with the variables
    of its influence."""
    from tinyspec import DeterminismError, RequestOutput

    assert draw.influence is not None
    process = _worker(draw.influence.environment)
    assert process.stdin is not None and process.stdout is not None
    asked = {"seed": draw.seed, "number": draw.number, "classes": draw.classes}
    process.stdin.write(json.dumps([taken_back, asked]) + "\n")
    process.stdin.flush()
    found: list[tuple[str, Any]] = []
    for line in process.stdout:
        if not line.startswith(_MARK):
            continue
        answer = json.loads(line.removeprefix(_MARK))
        if "error" in answer:
            raise (DeterminismError if answer["refused"] else RuntimeError)(answer["error"])
        if "end" in answer:
            return found
        outputs = [
            (number, RequestOutput.from_json(output)) for number, output in answer["outputs"]
        ]
        found.append((answer["where"], outputs))
    del _workers[draw.influence.environment]
    raise RuntimeError(f"the process with {draw.influence.name} has ended")


def _tell(**answer: Any) -> None:
    print(_MARK + json.dumps(answer), flush=True)


def _answer(mend: str, asked: dict[str, Any]) -> None:
    from tests.fuzz.mends import take_back

    with pytest.MonkeyPatch.context() as patches:
        if mend:
            take_back(mend, patches)
        _carry_out(asked)


def _carry_out(asked: dict[str, Any]) -> None:
    from dataclasses import replace

    from tests.fuzz import draws, runs

    draw = replace(draws.draw(**asked), influence=None, inside=False)
    try:
        with runs.threads(draw.threads):
            found = runs.alone(draw, None)
            _outputs("alone", found)
            truths = [[*draw.needles[n].prompt, *o.completions[0].token_ids] for n, o in found]
            crowded: list[Any] = []
            runs.crowd(draw, truths, crowded)
            for where, outputs in crowded:
                _outputs(where, outputs)
        _tell(end=True)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        _tell(error=text, refused=runs.refused(error))


def _outputs(where: str, outputs: Any) -> None:
    _tell(where=where, outputs=[(number, output.to_json()) for number, output in outputs])


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    for question in sys.stdin:
        _answer(*json.loads(question))
