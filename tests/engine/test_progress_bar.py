"""The bar of ``progress=True``: of completions, where a call takes more than two seconds."""

import pytest

from tests.support.cases import text
from tests.support.tiny import tiny
from tinyspec import Engine, SamplingParams
from tinyspec.engine import request_tracker


@pytest.fixture
def bars(monkeypatch):
    """What the bars were made with, and how far they came."""
    made = []

    class Bar(request_tracker.tqdm):
        def __init__(self, **options):
            made.append((options, self))
            super().__init__(**options)

    monkeypatch.setattr(request_tracker, "tqdm", Bar)
    return made


def test_it_counts_completions_and_waits(bars, capsys):
    params = SamplingParams(max_new_tokens=3)
    with Engine(tiny()) as engine:
        engine.generate([text(3), text(4)], params, progress=True)
        engine.score([text(3)], [[5, 6]], progress=True)
        engine.generate([text(3)], params)
    options = [how for how, _ in bars]
    assert [how["total"] for how in options] == [2, 1], "without progress there is none"
    assert {how["delay"] for how in options} == {2.0}
    assert not any(how.get("disable") for how in options)
    assert [bar.n for _, bar in bars] == [2, 1]
    assert capsys.readouterr().err == "", "it took less than two seconds"
