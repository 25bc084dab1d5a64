"""Doctor: can this model be served deterministically here, in which buckets, and at what cost?

Knows engines and what they found out; not how it is found.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from tinyspec.config import EngineConfig
from tinyspec.determinism.fingerprint import device_parts
from tinyspec.determinism.probe_results import ProbeResults
from tinyspec.engine.engine import Engine
from tinyspec.errors import DeterminismError, UnsupportedModelError, refuse
from tinyspec.scheduler.buckets import Buckets

DIRECT, PADDED, DRAFT = "direct", "padded to {}", "draft and verify"


@dataclass(frozen=True)
class DoctorReport:
    """What holds for one model on one device; truthy when deterministic requests can be served.

    problems: what is in the way, module or setting named. facts: bucket by bucket, None where
    nothing could be probed. plans: bucket -> how deterministic requests decode when the rows of a
    step need it. fingerprint: of the engine's deterministic outputs. seconds: how long it took.
    """

    model: str
    dtype: str
    device: str
    problems: tuple[str, ...] = ()
    facts: ProbeResults | None = None
    plans: dict[int, str] = field(default_factory=dict)
    fingerprint: str | None = None
    seconds: float = 0.0

    def __bool__(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        lines = [f"{self.model}, {self.dtype}, {self.device}"]
        lines += [f"problem: {problem}" for problem in self.problems]
        if self.facts is not None:
            lines += ["", *self._table(self.facts), "", *self._notes(self.facts)]
        verdict = "can" if self else "cannot"
        lines.append(f"deterministic=True {verdict} be served ({self.seconds:.1f} s)")
        return "\n".join(lines)

    def _table(self, facts: ProbeResults) -> list[str]:
        rows = [("bucket", "canonical", "ms/pass", "rows/s", "deterministic decoding", "broken by")]
        for fact in facts.buckets:
            mark = "*" if fact.rows == facts.reference else ""
            taken = fact.canonical_seconds
            milliseconds, rate = f"{taken * 1e3:.2f}", f"{fact.rows / taken:.0f}"
            plan = self.plans.get(fact.rows, "-")
            broken = ", ".join(_short(name) for name in (*fact.broken_by, *fact.tiled))
            canonical = ("own way" if fact.tiled else "yes") if fact.canonical else "no"
            rows.append((mark + str(fact.rows), canonical, milliseconds, rate, plan, broken))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        aligned = (str.rjust, str.ljust, str.rjust, str.rjust, str.ljust, str.ljust)
        return [
            "  ".join(
                align(cell, width) for align, cell, width in zip(aligned, row, widths, strict=True)
            ).rstrip()
            for row in rows
        ]

    def _notes(self, facts: ProbeResults) -> list[str]:
        canonical, total = len(facts.canonical), len(facts.buckets)
        notes = [f"* reference bucket; {canonical} of {total} buckets are canonical"]
        if facts.tiled:
            notes.append(
                "own way: a canonical pass runs these linears in tiles of rows, or another way "
                "than passes that need not be canonical"
            )
        names = dict.fromkeys(n for fact in facts.buckets for n in (*fact.broken_by, *fact.tiled))
        long = [name for name in names if _short(name) != name]
        if long:
            notes.append(f"broken by, one for all of its kind: {', '.join(long)}")
        for alternative in facts.alternatives:
            rows = ", ".join(map(str, alternative.reference_rows))
            notes.append(
                f"reference_rows of {rows}: {alternative.canonical} canonical buckets, as far as "
                "linears and element-wise modules go"
            )
        if facts.kernel_linears:
            notes.append(f"by the linear kernel: {', '.join(facts.kernel_linears)}")
        if self.fingerprint is not None:
            notes.append(f"fingerprint {self.fingerprint}")
        return notes

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps({"ok": bool(self), **asdict(self)})


def _short(name: str) -> str:
    return name.rpartition(".")[2]


def doctor(
    model_or_engine: PreTrainedModel | Engine,
    config: EngineConfig | None = None,
    fresh: bool = False,
) -> DoctorReport:
    """Which buckets are canonical here, which module breaks the others, what a pass costs.

    A model gets an engine with ``config`` for the time being. Facts on disk are used unless
    ``fresh``. What cannot be served is reported, not raised.

    Raises UnsupportedModelError for what is no module at all, ValueError for a ``config`` beside an
    engine or one that does not fit the model, and for an engine that is closed or has unfinished
    requests.
    """
    begun = time.perf_counter()
    if isinstance(model_or_engine, Engine):
        if config is not None:
            raise refuse("config", config, "None beside an engine, which has its own")
        return _examine(model_or_engine, fresh, begun)
    try:
        engine = Engine(model_or_engine, config=config)
    except UnsupportedModelError as error:
        if not isinstance(model_or_engine, nn.Module):
            raise
        return _report(model_or_engine, begun, problems=(str(error),))
    with engine:
        return _examine(engine, fresh, begun)


def _examine(engine: Engine, fresh: bool, begun: float) -> DoctorReport:
    engine.check_model()
    contract, config = engine.contract, engine.config
    if engine.has_unfinished() and (fresh or contract.results is None):
        raise refuse("engine", "busy", "an engine without unfinished requests")
    problems: tuple[str, ...] = ()
    try:
        contract.probe(fresh)
        contract.ensure()
    except DeterminismError as error:
        problems = (str(error),)
    plans: dict[int, str] = {}
    if not problems:
        plans = {rows: _plan(contract.buckets, config, rows) for rows in contract.buckets.sizes}
    return _report(
        engine.model,
        begun,
        problems=problems,
        facts=contract.results,
        plans=plans,
        fingerprint=None if problems else contract.fingerprint,
    )


def _plan(buckets: Buckets, config: EngineConfig, rows: int) -> str:
    """How deterministic requests alone decode where a step has ``rows`` rows."""
    padded = config.verify in ("padded", "direct")
    if config.verify == "auto":
        padded = buckets.padded_is_cheaper(rows, rows, config.draft_window)
    if not padded or rows > buckets.canonical[-1]:
        return DRAFT
    bucket = buckets.fit_canonical(rows)
    return DIRECT if bucket == rows else PADDED.format(bucket)


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
