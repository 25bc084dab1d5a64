"""The command that runs transformers' own tests: what it finds, counts and prints."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.transformers_tests.tables import broken, calls, outcomes

PASSED, FAILED = {"outcome": "passed", "calls": {}}, {"outcome": "failed", "calls": {}}


def test_only_tests_that_pass_unpatched_are_broken():
    """Failing both ways, skipped, or not run at all patched."""
    own = {"a": PASSED, "b": PASSED, "c": FAILED, "d": PASSED}
    patched = {"a": PASSED, "b": FAILED | {"error": "E\nValueError: x"}, "c": FAILED}
    assert broken(own, patched) == ["b", "d"]
    table = outcomes(own, patched)
    assert "- b: ValueError: x" in table and "- d: not run" in table


def test_calls_are_summed_by_reason():
    tests = {"a": {"calls": {"served": 3, "num_beams=2": 1}}, "b": {"calls": {"num_beams=2": 4}}}
    table = calls(tests)
    assert "| served by tinyspec | 3 |" in table and "num_beams=2 | 5 |" in table
    assert "| all | 8 |" in table


SOURCES = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 64}


def model():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).eval()


def test_served():
    assert model().generate(torch.tensor([[5, 6]]), max_new_tokens=3).shape[1] <= 5


def test_handed_back():
    model().generate(torch.tensor([[5, 6]]), max_new_tokens=3, num_beams=2)


def test_breaks():
    served = model()
    served.generate(torch.tensor([[5, 6]]), max_new_tokens=3)
    assert "generate" not in vars(served)
"""


@pytest.mark.slow("environments", 60)
def test_the_command_tells_what_breaks(tmp_path):
    folder = tmp_path / "tests" / "generation"
    folder.mkdir(parents=True)
    (tmp_path / "tests" / "__init__.py").touch()
    (folder / "__init__.py").touch()
    (folder / "test_some.py").write_text(SOURCES)
    command = [sys.executable, "-m", "tests.transformers_tests", str(tmp_path)]
    root = Path(__file__).parents[2]
    ran = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "| generation/test_some | 3 | 3 | 1 |" in ran.stdout
    assert "::test_breaks: " in ran.stdout
    assert "| served by tinyspec | 2 |" in ran.stdout
    assert "(num_beams=2) | 1 |" in ran.stdout
