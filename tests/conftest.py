"""Test-wide set-up, done before triton or NumPy can be imported."""

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from typing import Any

# What probes find is kept under HF_HOME: the machine's is not used, nor is anything left there.
# The workers of one run share what they find.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["HF_HOME"] = tempfile.mkdtemp(prefix="tinyspec-tests-")
# No test needs the hub: a missing model is not looked for over the network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Tiny passes: a worker thread that spins between them takes the core from threads with work.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch
import transformers

from tests.support import budget, signals
from tests.support.interpreter import products_in_order, quick_look_ups

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    products_in_order()
    quick_look_ups()

transformers.logging.set_verbosity_error()
# Of canonical passes on a CPU in tests: prompts are short.
ROW_COUNTS = (2, 4, 8, 12, 16, 20, 24, 32, 48, 64, 96, 128, 256)
# Tiny models are quickest so; tests in which threads matter ask for more.
torch.set_num_threads(1)
# A shell that runs pytest in the background may have it ignored; tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_unconfigure() -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        shutil.rmtree(os.environ["HF_HOME"], ignore_errors=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    budget.add_options(parser)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    budget.give_cases(metafunc)


# Before ``-m`` selects: what is slow is only known then.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        absent = pytest.mark.skip(reason="needs a CUDA device")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(absent)
    budget.select(config, items)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
    """Right above the closing line."""
    yield
    for line in budget.reasons(terminalreporter.stats.get("skipped", ())):
        terminalreporter.write_line(line)


@pytest.fixture
def late_device(monkeypatch) -> None:
    """Engines of this test overlap, on a device whose results are late."""
    from tests.support.late_device import force

    force(monkeypatch)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _fixed_costs() -> Iterator[Any]:
    """The scheduler chooses by costs of buckets, and every test has the same ones: measured, they
    would be others on a busy machine. A doctor looks at no more rows of attention than the proof
    does."""
    from tinyspec.determinism.results import ProbeResults
    from tinyspec.scheduler.buckets import Buckets, row_counts

    costs = {rows: 1e-3 * (1 + rows / 32) for rows in row_counts(4096)}
    ran = Buckets.ran
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(ProbeResults, "seconds", costs)
        patches.setattr(Buckets, "ran", lambda *_: None)
        patches.setattr("tinyspec.tools.doctor.MANY_ROWS", 1)
        yield ran


@pytest.fixture
def passes_count(_fixed_costs, monkeypatch):
    """The passes that ran decide what buckets cost, as they do for users."""
    monkeypatch.setattr("tinyspec.scheduler.buckets.Buckets.ran", _fixed_costs)


@pytest.fixture(autouse=True)
def _everything_known(request, monkeypatch) -> None:
    """What an engine knows is the same in every test: all buckets, before the first deterministic
    token, but for more rows of attention and more passes of the reference bucket; on a CPU those of
    ``ROW_COUNTS`` by default. Others ask for ``whole_ladder`` or ``proven_on_demand``."""
    if "proven_on_demand" not in request.fixturenames:
        from tinyspec.determinism import proof
        from tinyspec.determinism.contract import Contract
        from tinyspec.scheduler.buckets import LADDER

        if "slow" not in request.keywords and "whole_ladder" not in request.fixturenames:
            monkeypatch.setitem(LADDER, "cpu", ROW_COUNTS)
        tokens = proof.token_sets
        monkeypatch.setattr(proof, "ALL_PASSES", proof.FIRST_PASSES)
        monkeypatch.setattr(proof, "token_sets", lambda *given: tokens(*given)[:2])
        prove = Contract.prove

        def whole(contract, fresh=False):
            known = contract.results is not None and not fresh
            results = prove(contract, fresh)
            if not known and not results.unsound:
                contract.prove_more(contract.buckets.sizes, 1)
            return prove(contract)

        monkeypatch.setattr(Contract, "prove", whole)


@pytest.fixture
def probed(monkeypatch) -> list[Any]:
    """One entry for each proof that was run, not read from disk."""
    from tinyspec.determinism import contract

    found = []
    whole = contract.prove_reference

    def counted(*args):
        found.append(args)
        return whole(*args)

    monkeypatch.setattr(contract, "prove_reference", counted)
    return found


@pytest.fixture
def whole_ladder() -> None:
    """Engines of this test have the row counts that users' have."""


@pytest.fixture
def proven_on_demand(monkeypatch):
    """Engines know the reference bucket first, and prove others between the passes of requests, as
    soon as these would have used them."""
    monkeypatch.setattr("tinyspec.determinism.ladder.proof_seconds", lambda *_: 0.0)


@pytest.fixture
def two_threads():
    """Two threads, so that work is cut at other places than with one."""
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A folder of its own for what proofs find: what a test breaks is not always part of their
    key."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path))
    return tmp_path / "tinyspec"


@pytest.fixture
def no_results_on_disk(monkeypatch):
    """For models whose linears a test replaces, which the key of probe results does not see: what
    one test finds is kept for that test alone."""
    from tinyspec.determinism import results

    kept: dict[str, Any] = {}
    monkeypatch.setattr(results, "load", kept.get)
    monkeypatch.setattr(results, "store", kept.__setitem__)


@pytest.fixture
def sigint():
    """SIGINT raises KeyboardInterrupt, also where the tests were started with it ignored."""
    with signals.handled_by():
        yield
