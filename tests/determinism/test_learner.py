"""Proof as you go: what is known, and when it was found, changes no bit."""

import logging
import random
from dataclasses import replace
from itertools import count

import pytest
import torch
from torch import nn

from tests.support.budget import first
from tests.support.loading import everything, unlike
from tests.support.mixes import bits, crowd, needles, solo
from tests.support.sensitive import ShapeSensitiveLinear, replace_linears
from tests.support.tiny import prompts, tiny
from tinyspec import DeterminismError, Engine, EngineConfig, SamplingParams, doctor
from tinyspec.determinism import contract as contract_module
from tinyspec.determinism import learner, notice
from tinyspec.determinism.learner import BUCKET, Learner, Task
from tinyspec.determinism.probes import buckets
from tinyspec.runner.model_runner import ModelRunner
from tinyspec.scheduler.buckets import Buckets

CONFIG = EngineConfig(reference_rows=8, max_rows=32)
DETERMINISTIC = SamplingParams(max_new_tokens=12, deterministic=True, logprobs=True)
pytestmark = pytest.mark.usefixtures("learning", "no_results_on_disk")


@pytest.fixture(autouse=True)
def fewer_rows_of_attention(monkeypatch):
    monkeypatch.setattr(Learner.tasks, "__defaults__", (1,))


def pace(monkeypatch, seconds):
    """Seconds of learning for a second of passes."""
    monkeypatch.setattr(learner, "URGENT", seconds)
    monkeypatch.setattr(learner, "UNHURRIED", seconds)


def eager(monkeypatch):
    pace(monkeypatch, float("inf"))


def lazy(monkeypatch):
    pace(monkeypatch, 0.0)


def slices(monkeypatch, number):
    """So many slices after every pass, whatever time they take."""
    pace(monkeypatch, float("inf"))
    monkeypatch.setattr(learner, "SLICE", 0.0)

    def learn(self):
        for _ in range(number):
            if tasks := self.tasks():
                self._advance(tasks[0])

    monkeypatch.setattr(Learner, "learn", learn)


def shuffled(monkeypatch):
    """One fact a pass or so, in any order."""
    pace(monkeypatch, 3.0)
    monkeypatch.setattr(learner, "SLICE", 0.0)
    tasks, numbers = Learner.tasks, count()

    def in_any_order(self, *args):
        found = tasks(self, *args)
        random.Random(next(numbers)).shuffle(found)
        return found

    monkeypatch.setattr(Learner, "tasks", in_any_order)


def served(model, requests, config=CONFIG):
    """Bits of ``requests`` together, and what the engine knows afterwards."""
    with Engine(model, config=config) as engine:
        outputs = engine.generate([p for p, _ in requests], [s for _, s in requests])
        return [bits(output) for output in outputs], engine.contract.results


def reference_bits(model, requests):
    """Each alone, by the reference bucket."""
    with Engine(model, config=replace(CONFIG, verify="always")) as engine:
        return [bits(solo(engine, request)) for request in requests]


# The same bits


PACES = [eager, shuffled, lazy]
SEVERAL = replace(DETERMINISTIC, num_return_sequences=2, temperature=0.8, seed=3)
NEEDLES = [*needles()[:4], (prompts(1)[0], SEVERAL)]


@pytest.mark.parametrize("how", first(2, PACES, 2), ids=lambda how: how.__name__)
def test_the_same_bits_at_every_pace(how, monkeypatch):
    model = tiny(dtype=torch.bfloat16)
    expected = reference_bits(model, NEEDLES)
    how(monkeypatch)
    found, results = served(model, [*NEEDLES, *crowd(random.Random(0), 12)])
    assert found[: len(NEEDLES)] == expected
    assert (results.sizes == [8]) == (how is lazy)
    if how is eager:
        assert results.sizes == [1, 2, 4, 8, 12, 16, 20, 24, 28, 32]


VARIANTS = {
    "padded": {"verify": "padded"},
    "always": {"verify": "always"},
    "direct": {"verify": "direct", "linear": "always", "max_sequences": 16},
    "ngram": {"drafter": "ngram"},
    "small pages": {"page_size": 16},
    "no prefix cache": {"prefix_cache": False},
}


