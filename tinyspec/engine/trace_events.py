"""A trace as a file in the Chrome trace format: one lane for passes, one for each completion.

Everything that pictures need stands in the events' ``args``; ``tools/trace.py`` reads it back.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from tinyspec.engine.tokenization import decode
from tinyspec.engine.traced import TracedPass, TracedWork

# Of the format: processes are groups of lanes.
PASSES, COMPLETIONS = 1, 2
FORMAT = 1


def write(path: Path, passes: list[TracedPass], tokenizer: Any) -> None:
    """Write ``passes`` to a file. Raises OSError."""
    path.write_text(json.dumps(chrome_trace(passes, tokenizer)), encoding="utf-8")


def chrome_trace(passes: list[TracedPass], tokenizer: Any = None) -> dict[str, Any]:
    """``passes`` as an object of the format: times in microseconds from the first pass on; text of
    tokens where there is a tokenizer."""
    lanes: dict[tuple[str, int], int] = {}
    for one in passes:
        for work in one.works:
            lanes.setdefault((work.request_id, work.index), len(lanes) + 1)
    begun = passes[0].began if passes else 0.0
    events = [_named("process_name", "passes", PASSES), _named("thread_name", "passes", PASSES, 1)]
    events.append(_named("process_name", "completions", COMPLETIONS))
    events += [
        _named("thread_name", f"{request}{f' #{index}' if index else ''}", COMPLETIONS, lane)
        for (request, index), lane in lanes.items()
    ]
    for one in passes:
        events += _events(one, lanes, begun)
    tokens = {token for one in passes for work in one.works for token in _tokens(work)}
    known = {"format": FORMAT, "texts": _texts(tokens, tokenizer)}
    return {"traceEvents": events, "displayTimeUnit": "ms", "tinyspec": known}


def _named(name: str, value: str, process: int, lane: int = 0) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": process, "tid": lane, "args": {"name": value}}


def _events(one: TracedPass, lanes: dict[tuple[str, int], int], begun: float) -> list[Any]:
    record = one.record
    time = {"ts": round(1e6 * (one.began - begun), 3), "dur": round(1e6 * record.seconds, 3)}
    kind = "canonical" if record.canonical else "fast"
    way = f", {record.way}" if record.way else ""
    args = {**asdict(record), "rows": one.rows}
    name = f"{kind} pass of {record.bucket}{way}"
    found = [{"ph": "X", "name": name, "pid": PASSES, "tid": 1, **time, "args": args}]
    found.append(_counted("pages held", {"pages": record.pages_held}, time["ts"]))
    for work in one.works:
        known = {"pass": record.number, **asdict(work)}
        lane = lanes[work.request_id, work.index]
        where = {"pid": COMPLETIONS, "tid": lane, **time}
        found.append({"ph": "X", "name": _title(work), **where, "args": known})
    return found


def _counted(name: str, values: dict[str, int], time: float) -> dict[str, Any]:
    return {"ph": "C", "name": name, "pid": PASSES, "tid": 0, "ts": time, "args": values}


def _title(work: TracedWork) -> str:
    if work.kind == "verify":
        undone = f", {work.rejected} rolled back" if work.rejected else ""
        return f"verify {len(work.drafts)}: {work.accepted} accepted{undone}"
    return work.kind if work.rows < 2 else f"{work.kind} of {work.rows} rows"


def _tokens(work: TracedWork) -> Iterable[int]:
    newest = [work.newest] if work.newest >= 0 else []
    return [*work.tokens, *work.drafts, *work.targets, *newest]


def _texts(tokens: set[int], tokenizer: Any) -> dict[int, str]:
    """Of each token by itself."""
    if tokenizer is None:
        return {}
    return {token: decode(tokenizer, [token]) or _spelled(tokenizer, token) for token in tokens}


@cache
def _spelled(tokenizer: Any, token: int) -> str:
    """A token that has no text, as an end: by its name."""
    return str(tokenizer.convert_ids_to_tokens(token))
