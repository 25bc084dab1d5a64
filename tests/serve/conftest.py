"""One server for the tests that leave it as it was."""

import pytest

from tests.support.serving import running, storyteller


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