@pytest.mark.slow("crosses", 4)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("how", PACES, ids=lambda how: how.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_same_bits_in_every_mode(how, variant, dtype, monkeypatch):
    config = replace(CONFIG, **VARIANTS[variant])
    model = tiny(dtype=dtype)
    requests = [*NEEDLES, *crowd(random.Random(1), 12)]
    with monkeypatch.context() as patches:
        lazy(patches)
        with Engine(model, config=config) as engine:
            expected = [bits(solo(engine, request)) for request in NEEDLES]
    how(monkeypatch)
    assert served(model, requests, config)[0][: len(NEEDLES)] == expected


@pytest.mark.slow("crosses", 3)
@pytest.mark.parametrize("how", PACES, ids=lambda how: how.__name__)
def test_the_same_bits_in_tiles(how, monkeypatch):
    """Linears that no other bucket agrees with, in tiles of the reference bucket's rows."""
    model = replace_linears(tiny(), ShapeSensitiveLinear)
    expected = reference_bits(model, NEEDLES)
    how(monkeypatch)
    found, _ = served(model, [*NEEDLES, *crowd(random.Random(0), 12)])
    assert found[: len(NEEDLES)] == expected


def test_control_a_false_fact(monkeypatch):
    """A bucket that is declared canonical and is not."""
    model = replace_linears(tiny(), ShapeSensitiveLinear)
    requests = [(prompt, DETERMINISTIC) for prompt in prompts(3)]
    expected = reference_bits(model, requests)
    eager(monkeypatch)
    assert served(model, requests)[0] == expected
    truth = buckets.bucket_steps

    def false(*args):
        found = yield from truth(*args)
        return replace(found, canonical=True, broken_by=())

    monkeypatch.setattr(learner, "bucket_steps", false)
    changed = replace(CONFIG, max_rows=28)  # other facts on disk
    found, results = served(model, requests, changed)
    assert results.canonical == results.sizes and found != expected


# What comes when


def rows_before_a_token(monkeypatch, config):
    """Row counts of the passes before the first deterministic one."""
    rows = []
    forward = ModelRunner.forward

    def counted(runner, batch, *others):
        rows.append(len(batch.input_ids))
        return forward(runner, batch, *others)

    monkeypatch.setattr(ModelRunner, "forward", counted)
    with Engine(tiny(dtype=torch.bfloat16), config=config) as engine:
        del rows[:]
        engine.contract.ensure()
    return rows


def test_what_a_first_token_waits_for(monkeypatch):
    """Fewer than 20 passes of the reference bucket, in products: passes end to end, and the linears
    by themselves."""
    products = []
    whole = nn.Module.__call__

    def counted(module, *args, **kwargs):
        if hasattr(module, "out_features"):
            products.append(args[0].numel() * module.out_features)
        return whole(module, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "__call__", counted)
    model = tiny(dtype=torch.bfloat16)
    with Engine(model, config=EngineConfig()) as engine:
        reference = engine.config.reference_rows
        linears = [m for m in model.modules() if hasattr(m, "out_features")]
        one = sum(m.in_features * m.out_features for m in linears) * reference
        del products[:]
        engine.contract.ensure()
        assert engine.contract.results.sizes == [reference]
        # 28 layers have the kinds of linears of 2: what is proven by itself counts 14 times as much
        # here as in a model of that size.
        assert 5 * one < sum(products) < 20 * one
    rows = rows_before_a_token(monkeypatch, EngineConfig(max_rows=64))
    assert set(rows) == {32} and len(rows) < 12


def test_the_wanted_bucket_comes_first(monkeypatch):
    """One request decodes a row a pass; four of them four rows."""
    slices(monkeypatch, 4)
    for number, bucket in ((1, 1), (4, 4)):
        config = replace(CONFIG, max_rows=24 + number)  # each has facts of its own
        with Engine(tiny(dtype=torch.bfloat16), config=config) as engine:
            learnt = [8]
            whole = engine.contract._use

            def use(results, whole=whole, learnt=learnt):
                learnt.extend(rows for rows in results.sizes if rows not in learnt)
                whole(results)

            for prompt in prompts(number):
                engine.add_request(prompt[:4], replace(DETERMINISTIC, max_new_tokens=200))
            engine.contract._learner._use = use
            while engine.has_unfinished() and len(learnt) < 2:
                engine.step()
            assert learnt == [8, bucket]


def test_time_for_learning(monkeypatch):
    """A quarter of the engine's time while the wanted bucket is unknown, a twentieth otherwise."""
    clock = [0.0]
    with Engine(tiny(), config=CONFIG) as engine:
        engine.contract.ensure()
        monkeypatch.setattr(learner.time, "perf_counter", lambda: clock[0])
        own = engine.contract._learner
        slices = []

        def advance(self, task):
            slices.append(task)
            clock[0] += 0.7

        monkeypatch.setattr(Learner, "_advance", advance)
        for wanted, share in ((1, 0.25), (0, 0.05)):
            engine.runner.buckets.wanted = wanted
            for _ in range(learner.STEADY):
                own.earn(0.0)
            slices.clear()
            own._credit = 0.0
            for _ in range(3000):
                if own.earn(0.1):
                    own.learn()
            learnt = 0.7 * len(slices)
            assert learnt / (300 + learnt) == pytest.approx(share, abs=0.002)


def test_nothing_is_learnt_for_plain_requests(monkeypatch):
    eager(monkeypatch)
    with Engine(tiny(), config=CONFIG) as engine:
        engine.contract.ensure()
        engine.generate(prompts(3))
        assert engine.contract.results.sizes == [8]


def test_facts_are_kept_as_they_are_found(monkeypatch):
    """A second engine knows what the first has learnt, and goes on."""
    slices(monkeypatch, 10)
    seen, last = [], [8]
    for _ in range(4):
        with Engine(tiny(), config=CONFIG) as engine:
            engine.contract.ensure()
            seen.append(engine.contract.results.sizes)
            engine.generate(prompts(1), replace(DETERMINISTIC, max_new_tokens=30))
            after = engine.contract.results.sizes
        assert set(after) >= set(seen[-1])
        assert seen[-1] == last
        last = after
    assert seen[0] == [8] and 1 < len(seen[-1]) < len(Buckets(32, 8).sizes), seen


def test_a_doctor_finds_the_rest(monkeypatch):
    eager_facts = {}
    for how in (lazy, eager):
        with monkeypatch.context() as patches:
            how(patches)
            with Engine(tiny(), config=CONFIG) as engine:
                engine.generate(prompts(1), DETERMINISTIC)
                found = doctor(engine).facts
                eager_facts[how] = found.sizes, found.canonical, found.tiles, found.swapped
    assert eager_facts[lazy] == eager_facts[eager]
    assert eager_facts[lazy][0] == [1, 2, 4, 8, 12, 16, 20, 24, 28, 32]


# No trace


def test_learning_leaves_no_trace(monkeypatch):
    model = tiny(dtype=torch.bfloat16)
    before = everything(model)
    versions = [p._version for p in model.parameters()]
    random_state = torch.get_rng_state()
    stats = []
    for how in (lazy, eager):
        how(monkeypatch)
        config = replace(CONFIG, verify="padded", trace=True)
        with Engine(model, config=config) as engine:
            engine.contract.ensure()
            pages = engine.pool.num_held
            engine.step()
            assert not engine.contract.changed()
            engine.generate(prompts(1), DETERMINISTIC)
            assert not engine.contract.changed()
            assert engine.pool.num_held >= pages
            stats.append((engine.stats().committed, len(engine.records)))
            assert sum(engine.stats().passes.values()) == len(engine.records)
    assert stats[0] == stats[1]
    assert unlike(before, everything(model)) == []
    assert [p._version for p in model.parameters()] == versions
    assert torch.equal(torch.get_rng_state(), random_state)


@pytest.mark.parametrize("error", first(1, [RuntimeError, KeyboardInterrupt, MemoryError], 2))
def test_learning_that_fails(error, monkeypatch, caplog):
    """Requests go on after an error; an interrupt is the caller's, and the engine works on."""
    eager(monkeypatch)
    model = tiny()
    before = everything(model)
    requests = [(prompt, DETERMINISTIC) for prompt in prompts(2)]
    expected = reference_bits(model, requests)

    def fails(*args):
        yield
        raise error("no")

    with Engine(model, config=CONFIG) as engine:
        with monkeypatch.context() as patches:
            patches.setattr(learner, "bucket_steps", fails)
            if error is KeyboardInterrupt:
                with pytest.raises(KeyboardInterrupt):
                    engine.generate([p for p, _ in requests], DETERMINISTIC)
            else:
                with caplog.at_level(logging.WARNING, "tinyspec"):
                    found = engine.generate([p for p, _ in requests], DETERMINISTIC)
                assert [bits(output) for output in found] == expected
                assert "could not be probed" in caplog.text
        found = engine.generate([p for p, _ in requests], DETERMINISTIC)
        assert [bits(output) for output in found] == expected
    assert unlike(before, everything(model)) == []


def test_a_reference_bucket_that_turns_out_unsound(monkeypatch):
    """Deterministic requests end with the reason, plain ones go on, others are refused."""
    wrong = "in other passes"

    def broken(runner, kind):
        yield
        return kind, [learner.Unsound("attention", wrong, "try another dtype")]

    monkeypatch.setattr(learner, "attention_steps", broken)
    monkeypatch.setattr(Learner.tasks, "__defaults__", (10**9,))
    with Engine(tiny(), config=CONFIG) as engine:
        plain = SamplingParams(max_new_tokens=12)
        alone = bits(engine.generate(prompts(1), plain)[0])
        engine.contract.ensure()
        eager(monkeypatch)
        outputs = engine.generate(prompts(1) * 2, [DETERMINISTIC, plain])
        ends = [o.completions[0].finish_reason for o in outputs]
        assert ends == ["abort", "length"] and wrong in outputs[0].completions[0].error
        assert bits(outputs[1])[1:] == alone[1:]
        with pytest.raises(DeterminismError, match=wrong):
            engine.generate(prompts(1), DETERMINISTIC)
        assert engine.generate(prompts(1), plain)[0].completions[0].finish_reason == "length"


@pytest.mark.parametrize("again", [0, 2])
def test_costs_of_a_busy_moment_do_not_last(again, monkeypatch):
    """Control: without another look they do."""
    monkeypatch.setattr(learner, "TIMES_AGAIN", again)
    eager(monkeypatch)
    with Engine(tiny(), config=CONFIG) as engine:
        engine.contract.probe()
        own = engine.contract._learner
        busy = [
            replace(b, seconds=9.0, canonical_seconds=9.0, timed=1) for b in own.results.buckets
        ]
        own._keep(buckets=tuple(busy))
        engine.generate(prompts(1), DETERMINISTIC)
        costs = [bucket.canonical_seconds for bucket in own.results.buckets]
        assert all(c < 9.0 for c in costs) if again else costs == [9.0] * len(busy)
        assert {b.timed for b in own.results.buckets} == {again + 1} and not own.tasks()


def test_memory_is_given_back(monkeypatch):
    with Engine(tiny(), config=CONFIG) as engine:
        engine.contract.ensure()
        assert engine.contract._learner._workspace is not None
        engine.release()
        assert engine.contract._learner._workspace is None
        eager(monkeypatch)
        engine.generate(prompts(1), DETERMINISTIC)
        assert engine.contract._learner._workspace is None
        assert not engine.contract._learner.tasks()


# What a user is told


class Terminal:
    def __init__(self, is_one):
        self.isatty = lambda: is_one
        self.text = ""

    def write(self, text):
        self.text += text


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("patience", [0.0, 60.0])
def test_a_call_that_waits_says_so(terminal, patience, monkeypatch, caplog):
    monkeypatch.setattr(notice, "PATIENCE", patience)
    stderr = Terminal(terminal)
    monkeypatch.setattr(notice.sys, "stderr", stderr)
    with caplog.at_level(logging.INFO, "tinyspec"), Engine(tiny(), config=CONFIG) as engine:
        engine.generate(prompts(1), DETERMINISTIC)
        engine.generate(prompts(1), DETERMINISTIC)
    waits = patience == 0
    told = [r.message for r in caplog.records if r.message.startswith(contract_module.WAITING)]
    assert bool(told) == waits
    assert not waits or told[0].startswith(f"{contract_module.WAITING} (step 1 of 4, linear la")
    assert all(" of 4, " in line for line in told)
    shown = [f"tinyspec: {line}" for line in told] if terminal else []
    assert stderr.text.splitlines() == shown


def test_tasks_in_order():
    with Engine(tiny(), config=CONFIG) as engine:
        engine.contract.ensure()
        own, known = engine.contract._learner, engine.runner.buckets
        kinds = [task.kind for task in own.tasks(1)]
        assert kinds == ["costs", *[BUCKET] * 9, "passes"]
        for wanted, first in ((1, 1), (3, 4), (9, 12), (32, 32), (1000, 32)):
            known.wanted = wanted
            for _ in range(learner.STEADY):
                own.earn(0.0)
            assert own.tasks()[0] == Task(BUCKET, first)
        known.wanted = 8
        for _ in range(learner.STEADY):
            own.earn(0.0)
        assert own.tasks()[0].kind == "costs", "known already"
