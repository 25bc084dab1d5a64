"""A pytest plugin: every model that generates is patched first.

``-p tests.support.patched_everywhere`` patches a model at its first ``generate``, and ``--record
FILE`` writes the outcome of each test and how its calls of ``generate`` were served, as JSON.
``--own`` patches nothing, and so gives the outcomes to compare with. Only tests of generation run.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationMixin

import tinyspec
from tinyspec.drop_in.call import Call
from tinyspec.drop_in.patching import PatchedGenerate
from tinyspec.errors import UnsupportedModelError

SERVED, RAISED = "served", "raised"
# Whole files of tests of generation; of the others, what is inherited from this class.
FILES = ("tests/generation/", "tests/pipelines/test_pipelines_text_generation.py")
MIXIN = "GenerationTesterMixin."


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("every model patched")
    group.addoption("--record", type=Path, required=True, help="JSON file of what happened")
    group.addoption("--own", action="store_true", help="patch no model")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # of xdist: its reports arrive in the main process
        config.pluginmanager.register(_Recorder(config.getoption("--record")), "outcomes-recorder")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept = [item for item in items if _concerns_generation(item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    items[:] = kept


def _concerns_generation(item: pytest.Item) -> bool:
    function = getattr(item, "function", None)
    inherited = getattr(function, "__qualname__", "").startswith(MIXIN)
    return inherited or item.nodeid.startswith(FILES)


@pytest.fixture(scope="session", autouse=True)
def _patched_at_first(request: pytest.FixtureRequest) -> Iterator[None]:
    """``GenerationMixin.generate`` of a model that is not patched patches it."""
    if request.config.getoption("--own"):
        yield
        return
    own, serve = GenerationMixin.generate, PatchedGenerate.__call__
    handed_back = PatchedGenerate._call_original
    depth = [0]  # of calls that others make in turn, which are not counted

    @functools.wraps(own)
    def generate(model: Any, *args: Any, **kwargs: Any) -> Any:
        if "generate" in vars(model):  # patched: it hands a call back
            return own(model, *args, **kwargs)
        try:
            tinyspec.patch(model)
        except UnsupportedModelError as error:
            _count(f"not patched: {error}")
            return own(model, *args, **kwargs)
        return model.generate(*args, **kwargs)

    def counted(patched: PatchedGenerate, *args: Any, **kwargs: Any) -> Any:
        depth[0] += 1
        before, how = calls.total(), RAISED
        try:
            result = serve(patched, *args, **kwargs)
            how = SERVED
            return result
        finally:
            depth[0] -= 1
            if not depth[0] and calls.total() == before:
                _count(how)

    def back(patched: PatchedGenerate, call: Call) -> Any:
        if depth[0] == 1:
            _count(", ".join(dict.fromkeys(call.unserved)))
        return handed_back(patched, call)

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(GenerationMixin, "generate", generate)
        patches.setattr(PatchedGenerate, "__call__", counted)
        patches.setattr(PatchedGenerate, "_call_original", back)
        yield


# How the calls of the test that runs were served.
calls: Counter[str] = Counter()


def _count(how: str) -> None:
    calls[how] += 1


@pytest.fixture(autouse=True)
def _counted(request: pytest.FixtureRequest) -> Iterator[None]:
    calls.clear()
    yield
    request.node.user_properties.append(("calls", dict(calls)))


class _Recorder:
    """Outcomes and calls of every test, written at the end."""

    def __init__(self, path: Path):
        self._path = path
        self._tests: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = self._tests.setdefault(report.nodeid, {"outcome": "passed", "calls": {}})
        if report.outcome != "passed":
            test["outcome"] = report.outcome
            test["error"] = report.longreprtext[-2000:]
        for name, value in report.user_properties:
            if name == "calls":
                test["calls"] = value

    def pytest_sessionfinish(self) -> None:
        self._path.write_text(json.dumps(self._tests, indent=1, sort_keys=True))
