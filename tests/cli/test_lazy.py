"""What needs no model loads no library: help, versions, settings."""

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import tinyspec
from tinyspec import Completion, RequestOutput, SamplingParams
from tinyspec.cli.main import COMMANDS

HEAVY = ("torch", "triton", "transformers", "numpy", "fastapi", "uvicorn", "openai", "pydantic")
CHILD = """
import contextlib, io, sys, time
from tinyspec.cli.main import main
texts = {}
for arguments in %s:
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        main(arguments)
    texts[" ".join(arguments)] = text.getvalue()
from tinyspec import SamplingParams
SamplingParams(temperature=1.0)
seconds = time.process_time()
import tinyspec.serve.probe
print((texts, [name for name in %s if name in sys.modules], seconds))
"""
NAMES = list(COMMANDS)


def test_what_needs_no_model_loads_no_library(tmp_path):
    """Help, versions, settings, a comparison of outputs, the probe of a server."""
    output = RequestOutput("a", [5], SamplingParams(), [Completion([6], finish_reason="stop")])
    (tmp_path / "outputs.jsonl").write_text(output.to_json())
    calls = [["--help"], ["--version"], *([name, "--help"] for name in NAMES)]
    calls.append(["diff", *[str(tmp_path / "outputs.jsonl")] * 2])
    child = [sys.executable, "-c", CHILD % (calls, HEAVY)]
    done = subprocess.run(child, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    texts, loaded, seconds = ast.literal_eval(done.stdout)
    assert loaded == [] and "1 same" in texts[" ".join(calls[-1])]
    assert seconds < 1, "of them all"
    assert texts["--version"].count("\n") == 1
    for name in ("tinyspec ", "Python ", "torch 2.", "transformers ", "triton "):
        assert name in texts["--version"]
    for name in NAMES:
        assert name in texts["--help"]
        assert f"example:\n  tinyspec {name}" in texts[f"{name} --help"]


def test_names_are_where_type_checkers_find_them():
    """The list for imports on demand says the same."""
    nodes = ast.parse(Path(tinyspec.__file__).read_text()).body
    (branch,) = (node for node in nodes if isinstance(node, ast.If))
    homes = {alias.name: node.module for node in branch.body for alias in node.names}
    assert sorted(homes) == list(tinyspec.__all__)
    for name, home in homes.items():
        found = getattr(tinyspec, name)
        assert found is getattr(import_module(home), name) and found.__doc__
    assert set(tinyspec.__all__) <= set(dir(tinyspec))


def test_names_that_are_not_there():
    with pytest.raises(AttributeError, match="has no attribute 'Egnine'"):
        _ = tinyspec.Egnine
    with pytest.raises(ImportError, match="Egnine"):
        exec("from tinyspec import Egnine")
