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
    parser.addoption("--rounds", type=int, default=3, help="runs of each side of a comparison")


@pytest.fixture(scope="session")
def smoke(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--smoke"))


@pytest.fixture(scope="session")
def rounds(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--rounds"))
