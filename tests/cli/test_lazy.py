"""What needs no model loads no library: help, versions, settings."""

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import tinyspec
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
print((texts, [name for name in %s if name in sys.modules], time.process_time()))
"""
NAMES = list(COMMANDS)


def test_help_and_settings_load_no_library():
    calls = [["--help"], ["--version"], *([name, "--help"] for name in NAMES)]
    child = [sys.executable, "-c", CHILD % (calls, HEAVY)]
    done = subprocess.run(child, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    texts, loaded, seconds = ast.literal_eval(done.stdout)
    assert loaded == []
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
        assert getattr(tinyspec, name) is getattr(import_module(home), name)
    assert set(tinyspec.__all__) <= set(dir(tinyspec))


def test_names_that_are_not_there():
    with pytest.raises(AttributeError, match="has no attribute 'Egnine'"):
        _ = tinyspec.Egnine
    with pytest.raises(ImportError, match="Egnine"):
        exec("from tinyspec import Egnine")
