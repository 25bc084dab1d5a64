"""A saved trace, read back, and one verify of it as a grid: ``drawing`` and ``terminal`` set them
out. Knows neither pixels nor terminals.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import zip_longest
from pathlib import Path
from typing import Any

from tinyspec.engine.trace_events import COMPLETIONS, FORMAT, PASSES
from tinyspec.engine.traced import DRAFT, PROMPT, VERIFIED, TracedPass, TracedWork
from tinyspec.scheduler.passes import PassRecord

Lane = tuple[str, int]
# Drafts that are read at a glance; a verify with as few is shown rather than a longer one.
FEW_DRAFTS = 8
YES, NO = "\N{CHECK MARK}", "\N{BALLOT X}"


@dataclass
class Run:
    """texts: of tokens by id; empty where the engine had no tokenizer."""

    passes: list[TracedPass]
    texts: dict[int, str]

    @property
    def lanes(self) -> list[Lane]:
        """(request id, index) of each completion, in the order in which they came."""
        return list({lane_of(work): None for one in self.passes for work in one.works})

    def text(self, token: int) -> str:
        """Of one token in one line, or its id."""
        return shown(self.texts.get(token, "?" if token < 0 else f"#{token}"))


def lane_of(work: TracedWork) -> Lane:
    """Which completion a work belongs to."""
    return work.request_id, work.index


def lane_name(lane: Lane) -> str:
    """What a completion is called."""
    return f"{lane[0]}{f' #{lane[1]}' if lane[1] else ''}"


def printable(text: str) -> str:
    """``text`` with what cannot be printed escaped: no file may hold a lone surrogate, and no SVG a
    control character."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def shown(text: str, longest: int = 14) -> str:
    """A text in one line: spaces and line feeds visible, what cannot be printed escaped."""
    line = printable(text).replace(" ", "\N{MIDDLE DOT}")
    return line if len(line) <= longest else line[: longest - 1] + "\N{HORIZONTAL ELLIPSIS}"


def read(path: str) -> Run:
    """The trace in a file, or on standard input for "-". Raises OSError, and ValueError for a file
    that holds none."""
    text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    try:
        return run_of(json.loads(text))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(
            f"{path} is not a trace that engine.trace.save wrote: {' '.join(reason.split())}"
        ) from error


def run_of(data: dict[str, Any]) -> Run:
    """Of an object of the Chrome trace format."""
    if not isinstance(data, dict):
        raise ValueError("it is no object")
    known = data["tinyspec"]
    if known["format"] != FORMAT:
        raise ValueError(f"format {known['format']!r} instead of {FORMAT}")
    passes: dict[int, TracedPass] = {}
    events = [event for event in data["traceEvents"] if event["ph"] == "X"]
    names = [field.name for field in fields(PassRecord)]
    for event in (event for event in events if event["pid"] == PASSES):
        record = PassRecord(**{name: event["args"][name] for name in names})
        surplus = record.rows.get("surplus", 0)
        passes[record.number] = TracedPass(record, event["ts"] / 1e6, [], surplus)
    for event in (event for event in events if event["pid"] == COMPLETIONS):
        args = dict(event["args"])
        passes[args.pop("pass")].works.append(TracedWork(**args))
    return Run(list(passes.values()), {int(t): str(text) for t, text in known["texts"].items()})


def cells_of(work: TracedWork, canonical_pass: bool) -> list[str]:
    """What became of each of its tokens, in the order of the sequence; a prompt is one cell."""
    if work.kind == VERIFIED:
        own = ["bonus"] * (len(work.tokens) - work.accepted)
        return ["accepted"] * work.accepted + own + ["rejected"] * work.rejected
    if work.kind == DRAFT:
        return ["draft"] * len(work.drafts)
    riding = "riding" if canonical_pass else "plain"
    tokens = ["canonical" if work.deterministic else riding] * len(work.tokens)
    return [PROMPT, *tokens] if work.kind == PROMPT else tokens


@dataclass
class Cell:
    """A token, or a part of the KV cache. said: what became of it."""

    text: str
    colour: str
    said: str = ""


