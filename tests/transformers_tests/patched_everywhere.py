"""A pytest plugin: every model that generates is patched at its first ``generate``.

A property of each test says how each of its calls was served. ``--own`` patches nothing, and so
gives the outcomes to compare with. Only tests of generation run.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
from transformers import GenerationMixin

import tinyspec
from tinyspec.drop_in.call import Call
from tinyspec.drop_in.patching import PatchedGenerate
from tinyspec.errors import UnsupportedModelError

# Whole files of tests of generation; of the others, what is inherited from this class.
FILES = ("tests/generation/", "tests/pipelines/test_pipelines_text_generation.py")
MIXIN = "GenerationTesterMixin."


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--own", action="store_true", help="patch no model")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept = [item for item in items if _concerns_generation(item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    items[:] = kept


def _concerns_generation(item: pytest.Item) -> bool:
    function = getattr(item, "function", None)
    inherited = getattr(function, "__qualname__", "").startswith(MIXIN)
    return inherited or item.nodeid.startswith(FILES)


@pytest.fixture(autouse=True)
def _patched_at_first(request: Any, record_property: Any, monkeypatch: Any) -> None:
    """``GenerationMixin.generate`` of a model that is not patched patches it."""
    if request.config.getoption("--own"):
        return
    own, handed_back = GenerationMixin.generate, PatchedGenerate._call_original

    @functools.wraps(own)
    def generate(model: Any, *args: Any, **kwargs: Any) -> Any:
        if "generate" in vars(model):  # patched: it hands a call back
            return own(model, *args, **kwargs)
        try:
            tinyspec.patch(model)
        except UnsupportedModelError as error:
            record_property(f"by transformers, not patched: {error}", 1)
            return own(model, *args, **kwargs)
        return model.generate(*args, **kwargs)

    def served(patched: PatchedGenerate, *args: Any, **kwargs: Any) -> Any:
        record_property("of patched models", 1)
        return serve(patched, *args, **kwargs)

    def back(patched: PatchedGenerate, call: Call) -> Any:
        record_property("of these by transformers: " + ", ".join(dict.fromkeys(call.unserved)), 1)
        return handed_back(patched, call)

    serve = PatchedGenerate.__call__
    monkeypatch.setattr(GenerationMixin, "generate", generate)
    monkeypatch.setattr(PatchedGenerate, "__call__", served)
    monkeypatch.setattr(PatchedGenerate, "_call_original", back)
