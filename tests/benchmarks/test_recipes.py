"""The recipes as they are written: each shows what it says, and would notice if it were not so."""

import runpy
from pathlib import Path

import numpy as np
import pytest

from tests.support.budget import first
from tinyspec import Engine

FOLDER = Path(__file__).parents[2] / "benchmarks" / "recipes"
SHOWN = {
    "rl_rollouts": "3 fingerprints, one for each state of the weights",
    "evaluation_twice": "the same, to the last digit",
    "audit_transcript": "as published is this model's; both changes were found",
    "unchanged_generate": "four together and each alone: 4 of 4 equal",
    "rl_exact": "with tinyspec exactly 0 in all 3 steps",
    "lm_eval_twice": "the same, to the last digit",
    "ray_actors": "the same digest, whatever died",
}
# What a recipe imports, and which of its options make it short.
NEEDS = {"rl_exact": "trl", "lm_eval_twice": "lm_eval", "ray_actors": "ray"}
OPTIONS = {"rl_exact": ["--smoke"]}


def test_all_are_here():
    assert {path.stem for path in FOLDER.glob("*.py")} == set(SHOWN)


@pytest.mark.parametrize("name", first(1, SHOWN, 8))
def test_it_shows_what_it_says(name, capsys, monkeypatch):
    path = FOLDER / f"{name}.py"
    assert f"python benchmarks/recipes/{name}.py" in path.read_text()
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    monkeypatch.setattr("sys.argv", [str(path), *OPTIONS.get(name, [])])
    runpy.run_path(str(path), run_name="__main__")
    assert SHOWN[name] in capsys.readouterr().out


@pytest.mark.parametrize(
    "name", first(1, ["audit_transcript", "rl_rollouts", "evaluation_twice"], 4)
)
def test_control_a_single_bit_is_noticed(name, monkeypatch):
    """Every second call gives a log-probability whose last bit is another."""
    whole, calls = Engine.generate, []

    def generate(self, *args, **kwargs):
        outputs = whole(self, *args, **kwargs)
        calls.append(self)
        if len(calls) % 2 == (name == "audit_transcript"):
            completion = outputs[0].completions[0]
            changed = np.nextafter(np.float32(completion.logprobs[0]), np.float32(-9))
            completion.logprobs[0] = float(changed)
        return outputs

    monkeypatch.setattr(Engine, "generate", generate)
    with pytest.raises(AssertionError):
        runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
