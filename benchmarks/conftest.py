"""Options of the benchmark suites: a run of them alone measures, small sizes unless told otherwise.

Everywhere else pyproject.toml has benchmarks disabled.
"""

import pytest
import torch
import transformers

transformers.logging.set_verbosity_error()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full",
        action="store_true",
        help="the sizes that results are reported of; without it small ones, in two minutes",
    )
    parser.addoption(
        "--rounds", type=int, help="runs of each side of a comparison; 3, of small sizes 2"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Before pytest-benchmark reads its options, which it does last."""
    given = config.invocation_params.args
    if "--benchmark-disable" not in given:
        config.option.benchmark_enable = True
    if not config.getoption("--full"):
        torch.set_num_threads(1)  # passes of small sizes are too short for two to share


@pytest.fixture(scope="session")
def smoke(request: pytest.FixtureRequest) -> bool:
    return not request.config.getoption("--full")


@pytest.fixture(scope="session")
def rounds(request: pytest.FixtureRequest) -> int:
    given = request.config.getoption("--rounds")
    return given or (3 if request.config.getoption("--full") else 2)