@dataclass
class Column:
    """One of four: what was computed before, the drafts, their verify, the outcome. cache: the KV
    cache after it."""

    name: str
    cache: list[Cell]
    tokens: list[Cell]
    note: str = ""


@dataclass
class Verify:
    """One verify of a completion: four columns side by side."""

    title: str
    columns: list[Column]

    def rows(self) -> Iterator[tuple[Cell | None, ...]]:
        """The cells of all columns, side by side: first those of the cache, then tokens."""
        yield from zip_longest(*(column.cache for column in self.columns))
        yield from zip_longest(*(column.tokens for column in self.columns))


def find_verify(run: Run, names: dict[str, str] | None = None) -> Verify | None:
    """The verify that shows most: with a rollback, of a request in ``names``, of few drafts, with
    some accepted; the first of the best. None where nothing was verified. names: what requests are
    called instead of their ids."""
    names = names or {}

    def worth(found: tuple[TracedPass, TracedWork]) -> tuple[bool, ...]:
        work, count = found[1], len(found[1].drafts)
        good = count <= FEW_DRAFTS, work.accepted > 0, count > 1, -1 not in work.drafts
        return (work.rejected > 0, work.request_id in names, *good)

    verified = [(o, w) for o in run.passes for w in o.works if w.kind == VERIFIED and w.tokens]
    if not verified:
        return None
    one, work = max(verified, key=worth)
    fast = any(w.kind == DRAFT and lane_of(w) == lane_of(work) for o in run.passes for w in o.works)
    others = len(one.works) - 1
    name = names.get(work.request_id, lane_name(lane_of(work)))
    where = f"pass {one.record.number}, bucket {one.record.bucket}, {others} other requests in it"
    return Verify(f"One verify of {name} ({where})", describe(work, run, fast))


def describe(work: TracedWork, run: Run, fast: bool) -> list[Column]:
    """Of one verify. fast: the fast path drafted, not a drafter: the drafts have KV."""
    drafts, committed, accepted = len(work.drafts), len(work.tokens), work.accepted
    wrong, lost = accepted < min(drafts, committed), drafts - accepted
    newest = Cell(f"T0 {run.text(work.newest)}", "canonical")
    guesses = [Cell(f"T{n}' {run.text(t)}", "draft") for n, t in enumerate(work.drafts, 1)]
    targets = []
    for n in range(drafts + 1):
        text = f"T{n + 1} {run.text(work.targets[n]) if n < len(work.targets) else '?'}"
        if n >= committed:
            targets.append(Cell(text, "rejected", f"{NO} dropped"))
        elif n < accepted:
            targets.append(Cell(text, "accepted", f"{YES} = T{n + 1}'"))
        else:
            said = f"{NO} \N{NOT EQUAL TO} T{n + 1}'" if wrong else "bonus"
            targets.append(Cell(text, "bonus", said))

    def cache(**parts: int) -> list[Cell]:
        words = {"canonical": "canonical", "accepted": "verified", "draft": "of drafts"}
        named = ((c, n, words.get(c, "dropped")) for c, n in parts.items() if n)
        return [Cell(f"KV: {n} {word}", colour) for colour, n, word in named]

    before = cache(canonical=work.start)
    since = work.start - work.prompt_tokens
    early = [Cell(f"{work.prompt_tokens} of the prompt", PROMPT)]
    early += [Cell(f"{since} of output", "canonical")] if since > 0 else []
    by = "drafts of the fast path" if fast else "drafts of a drafter: they have no KV yet"
    last = f"T{committed} is the verifier's own token"
    note = f"all drafts are right; {last}, a bonus"
    if wrong:
        note = f"{lost} dropped; sequence and KV are cut behind T{committed}; {last}"
    kept = cache(canonical=work.start, accepted=committed)
    dropped = cache(rejected=drafts + 1 - committed)
    return [
        Column("Prefill", before, early),
        Column("Decode", before + cache(draft=drafts * fast), [newest, *guesses], by),
        Column("Verify", kept + dropped, targets),
        Column("Rollback" if wrong else "No rollback", kept, [newest, *targets[:committed]], note),
    ]
