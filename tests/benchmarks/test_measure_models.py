"""Decode steps are timed once all requests decode, and no pass with prompt rows is."""

from __future__ import annotations

import pytest

from benchmarks import journal
from benchmarks.measure_models import SETTLED, Sections
from benchmarks.workloads import of_shapes

BATCH, CONTEXT = 5, 40


@pytest.fixture
def sections(tmp_path):
    return Sections("tiny", journal.Journal(tmp_path / "f"), smoke=True)


@pytest.mark.parametrize("chosen", [(), range(BATCH)], ids=["plain", "deterministic"])
def test_all_decode(sections, chosen):
    """Prompts take several passes here; each of the last ones before the clock has none."""
    with sections.engine(prefix_cache=False, max_rows=64) as engine:
        sections._decoding(engine, BATCH, CONTEXT, chosen)
        records = list(engine.records)
        assert sum(record.rows["prompt"] > 0 for record in records) > 1
        settled = 0
        while not (record := records.pop()).rows["prompt"]:
            assert record.running == BATCH
            settled += record.committed
        assert settled >= SETTLED * BATCH


def test_prompt_rows_are_noticed(sections, monkeypatch):
    """Control: requests whose prompts have not been computed."""

    def too_early(engine, batch, context, chosen):
        work = of_shapes("steps", [(context, 9)] * batch, sections.vocab)
        both = zip(work.prompts, work.params(chosen), strict=True)
        return [engine.add_request(list(prompt), params) for prompt, params in both]

    monkeypatch.setattr(sections, "_decoding", too_early)
    with (
        sections.engine(prefix_cache=False, max_rows=64) as engine,
        pytest.raises(RuntimeError, match="prompt rows in the passes that were timed"),
    ):
        sections._steps(engine, BATCH, CONTEXT, ())
