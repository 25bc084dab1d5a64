"""Test-wide set-up, done before triton or NumPy can be imported."""

import os
import shutil
import tempfile

# What probes find is kept under HF_HOME: the machine's is not used, nor is anything left there.
os.environ["HF_HOME"] = tempfile.mkdtemp(prefix="tinyspec-tests-")
# NumPy's OpenBLAS is not slot-invariant by default; interpreted kernels multiply through it.
os.environ.setdefault("OPENBLAS_CORETYPE", "Nehalem")
# Tiny passes: a worker thread that spins between them takes the core from whoever has work.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch
import transformers

from tests.support import signals

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

transformers.logging.set_verbosity_error()
# Tiny models are quickest so; tests in which threads matter ask for more.
torch.set_num_threads(1)


def pytest_unconfigure() -> None:
    shutil.rmtree(os.environ["HF_HOME"], ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        absent = pytest.mark.skip(reason="needs a CUDA device")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(absent)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def two_threads():
    """Two threads, so that work is cut at other places than with one."""
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.fixture
def no_results_on_disk(monkeypatch):
    """For models whose linears a test replaces, which the key of probe results does not see."""
    from tinyspec.determinism import probe_cache

    monkeypatch.setattr(probe_cache, "load", lambda key: None)
    monkeypatch.setattr(probe_cache, "store", lambda key, results: None)


@pytest.fixture
def sigint():
    """SIGINT raises KeyboardInterrupt, also where the tests were started with it ignored."""
    with signals.handled_by():
        yield
