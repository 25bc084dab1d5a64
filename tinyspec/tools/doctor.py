"""Doctor: can this model be served deterministically here, in which buckets, and at what cost?

Knows engines and their probe results, not how these are measured.
"""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from tinyspec.config import EngineConfig
from tinyspec.determinism.attention_probe import MANY_ROWS
from tinyspec.determinism.environment import device_parts
from tinyspec.determinism.model_probe import graph_refusals
from tinyspec.determinism.results import ProbeResults
from tinyspec.engine.engine import Engine
from tinyspec.errors import DeterminismError, TinyspecError, refuse
from tinyspec.interrupts import at_once
from tinyspec.scheduler.buckets import Buckets
from tinyspec.tools.terminal import table

# How many drafts are weighed.
DRAFTS = (1, 2, 4, 8)
IN_TILES = "in tiles: canonical passes run these linears in tiles of rows, or transposed"


@dataclass(frozen=True)
class DoctorReport:
    """What holds for one model on one device; truthy when deterministic requests can be served.

    problems: why they cannot, with the module or setting. facts: the probe results, None if nothing
    could be probed. plans: bucket -> how deterministic requests decode in a step of so many rows.
    eager: why passes of a kind are not captured as graphs, where the kernels are Triton's.
    drafts: with an assistant, seconds of so many drafts for one request and of their verify.
    fingerprint: of the engine's deterministic outputs. seconds: how long it took. kv_dtype:
    as in the engine's config.
    """

    model: str
    dtype: str
    device: str
    problems: tuple[str, ...] = ()
    facts: ProbeResults | None = None
    plans: dict[int, str] = field(default_factory=dict)
    eager: dict[str, str] = field(default_factory=dict)
    drafts: dict[int, float] = field(default_factory=dict)
    fingerprint: str | None = None
    seconds: float = 0.0
    kv_dtype: str = "auto"

    def __bool__(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        cache = "" if self.kv_dtype == "auto" else f", KV cache of {self.kv_dtype}"
        lines = [f"{self.model}, {self.dtype}{cache}, {self.device}"]
        lines += [f"problem: {problem}" for problem in self.problems]
        if self.facts is not None:
            lines += ["", *self._table(self.facts), "", *self._notes(self.facts)]
        verdict = "can" if self else "cannot"
        lines.append(f"deterministic=True {verdict} be served ({self.seconds:.1f} s)")
        return "\n".join(lines)

    def _table(self, results: ProbeResults) -> list[str]:
        rows: list[tuple[object, ...]] = [
            ("bucket", "canonical", "ms/pass", "deterministic decoding", "broken by")
        ]
        for bucket in results.buckets:
            size = f"*{bucket.rows}" if bucket.rows == results.reference else bucket.rows
            canonical = ("in tiles" if bucket.tiles else "yes") if bucket.canonical else "no"
            cost = f"{bucket.seconds * 1e3:.2f}" if bucket.seconds else "-"
            names = [n.rpartition(".")[2] for n in (*bucket.broken_by, *bucket.tiles)]
            plan = self.plans.get(bucket.rows, "-")
            rows.append((size, canonical, cost, plan, ", ".join(names)))
        return table(rows, right=(0, 2))

    def _notes(self, results: ProbeResults) -> list[str]:
        canonical, total = len(results.canonical), len(results.buckets)
        notes = [f"* reference bucket; {canonical} of {total} buckets are canonical"]
        notes += [IN_TILES] if results.tiles else []
        for kind in results.attention:
            rows = f"{kind.checked} rows alone and in a prompt, {kind.differing} differ"
            notes.append(f"{kind.name}: {rows}")
        if self.drafts:
            told = ", ".join(f"{k}: {1e3 * cost:.2f} ms" for k, cost in self.drafts.items())
            notes.append(f"drafts of one request by the assistant, and their verify: {told}")
        if results.kernel_linears:
            notes.append(f"served by the linear kernel: {', '.join(results.kernel_linears)}")
        notes += [f"{kind} passes run without graphs: {why}" for kind, why in self.eager.items()]
        return notes + ([f"fingerprint {self.fingerprint}"] if self.fingerprint else [])

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps({"ok": bool(self), **asdict(self)})


def doctor(
    model_or_engine: PreTrainedModel | Engine,
    config: EngineConfig | None = None,
    fresh: bool = False,
) -> DoctorReport:
    """Which buckets are canonical here, which module breaks the others, what a pass costs.

    Proves every bucket at once that an engine proves one by one while requests run. A model gets a
    temporary engine with ``config``. Probe results on disk are used unless ``fresh``. What cannot
    be served is reported, not raised.

    Raises UnsupportedModelError for an object that is no module, ValueError for a ``config`` beside
    an engine or one that does not fit the model, and for an engine that is closed or has unfinished
    requests. Those of other threads that begin meanwhile wait.
    """
    begun, engine = time.perf_counter(), model_or_engine
    with ExitStack() as stack:
        if not isinstance(engine, Engine):
            try:
                engine = stack.enter_context(Engine(engine, config=config))
            except TinyspecError as error:
                if not isinstance(model_or_engine, nn.Module):
                    raise
                return _report(model_or_engine, begun, problems=(str(error),))
        elif config is not None:
            raise refuse("config", config, "None for an engine, which has its own config")
        with engine.driver.turn("doctor"), at_once():
            found = _found(engine, fresh)
    return _report(engine.model, begun, **found)


def _found(engine: Engine, fresh: bool) -> dict[str, Any]:
    engine.tracker.check_model()
    contract, config = engine.contract, engine.config
    if engine.has_unfinished() and (fresh or contract.results is None):
        raise refuse("engine", "busy", "an engine without unfinished requests")
    eager: dict[str, str] = {}
    try:
        if not engine.has_unfinished():
            contract.probe(fresh, MANY_ROWS)
            eager = graph_refusals(engine.runner)
        contract.ensure()
    except DeterminismError as error:
        found: dict[str, Any] = {"problems": (str(error),)}
    else:
        buckets = contract.buckets
        plans = {rows: _plan(buckets, config, rows) for rows in buckets.sizes}
        found = {"plans": plans, "fingerprint": contract.fingerprint.digest}
        if each := engine.core.assistant.seconds():
            verifies = {k: buckets.canonical_cost(buckets.canonical, k + 1) for k in DRAFTS}
            found["drafts"] = {k: k * each + cost for k, cost in verifies.items()}
    return found | {"facts": contract.results, "eager": eager, "kv_dtype": config.kv_dtype}


def _plan(buckets: Buckets, config: EngineConfig, rows: int) -> str:
    """How deterministic requests decode in a step of ``rows`` rows without plain requests."""
    if config.verify == "always" or rows > buckets.canonical[-1]:
        return "draft and verify"
    bucket = buckets.fit_canonical(rows)
    if bucket == rows:
        return "direct"
    return f"padded to {bucket}" + " or drafts" * (config.verify == "auto")


def _report(model: PreTrainedModel, begun: float, **found: Any) -> DoctorReport:
    first = next(model.parameters())
    device = ", ".join(device_parts(first.device))
    return DoctorReport(
        model=type(model).__name__,
        dtype=str(getattr(model, "dtype", first.dtype)).removeprefix("torch."),
        device=f"{first.device.type} ({device})",
        seconds=time.perf_counter() - begun,
        **found,
    )
