"""What of the package's own code is in the fingerprint and in the key of probe results."""

import ast
import shutil

import pytest
import torch

from tests.support.tiny import tiny
from tinyspec import Engine, EngineConfig
from tinyspec.determinism import fingerprint, probe_cache
from tinyspec.determinism.code_digest import PACKAGE, file_digest, syntax_digest
from tinyspec.engine.thinker import CODE
from tinyspec.model.checksum import row_checksums

# One file of each wing that decides bits, twins and kernels apart.
FILES = ("kernels/philox.py", "kernels/twins/philox.py", "model/row_tiles.py", "runner/sampler.py")
digest_of = {
    "syntax": syntax_digest.__wrapped__,
    "files": file_digest.__wrapped__,
}


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


@pytest.mark.parametrize("kind", digest_of)
def test_the_place_of_installation_is_no_part(copy, kind):
    assert digest_of[kind](copy) == digest_of[kind](PACKAGE)


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


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda text: text + "\n# a comment\n", id="comment"),
        pytest.param(other_docstrings, id="docstrings and formatting"),
    ],
)
def test_what_the_fingerprint_does_not_see(copy, name, change):
    edit(copy / name, change)
    assert syntax_digest(copy) == syntax_digest(PACKAGE)
    assert file_digest(copy) != file_digest(PACKAGE)


def test_code_that_decides_no_bit(copy):
    edit(copy / "scheduler" / "buckets.py", other_constant)
    assert syntax_digest(copy) == syntax_digest(PACKAGE)
    assert file_digest(copy) != file_digest(PACKAGE)


@pytest.mark.parametrize("name", FILES)
def test_a_changed_constant(copy, name):
    edit(copy / name, other_constant)
    assert syntax_digest(copy) != syntax_digest(PACKAGE)
    assert file_digest(copy) != file_digest(PACKAGE)


def test_a_moved_file(copy):
    (copy / "runner" / "sampler.py").rename(copy / "runner" / "picker.py")
    assert syntax_digest(copy) != syntax_digest(PACKAGE)


def test_the_fingerprint_holds_it(monkeypatch):
    with Engine(tiny(), config=EngineConfig(linear="never")) as engine:
        own = engine.fingerprint
        engine.weights_changed()
        assert engine.fingerprint == own
        monkeypatch.setattr(fingerprint, "syntax_digest", lambda: "other code")
        engine.weights_changed()
        assert engine.fingerprint != own


def test_the_key_of_probe_results_covers_every_file(copy, monkeypatch):
    """Kernels included: what they did before says nothing of what they do now."""
    own = probe_cache.key_of("fingerprint", "settings")
    monkeypatch.setattr(probe_cache, "file_digest", lambda: file_digest(copy))
    assert probe_cache.key_of("fingerprint", "settings") == own
    edit(copy / "kernels" / "linear.py", lambda text: text + "\nOTHER = 1\n")
    file_digest.cache_clear()
    assert probe_cache.key_of("fingerprint", "settings") != own


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
