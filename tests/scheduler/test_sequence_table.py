"""The sequence table at random, against lists of plain objects."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tinyspec import SamplingParams
from tinyspec.scheduler.request import Request
from tinyspec.scheduler.sequence_table import SequenceTable

STOP = 7


class Model:
    """What the table should hold of one sequence."""

    def __init__(self, sequence):
        self.sequence = sequence
        self.tokens = list(sequence.request.prompt)
        self.drafts = []
        self.logprobs = []
        self.pages = []
        self.computed = self.canonical = self.drafted = 0
        self.ended = False


class Trace:
    """A table and its model, driven by the same moves."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.table = SequenceTable(40)
        self.models: list[Model] = []
        self.left: list[Model] = []
        self.arrivals = 0

    def enter(self):
        prompt = [self.rng.randrange(50) for _ in range(self.rng.choice((1, 3, 40)))]
        params = SamplingParams(
            max_new_tokens=self.rng.choice((1000, 3000)),
            deterministic=self.rng.random() < 0.5,
            logprobs=self.rng.random() < 0.5,
            stop_token_ids=[STOP] * self.rng.randrange(3),
        )
        sequence = Request("r", prompt, params, self.arrivals).sequences[0]
        self.arrivals += 1
        sequence.enter(self.table, 4)
        self.models.append(Model(sequence))

    def reenter(self):
        """One that was preempted: committed tokens and their log-probabilities are as they were."""
        model = self.left.pop(self.rng.randrange(len(self.left)))
        model.sequence.enter(self.table, 4)
        self.models.append(model)

    def leave(self):
        model = self.models.pop(self.rng.randrange(len(self.models)))
        model.sequence.pages = []
        model.sequence.leave()
        model.drafts, model.pages, model.computed, model.canonical = [], [], 0, 0
        self.left.append(model)

    def some(self):
        return self.rng.sample(self.models, self.rng.randint(1, len(self.models)))

    def commit(self):
        models = self.some()
        counts = [self.rng.randint(1, 4) for _ in models]
        width = max(counts)
        tokens = [[self.rng.randrange(50) for _ in range(width)] for _ in models]
        values = np.random.default_rng(self.rng.randrange(99)).random((len(models), width))
        values = values.astype(np.float32)
        rows = self.rows(models)
        starts = self.table.length[rows]
        self.table.commit(rows, np.array(counts), np.array(tokens))
        self.table.write_logprobs(rows, starts, np.array(counts), values)
        self.table.num_drafts[rows] = 0
        self.table.draft_ended[rows] = False
        self.table.mark_final(rows)
        for n, model in enumerate(models):
            model.tokens += tokens[n][: counts[n]]
            if model.sequence.params.logprobs:
                model.logprobs += values[n, : counts[n]].tolist()
            model.drafts, model.ended = [], False
            model.computed = len(model.tokens) - 1
            model.canonical = min(model.canonical, model.computed)
            if model.sequence.deterministic:
                model.canonical = model.computed

    def draft(self):
        models = self.some()
        tokens = [self.rng.choice((-1, STOP, self.rng.randrange(50))) for _ in models]
        self.table.draft(self.rows(models), np.array(tokens))
        for model, token in zip(models, tokens, strict=True):
            model.ended = token < 0 or token in model.sequence.params.stop_ids
            if token >= 0:
                model.drafts.append(token)
                model.drafted += 1

    def advance(self):
        models = self.some()
        canonical = self.rng.random() < 0.5
        ends = [m.computed + self.rng.randint(1, 60) for m in models]
        self.table.advance(self.rows(models), np.array(ends), canonical)
        for model, end in zip(models, ends, strict=True):
            before, model.computed = model.computed, min(end, len(model.tokens))
            if canonical and model.canonical >= before:
                model.canonical = model.computed

    def turn_pages(self):
        for model in self.some():
            model.pages = [self.rng.randrange(99) for _ in range(self.rng.randrange(20))]
            model.sequence.set_pages(list(model.pages))

    def rows(self, models):
        return np.array([model.sequence.row for model in models])

    def check(self):
        table = self.table
        assert len(table) == len(self.models)
        arrivals = [table.sequences[row].request.arrival for row in table.rows.tolist()]
        assert arrivals == sorted(model.sequence.request.arrival for model in self.models)
        asked = {
            "deterministic": [model.sequence.deterministic for model in self.models],
            "logprobs_wanted": [model.sequence.params.logprobs for model in self.models],
        }
        for name, values in asked.items():
            assert table.any(name) == any(values)
            places = table.places(name, self.rows(self.models)) if values else []
            assert places == [n for n, value in enumerate(values) if value]
        for model in [*self.models, *self.left]:
            sequence = model.sequence
            assert sequence.running == (model in self.models)
            assert sequence.tokens == model.tokens and sequence.drafts == model.drafts
            assert sequence.logprobs == model.logprobs
            assert sequence.length == len(model.tokens)
            assert (sequence.computed, sequence.canonical) == (model.computed, model.canonical)
            assert sequence.remaining == sequence.params.max_new_tokens - sequence.num_generated
        for model in self.models:
            row = model.sequence.row
            assert table.pages[row, : len(model.pages)].tolist() == model.pages
            assert not table.pages[row, len(model.pages) :].any()
            assert bool(table.draft_ended[row]) == model.ended
            assert set(table.stops[row].tolist()) - {-1} == set(model.sequence.params.stop_ids)
        if self.rng.random() < 0.1:
            for model in [*self.models, *self.left]:
                assert model.sequence.stats.drafted == model.drafted

    def run(self, moves):
        seen = set()
        for _ in range(moves):
            names = ["enter"] if len(self.models) < 40 else []
            names += ["reenter"] if self.left else []
            if self.models:
                names += ["leave", "commit", "commit", "draft", "advance", "turn_pages"]
            name = self.rng.choice(names)
            seen.add(name)
            getattr(self, name)()
            if name == "leave":
                self.left[-1].ended = False
            self.check()
        return seen


@pytest.mark.parametrize("seed", range(8))
def test_random_traces(seed):
    trace = Trace(seed)
    assert len(trace.run(150)) == 7


def test_control_a_lost_token_is_seen():
    trace = Trace(0)
    trace.run(60)
    sequence = trace.models[0].sequence
    trace.table.ids[sequence.row, sequence.length - 1] += 1
    with pytest.raises(AssertionError):
        trace.check()
