"""Servers for the tests that leave them as they were."""

import pytest

from tests.support.serving import THINKING, running, speaking, storyteller
from tests.support.tokenizers import tokenizer_of


@pytest.fixture(scope="package")
def bundled():
    with storyteller(num_pages=64) as engine:
        yield engine


@pytest.fixture(scope="package")
def served(bundled):
    with running(bundled) as server:
        yield server
        server.settled()


@pytest.fixture
def client(served):
    return served.client()


@pytest.fixture(scope="package")
def thinking():
    """One whose model thinks."""
    engine = speaking(tokenizer_of("markup"), THINKING)
    with engine, running(engine, deterministic=True) as server:
        yield server
