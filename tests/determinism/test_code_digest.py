"""What of the package's own code is in the fingerprint and in the key of probe results."""

import ast
import shutil

import pytest
import torch

from tests.support.tiny import tiny
from tinyspec import Engine, EngineConfig
from tinyspec.determinism import fingerprint
from tinyspec.determinism.fingerprint import PACKAGE, syntax_digest
from tinyspec.determinism.results import package_digest
from tinyspec.model.checksum import row_checksums
from tinyspec.thinking.thinker import CODE

# One file of each wing that decides bits, twins and kernels apart.
FILES = ("kernels/sample.py", "kernels/twins/sample.py", "model/linears.py", "runner/sampler.py")


@pytest.fixture
def copy(tmp_path):
    """The package in another place."""
    ignored = shutil.ignore_patterns("__pycache__", "storyteller")
    return shutil.copytree(PACKAGE, tmp_path / "elsewhere" / "tinyspec", ignore=ignored)


def edit(path, change):
    before = path.read_text()
    after = change(before)
    assert after != before
    path.write_text(after)


def other_docstrings(text):
    """Formatted by ``ast``, too."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        documented = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        if documented and ast.get_docstring(node):
            node.body[0].value.value = "other words"
    return ast.unparse(tree)


def other_constant(text):
    tree = ast.parse(text)
    numbers = (n for n in ast.walk(tree) if isinstance(n, ast.Constant) and type(n.value) is int)
    next(numbers).value += 1
    return ast.unparse(tree)


def digests(root):
    """Of the wings that decide bits, and of every file."""
    return syntax_digest.__wrapped__(root), package_digest.__wrapped__(root)


def test_what_the_digests_see(copy):
    """The fingerprint's what decides bits, wherever it is installed; the key of results all."""
    own = digests(PACKAGE)
    assert digests(copy) == own
    for name in FILES:
        text = (copy / name).read_text()
        for change in (lambda text: text + "\n# a comment\n", other_docstrings):
            edit(copy / name, change)
            syntax, files = digests(copy)
            assert syntax == own[0] and files != own[1]
        edit(copy / name, other_constant)
        assert digests(copy)[0] != own[0]
        (copy / name).write_text(text)
    edit(copy / "scheduler" / "buckets.py", other_constant)
    assert digests(copy)[0] == own[0]
    (copy / "runner" / "sampler.py").rename(copy / "runner" / "picker.py")
    assert digests(copy)[0] != own[0]


def test_the_fingerprint_holds_it(monkeypatch):
    with Engine(tiny(), config=EngineConfig(linear="never")) as engine:
        own = engine.fingerprint
        engine.weights_changed()
        assert engine.fingerprint == own
        monkeypatch.setattr(fingerprint, "syntax_digest", lambda: "other code")
        engine.weights_changed()
        assert engine.fingerprint != own


def test_row_checksums():
    rows = torch.randn(5, 300)
    sums = row_checksums(rows)
    assert sums.shape == (5,) and len(set(sums.tolist())) == 5
    assert torch.equal(row_checksums(rows[2:4]), sums[2:4]), "a row's sum is its own"
    swapped = rows.clone()
    swapped[1, 3], swapped[1, 200] = rows[1, 200], rows[1, 3]
    assert (row_checksums(swapped) != sums).tolist() == [False, True, False, False, False]
    for nan in (torch.nan, -torch.nan):
        rows[0, 7] = nan
        swapped[0, 7] = torch.nan
        assert row_checksums(rows)[0] == row_checksums(swapped)[0]


@pytest.mark.parametrize("name", CODE)
def test_code_of_thinking_has_a_digest_of_its_own(copy, name):
    of_thinking = lambda root: syntax_digest.__wrapped__(root, CODE)  # noqa: E731
    assert of_thinking(copy) == of_thinking(PACKAGE)
    edit(copy / name, other_docstrings)
    assert of_thinking(copy) == of_thinking(PACKAGE)
    (copy / name).write_text((copy / name).read_text() + "\nMORE = 1\n")
    assert of_thinking(copy) != of_thinking(PACKAGE)
    assert syntax_digest.__wrapped__(copy) == syntax_digest.__wrapped__(PACKAGE)
