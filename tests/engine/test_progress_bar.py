"""The bar of ``progress=True``: of completions, where a call takes more than two seconds."""

from tests.support.cases import text
from tests.support.tiny import tiny
from tinyspec import Engine, SamplingParams
from tinyspec.engine import request_tracker


def test_it_counts_completions_and_waits(monkeypatch, capsys):
    bars, params = [], SamplingParams(max_new_tokens=3)

    class Bar(request_tracker.tqdm):
        def __init__(self, **options):
            super().__init__(**options)
            assert self.delay == 2.0 and not self.disable
            bars.append(self)

    monkeypatch.setattr(request_tracker, "tqdm", Bar)
    with Engine(tiny()) as engine:
        engine.generate([text(3), text(4)], params, progress=True)
        engine.score([text(3)], [[5, 6]], progress=True)
        engine.generate([text(3)], params)
    assert [(bar.total, bar.n) for bar in bars] == [(2, 2), (1, 1)], "without progress none"
    assert capsys.readouterr().err == "", "it took less than two seconds"
