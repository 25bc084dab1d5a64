"""Ray Data: engines as actors of ``map_batches``, whose rows have the same bits whatever dies.

Ray computes what a lost actor had again, by another engine among other rows: with
``deterministic=True`` that changes nothing. Knows rows alone, neither datasets nor where they go.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import pyarrow
import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tinyspec.config import EngineConfig
from tinyspec.determinism.fingerprint_parts import Parts, differences
from tinyspec.engine.engine import Engine
from tinyspec.errors import DeterminismError, named, refuse, refuse_other_names
from tinyspec.outputs import Completion, RequestOutput
from tinyspec.sampling_params import SamplingParams
from tinyspec.scheduler.request import noise_key

# What a column can give; functions cannot be in one.
FIELDS = {f.name for f in fields(SamplingParams)} - {"logits_processors", "stopping_criteria"}
# In the name of an error that other rows, or another process, may be the cause of.
NO_MEMORY = "MemoryError"
TEXT, NUMBERS = pyarrow.string(), pyarrow.list_(pyarrow.float64())


class FirstFingerprint:
    """Parts of the fingerprint of the actor that asked first."""

    def __init__(self, parts: Parts | None):
        self._parts = parts

    def first(self, parts: Parts) -> Parts:
        """Of the job, where ``parts`` are those of the actor that asks."""
        self._parts = self._parts or parts
        return self._parts


@dataclass(frozen=True, kw_only=True)
class Job:
    """What all actors of a job share; made where ``map_batches`` is called, after ``ray.init``.

    model: hub name, or a folder that every node sees. params: of rows whose columns do not say.
    seed: base of the seeds of rows that sample and have none, mixed with their ids. threads: that
    each engine computes with, whatever Ray gives its actor; ask for as many as ``num_cpus``.
    loading: of ``Engine.from_pretrained`` (dtype, device, revision, ...). fingerprint: parts of one
    that the actors must have, as that of an earlier run; None: all must have that of the first.

    Raises ValueError naming the field.
    """

    model: str | Path
    params: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    threads: int = 1
    config: EngineConfig | None = None
    loading: Mapping[str, Any] = field(default_factory=dict)
    fingerprint: Parts | None = None
    keeper: Any = field(init=False)

    def __post_init__(self) -> None:
        for name, least in (("seed", 0), ("threads", 1)):
            value = getattr(self, name)
            if type(value) is not int or not least <= value < 2**63:
                raise refuse(name, value, f"an integer of at least {least}, below 2**63")
        if not isinstance(self.params, SamplingParams):
            raise refuse("params", self.params, "SamplingParams")
        if not ray.is_initialized():
            ray.init()
        # Lost with the driver alone.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        kept = ray.remote(FirstFingerprint).options(num_cpus=0, scheduling_strategy=here)
        object.__setattr__(self, "keeper", kept.remote(self.fingerprint))


def row_seed(base: int, row_id: object) -> int:
    """The seed of a row, which depends on the base and its id; 1 and "1" are the same id."""
    digest = hashlib.sha256(str(row_id).encode("utf-8", "surrogatepass")).digest()
    return noise_key(base, int.from_bytes(digest[:8], "big")) & (2**63 - 1)


class _Actor:
    """An engine, and the rows of one block after the other.

    Columns of a row: ``prompt`` (text, token ids or chat messages), ``id`` where it samples without
    a seed, and any fields of SamplingParams; null is not given. Or ``request``, all of these in
    JSON as ``tinyspec batch`` writes it. What is refused of a row, or ends it early, is said in its
    ``error``; a lack of memory is no row's fault, and raised.

    Raises DeterminismError in an actor whose fingerprint is not the job's, naming the parts. A
    process whose engine is closed, whose GPU has failed, or whose fingerprint changed ends: Ray
    replaces the actor and gives its rows to another one.
    """

    columns: Mapping[str, Any]

    def __init__(self, job: Job):
        self.job = job
        torch.set_num_threads(job.threads)
        self.engine = self.load()
        self.digest = self.engine.fingerprint
        self.parts = self.engine.contract.fingerprint.parts
        first = ray.get(job.keeper.first.remote(self.parts))
        if other := ", ".join(differences(first, self.parts)):
            told = "this actor's engine has another fingerprint than the first of the job"
            raise DeterminismError(f"{told}: {other}")

    def load(self) -> Engine:
        """The engine of this actor."""
        return Engine.from_pretrained(self.job.model, config=self.job.config, **self.job.loading)

    def __call__(self, table: Any) -> Any:
        """The rows of a ``pyarrow.Table`` with more columns, or others of the same names; raises
        ValueError for a column named as other engines name what is in SamplingParams."""
        if not isinstance(table, pyarrow.Table):
            raise refuse("batch", type(table), 'a table: map_batches(..., batch_format="pyarrow")')
        refuse_other_names(dict.fromkeys(set(table.column_names) - {"messages"}))
        torch.set_num_threads(self.job.threads)  # of this thread of Python
        found = self._each(table.to_pylist())
        self._end_if_dead()
        given = {name: table[name] for name in table.column_names}
        for name, kind in self.columns.items():
            given[name] = pyarrow.array([row[name] for row in found], kind)
        return pyarrow.table(given)

    def _each(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The results of rows, those that are refused found by halves."""
        try:
            return self.run(rows) if rows else []
        except (ValueError, RuntimeError, MemoryError) as error:
            self._end_if_dead()
            if len(rows) > 1:
                half = len(rows) // 2
                return self._each(rows[:half]) + self._each(rows[half:])
            if NO_MEMORY in named(error):
                raise
            return [self.refused(rows[0], str(error))]

    def _end_if_dead(self) -> None:
        """End the process where the engine can give no more rows that are the job's. An exception
        would fail the job, or have Ray ask the same actor again, for ever."""
        reason = self.engine.closed
        try:
            if self.engine.model.device.type == "cuda":
                torch.cuda.synchronize(self.engine.model.device)
            parts = self.engine.contract.fingerprint.parts
            reason = reason or ", ".join(differences(self.parts, parts))
        except Exception as error:
            reason = named(error)
        if reason:
            print(f"tinyspec: this actor ends, its engine is dead: {reason}", file=sys.stderr)
            sys.stderr.flush()
            os._exit(1)

    def request(self, row: dict[str, Any]) -> tuple[dict[str, Any], SamplingParams]:
        """What is given of a row, and its parameters."""
        given = json.loads(row["request"]) if "request" in row else row
        own = {n: v for n, v in given.items() if n in FIELDS and v is not None}
        if isinstance(biases := own.get("logit_bias"), dict):  # a column has all rows' names
            own["logit_bias"] = {token: bias for token, bias in biases.items() if bias is not None}
        if given is row and isinstance(own.get("json_schema"), dict):
            raise refuse("json_schema", "an object", "in a column: its text")
        of_all = self.job.params
        if own.get("temperature", of_all.temperature) and own.get("seed", of_all.seed) is None:
            if given.get("id") is None:
                raise refuse("id", None, "an id, or a seed, for a row that samples")
            own["seed"] = row_seed(self.job.seed, given["id"])
        return given, replace(of_all, **own)

    def run(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The results of rows, or an error for one of them."""
        raise NotImplementedError

    def refused(self, row: dict[str, Any], error: str) -> dict[str, Any]:
        """The result of a row for which ``run`` raised it."""
        return {**dict.fromkeys(self.columns), "fingerprint": self.digest, "error": error}


class Generate(_Actor):
    """For ``map_batches``: completes the prompts of rows.

    ``ds.map_batches(Generate, fn_constructor_args=[Job(...)], batch_format="pyarrow", ...)`` adds
    the columns ``text``, ``token_ids`` [tokens], ``logprobs`` (where asked for), ``error`` (of the
    first completion), ``fingerprint`` (the job's) and ``output``: the whole RequestOutput as JSON,
    without stats, which depend on what ran beside it.
    """

    columns: Mapping[str, Any] = {
        **{"text": TEXT, "token_ids": pyarrow.list_(pyarrow.int64()), "logprobs": NUMBERS},
        **dict.fromkeys(("error", "fingerprint", "output"), TEXT),
    }

    def run(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        given, params = zip(*map(self.request, rows), strict=True)
        outputs = self.engine.generate([one.get("prompt") for one in given], list(params))
        for completion in (one for output in outputs for one in output.completions):
            if NO_MEMORY in (completion.error or ""):
                raise MemoryError(completion.error)
        return [self._result(*each) for each in zip(given, outputs, strict=True)]

    def refused(self, row: dict[str, Any], error: str) -> dict[str, Any]:
        try:
            given, params = self.request(row)
        except ValueError:
            given, params = row, self.job.params
        ended = [Completion([], finish_reason="abort", error=error)]
        output = RequestOutput("", [], params, ended, self.digest, fingerprint_parts=self.parts)
        return self._result(given, output)

    def _result(self, given: dict[str, Any], output: RequestOutput) -> dict[str, Any]:
        output.request_id = str(given.get("id"))
        line = output.to_json(stats=False)
        return {**vars(output.completions[0]), "fingerprint": self.digest, "output": line}


class Score(_Actor):
    """For ``map_batches``, as ``Generate``: log-probabilities of the ``continuation`` of each row's
    prompt, in the columns ``logprobs`` [tokens], ``error`` and ``fingerprint``."""

    columns: Mapping[str, Any] = {"logprobs": NUMBERS, "error": TEXT, "fingerprint": TEXT}

    def run(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        given, params = zip(*map(self.request, rows), strict=True)
        prompts, ends = ([one.get(n) for one in given] for n in ("prompt", "continuation"))
        scores = self.engine.score(prompts, ends, list(params))
        return [{**self.refused({}, ""), "error": None, "logprobs": found} for found in scores]
