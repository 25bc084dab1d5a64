"""A pytest plugin: ``-p benchmarks.journal_plugin --journal FILE --deadline T``.

Appends every test that fails as it does, the counts every few seconds, and what a benchmark
measured; begins no test after the deadline.
"""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks.journal import ERROR_CHARACTERS, Journal, die_with_parent

EVERY_S = 5.0
OUT_OF_TIME = "out of time"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("results as they come")
    group.addoption("--journal", type=Path, help="JSONL file to append to")
    group.addoption("--deadline", type=float, default=float("inf"), help="seconds since the epoch")
    group.addoption("--section", default="tests", help="name of the lines")


def pytest_configure(config: pytest.Config) -> None:
    die_with_parent()
    if not hasattr(config, "workerinput"):  # of xdist: its results arrive in the main process
        config.pluginmanager.register(_Recorder(config), "journal-recorder")


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Nothing runs after this test if the time is over; in each process of xdist as well."""
    if time.time() > item.config.getoption("--deadline"):
        item.session.shouldstop = OUT_OF_TIME


class _Recorder:
    """Counts of the tests so far, by outcome."""

    def __init__(self, config: pytest.Config):
        self._journal = Journal(config.getoption("--journal"), config.getoption("--deadline"))
        self._section = config.getoption("--section")
        self._counts: Counter[str] = Counter()
        self._written = time.monotonic()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            text = report.longreprtext[-ERROR_CHARACTERS:]
            self._journal.add(self._section, report.nodeid, result="not collected", error=text)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        ended = report.when == "call" or report.outcome != "passed"
        if ended:
            self._counts[report.outcome] += 1
        if report.failed:
            text = report.longreprtext[-ERROR_CHARACTERS:]
            self._journal.add(self._section, report.nodeid, result="failed", error=text)
        if time.monotonic() - self._written > EVERY_S:
            self._write("so far")

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: Any) -> Any:
        yield
        benchmark = getattr(item, "funcargs", {}).get("benchmark")
        if call.when == "call" and getattr(benchmark, "stats", None) is not None:
            seconds = benchmark.stats.stats.median
            self._journal.add(
                f"suite: {benchmark.group}",
                item.name,
                median_ms=1e3 * seconds,
                **benchmark.extra_info,
            )

    def pytest_sessionfinish(self) -> None:
        self._write(OUT_OF_TIME if self._journal.left() < 0 else "all")

    def _write(self, case: str) -> None:
        self._written = time.monotonic()
        self._journal.add(self._section, case, **self._counts)
