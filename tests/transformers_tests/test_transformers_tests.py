"""The command that runs transformers' own tests: what it finds and prints."""

import subprocess
import sys
from pathlib import Path

import pytest

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
    assert "3 tests, of which 3 pass unpatched; of these fail patched:" in ran.stdout
    broken = [line for line in ran.stdout.splitlines() if line.startswith("tests.generation")]
    assert len(broken) == 1 and "test_some.test_breaks: Assert" in broken[0]
    assert "3 of patched models" in ran.stdout and "num_beams=2" in ran.stdout
