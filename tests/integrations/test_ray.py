"""Engines as actors of Ray Data: no block, order, thread count or death changes a bit of a row."""

import os
import random
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from tinyspec import DeterminismError, Engine, RequestOutput, SamplingParams
from tinyspec.tools.demo import BUNDLED

pytest.importorskip("ray")

import pyarrow as pa
import ray
from ray.data import ActorPoolStrategy

from tinyspec.integrations.ray import Generate, Job, Score, row_seed

ANIMALS = ("fox", "dog", "bee", "turtle", "small grey mouse", "bird", "cat", "frog")
ROWS = [
    {
        "id": f"row {n}",
        "prompt": f"One {'very ' * (n % 5)}dark day a {ANIMALS[n % 8]}",
        "max_new_tokens": 6 + n % 7,
        "temperature": 0.8 if n % 3 else 0.0,
        "seed": n if n % 4 == 0 else None,
    }
    for n in range(64)
]
PARAMS = SamplingParams(deterministic=True, logprobs=True)
ON_CPU = {"dtype": "bfloat16", "device": "cpu"}


@pytest.fixture(scope="module", autouse=True)
def cluster():
    ray.init("local", num_cpus=8, include_dashboard=False, object_store_memory=2**27)
    yield
    ray.shutdown()


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def job(params=PARAMS, **given):
    return Job(model=BUNDLED, params=params, **{"loading": ON_CPU, **given})


def said(actor, rows, size):
    """What an actor says of rows in blocks of ``size``, by id."""
    blocks = [pa.Table.from_pylist(rows[n : n + size]) for n in range(0, len(rows), size)]
    return {row["id"]: row for block in blocks for row in actor(block).to_pylist()}


@pytest.fixture(scope="module")
def actor(cluster):
    return Generate(job())


@pytest.fixture(scope="module")
def told(actor):
    """By an actor that has all rows at once."""
    return said(actor, ROWS, len(ROWS))


def test_same_rows_in_every_block_and_order(actor, told):
    """Control: plain rows differ."""
    shuffled = random.Random(0).sample(ROWS, len(ROWS))
    torch.set_num_threads(2)  # as Ray may, by an actor's CPUs
    for size, rows in ((1, ROWS[:16]), (5, shuffled), (64, shuffled)):
        assert said(actor, rows, size) == {row["id"]: told[row["id"]] for row in rows}
    plain = Generate(job(SamplingParams(logprobs=True)))
    ways = [said(plain, *way) for way in ((ROWS, 64), (shuffled, 7))]
    assert any(ways[0][name]["logprobs"] != ways[1][name]["logprobs"] for name in told)


def test_rows_are_the_engines_outputs(actor, told):
    for row in ROWS[:8]:
        own = {n: row[n] for n in ("max_new_tokens", "temperature", "seed")}
        if own["temperature"] and own["seed"] is None:
            own["seed"] = row_seed(0, row["id"])
        (output,) = actor.engine.generate([row["prompt"]], [replace(PARAMS, **own)])
        first, found = output.completions[0], told[row["id"]]
        assert found["output"] == replace(output, request_id=row["id"]).to_json(stats=False)
        assert RequestOutput.from_json(found["output"]).completions[0].logprobs == first.logprobs
        for name in ("token_ids", "logprobs", "text", "error"):
            assert found[name] == getattr(first, name)
        assert found["fingerprint"] == output.fingerprint


def test_scores_are_what_generation_gives(told):
    rows = [
        {"id": name, "prompt": row["prompt"], "continuation": row["token_ids"], "temperature": 0.8}
        for name, row in told.items()
        if row["temperature"]
    ]
    for name, row in said(Score(job(SamplingParams())), rows, 9).items():
        assert row["logprobs"] == told[name]["logprobs"]


def test_bad_rows_are_refused_alone(actor, told):
    bad = [
        {"id": "bad params", "prompt": "A", "temperature": -1.0},
        {"id": "bad prompt", "prompt": "", "temperature": 0.0},
        {"id": None, "prompt": "A", "temperature": 1.0},
    ]
    found = said(actor, [*ROWS[:5], *bad, *ROWS[5:9]], 12)
    for row, word in zip(bad, ("temperature", "prompt", "id"), strict=True):
        assert word in found[row["id"]]["error"] and found[row["id"]]["token_ids"] == []
        assert RequestOutput.from_json(found[row["id"]]["output"]).completions[0].error
    for row in ROWS[:9]:
        assert found[row["id"]] == told[row["id"]]


@pytest.mark.parametrize("kind", [Generate, Score])
def test_a_lack_of_memory_is_no_rows_error(told, kind, monkeypatch):
    """Rows that find room by themselves have their results; else it is raised. Control: another
    failure is the error of its row."""
    actor = kind(job())
    rows = [{**row, "continuation": [5]} for row in ROWS[:4]]
    with monkeypatch.context() as patches:
        forward = Mock(side_effect=torch.OutOfMemoryError("no room"))
        patches.setattr(actor.engine.runner.model, "forward", forward)
        with pytest.raises((MemoryError, RuntimeError), match="no room"):
            said(actor, rows, 4)
        forward.side_effect = ArithmeticError("no number")
        assert all("no number" in row["error"] for row in said(actor, rows, 4).values())
    assert not any(row["error"] for row in said(actor, rows, 4).values())


def test_an_actor_with_another_fingerprint_is_refused(actor):
    """Control: with the same one it is not."""
    agreed = actor.job
    assert Generate(agreed).digest == actor.digest
    for change, part in (
        ({"dtype": "float32"}, "dtype bfloat16 -> float32"),
        ({}, "threads 1 -> 2"),
    ):

        class Other(Generate):
            def load(self, change=change):
                if not change:
                    torch.set_num_threads(2)
                return Engine.from_pretrained(BUNDLED, **{**ON_CPU, **change})

        with pytest.raises(DeterminismError, match=part):
            Other(agreed)


@pytest.mark.parametrize("given", [{"threads": 0}, {"seed": -1}, {"params": {"temperature": 1}}])
def test_a_bad_job_is_refused(given):
    with pytest.raises(ValueError, match=f"{next(iter(given))}="):
        job(**given)


def test_a_bad_table_is_refused(actor):
    with pytest.raises(ValueError, match="pyarrow"):
        actor({"prompt": ["A"]})
    with pytest.raises(ValueError, match="max_new_tokens"):
        actor(pa.table({"prompt": ["A"], "max_tokens": [3]}))


def test_a_dead_engine_is_replaced(told, tmp_path):
    """Each kind of death once, between the rows of one dataset."""

    class Mortal(Generate):
        def __call__(self, table):
            started = len(list(tmp_path.glob("*")))
            (tmp_path / f"{started} {os.getpid()}").touch()
            if started == 1:
                self.engine.close()
            if started == 3:
                with torch.no_grad():
                    next(self.engine.model.parameters()).mul_(2)
            return super().__call__(table)

    how = {"batch_size": None, "batch_format": "pyarrow", "compute": ActorPoolStrategy(size=1)}
    rows = ray.data.from_items(ROWS[:24], override_num_blocks=6)
    found = rows.map_batches(Mortal, fn_constructor_args=[job()], **how).take_all()
    assert {row["id"]: row for row in found} == {r["id"]: told[r["id"]] for r in ROWS[:24]}
    assert len({Path(path).name.split()[1] for path in tmp_path.glob("*")}) == 3
