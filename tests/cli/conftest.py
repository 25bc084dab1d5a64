"""Commands on one engine of the bundled model, and what they print."""

import io
import sys
from contextlib import nullcontext

import pytest

from tinyspec import Engine
from tinyspec.cli import common
from tinyspec.cli.main import main
from tinyspec.tools.demo import BUNDLED


@pytest.fixture(scope="package")
def bundled():
    with Engine.from_pretrained(BUNDLED, device="cpu") as engine:
        yield engine


@pytest.fixture
def served(bundled, monkeypatch):
    """The commands do not load a model each, but take this engine; another may be put in its place
    as ``served[0]``."""
    engines = [bundled]
    monkeypatch.setattr(common, "engine_of", lambda *_, **__: nullcontext(engines[0]))
    return engines


@pytest.fixture
def stdin(monkeypatch):
    """Gives standard input its bytes."""

    def give(text):
        data = text if isinstance(text, bytes) else text.encode()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))

    return give


@pytest.fixture
def command(capsys):
    """Runs a command: its exit status, standard output and standard error."""

    def run(*arguments):
        try:
            status = main([str(argument) for argument in arguments])
        except SystemExit as error:
            status = error.code
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run
