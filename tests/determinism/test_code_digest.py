"""What of the package's own code is in the fingerprint and in the key of probe results."""

import shutil

import pytest
import torch

from tests.support.tiny import tiny
from tinyspec import Engine, EngineConfig
from tinyspec.determinism import fingerprint
from tinyspec.determinism.fingerprint import WINGS
from tinyspec.determinism.results import PACKAGE, code_digest
from tinyspec.model.checksum import row_checksums

# One file of each wing that decides bits, twins and kernels apart.
FILES = ("kernels/sample.py", "kernels/twins/sample.py", "model/linears.py", "runner/sampler.py")


@pytest.fixture
def copy(tmp_path):
    """A package of these files and a few more."""
    for name in (*FILES, "scheduler/buckets.py", "thinking/taps.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(PACKAGE / name, tmp_path / name)
    return tmp_path


def digests(root):
    """Of the wings that decide bits, of thinking's, and of every file."""
    found = (code_digest.__wrapped__(*of, root=root) for of in (WINGS, ("thinking",), ()))
    return dict(zip(("passes", "thinking", "all"), found, strict=True))


def test_what_the_digests_see(copy, tmp_path_factory):
    """The fingerprint's what decides bits, wherever it is installed; the key of results all."""
    own = digests(copy)
    assert digests(shutil.copytree(copy, tmp_path_factory.mktemp("elsewhere") / "p")) == own
    seen = {name: {"passes", "all"} for name in FILES}
    seen |= {"thinking/taps.py": {"thinking", "all"}, "scheduler/buckets.py": {"all"}}
    for name, kinds in seen.items():
        text = (copy / name).read_text()
        (copy / name).write_text(text + "x = 1\n")
        found = digests(copy)
        assert {kind for kind in own if found[kind] != own[kind]} == kinds, name
        (copy / name).write_text(text)
    assert digests(copy) == own
    (copy / "runner" / "sampler.py").rename(copy / "runner" / "picker.py")
    assert digests(copy)["passes"] != own["passes"]


def test_the_fingerprint_holds_it(monkeypatch):
    with Engine(tiny(), config=EngineConfig(linear="never")) as engine:
        own = engine.fingerprint
        engine.weights_changed()
        assert engine.fingerprint == own
        monkeypatch.setattr(fingerprint, "code_digest", lambda *_: "other code")
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
