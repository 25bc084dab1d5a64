"""Options of the benchmark suites."""

import pytest
import transformers

transformers.logging.set_verbosity_error()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--smoke",
        action="store_true",
        help="tiny sizes: shows that the suites run, reports nothing",
    )


@pytest.fixture(scope="session")
def smoke(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--smoke"))
