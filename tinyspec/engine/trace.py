"""A trace of passes: what every row was for, and what became of it; as a Chrome trace, too.

Drawn up from what a pass and its sequences were before it was committed, and are afterwards. Knows
no pictures.
"""

from __future__ import annotations

import json
from collections import deque
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from tinyspec.outputs import CompletionStats
from tinyspec.scheduler.passes import KINDS, PassRecord
from tinyspec.scheduler.request import Sequence
from tinyspec.scheduler.step import Step

# Passes that are kept where the setting names no number.
PASSES_KEPT = 10_000
PROMPT, CANONICAL, PLAIN, DRAFT, VERIFIED = "prompt", "canonical", "plain", "draft", "verify"
# Completions that get a token without rows, when all have theirs, or that end without any.
NO_ROWS = "no rows"
# Tokens of a prompt that are kept of each pass.
READ_KEPT = 16
# Of the Chrome trace format: processes are groups of lanes. ``tools/trace.py`` reads it back.
PASSES, COMPLETIONS = 1, 2
FORMAT = 1
# Of a completion: the id of its request and its index there.
Lane = tuple[str, int]


@dataclass(slots=True)
class TracedWork:
    """One sequence's rows in a pass.

    kind: "prompt", "canonical" (a deterministic request's newest token in a canonical pass),
    "plain" (the same of a plain one), "draft", "verify" or "no rows". start: position of its first
    row. read: of a prompt's rows, the first READ_KEPT ids. tokens: ids committed. newest: the
    generated token before these, -1 where there is none. drafts: ids drafted by this pass, or
    verified by it. targets: of a verify, all that the rows yielded. accepted, rejected: drafts.
    proposed: drafts that a drafter added before the pass. source: of a verify, whose the drafts
    are. kv: tokens whose KV is final after the pass. kv_drafts: tokens behind them whose KV is a
    draft's. pages: held after it. end: finish reason.
    """

    request_id: str
    index: int
    prompt_tokens: int
    deterministic: bool
    kind: str
    start: int = 0
    rows: int = 0
    read: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    newest: int = -1
    drafts: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    accepted: int = 0
    rejected: int = 0
    proposed: int = 0
    source: str = ""
    kv: int = 0
    kv_drafts: int = 0
    pages: int = 0
    end: str | None = None

    @classmethod
    def of(cls, sequence: Sequence, kind: str = NO_ROWS) -> TracedWork:
        """Of a sequence that is not looked at yet."""
        request = sequence.request
        prompt, deterministic = request.num_prompt, sequence.deterministic
        return cls(request.request_id, sequence.index, prompt, deterministic, kind)

    @property
    def lane(self) -> Lane:
        """Which completion it belongs to."""
        return self.request_id, self.index


def lane_name(lane: Lane) -> str:
    """What a completion is called."""
    return f"{lane[0]}{f' #{lane[1]}' if lane[1] else ''}"


# A sequence before a pass is committed: its number there, its tokens and drafts, and their source.
Before = tuple[int, Sequence, int, list[int], str]


class Trace:
    """``records`` of one engine's latest passes, with what became of every row; of a pass of n
    sequences about 2 KB + 0.5 KB n. Costs host time alone, and changes no bit and no fingerprint.
    """

    def __init__(self, records: deque[PassRecord], tokenizer: Any = None):
        self.tokenizer = tokenizer
        self._records = records
        # What of each sequence's counts is told.
        self._told: WeakKeyDictionary[Sequence, CompletionStats] = WeakKeyDictionary()

    def __len__(self) -> int:
        return len(self._records)

    def passes(self) -> list[PassRecord]:
        """The passes that are kept, in order."""
        return list(self._records)

    def before(self, step: Step, sources: dict[int, str]) -> list[Before]:
        """To call before ``step`` is committed: its sequences that are there. sources: what drafts
        are called, by the column ``proposed``."""
        sequences = step.sequences
        there = [(n, sequences[n]) for n in step.alive.nonzero()[0].tolist()]
        return [(n, one, one.length, one.drafts, sources[one.proposed]) for n, one in there]

    def after(self, step: Step, before: list[Before], ended: list[Sequence]) -> None:
        """``step`` is committed, or has failed; ``ended`` sequences have finished."""
        works = {each[1]: self._work(step, each) for each in before}
        for sequence in ended:
            works.setdefault(sequence, TracedWork.of(sequence)).end = sequence.finish_reason
        step.record.works = list(works.values())

    def _work(self, step: Step, before: Before) -> TracedWork:
        n, sequence, length, drafts, source = before
        stats, told = sequence.stats, self._told.get(sequence, CompletionStats())
        self._told[sequence] = replace(stats)
        kind = KINDS[step.kinds[n]]
        if stats.verify_passes > told.verify_passes:
            kind = VERIFIED
        elif kind == "decode":
            kind = CANONICAL if sequence.deterministic else PLAIN
        work = TracedWork.of(sequence, kind)
        work.start, work.rows = int(step.starts[n]), int(step.counts[n])
        if length > sequence.request.num_prompt:
            (work.newest,) = sequence.ids(length - 1, length)
        work.tokens = sequence.ids(length, sequence.length)
        work.kv, work.pages = sequence.computed, len(sequence.pages)
        work.accepted = stats.accepted - told.accepted
        work.rejected = stats.rolled_back - told.rolled_back
        work.proposed = stats.drafted - told.drafted
        if kind == VERIFIED:
            work.drafts, work.source = drafts, source
            if step.tokens is not None:
                sampled = step.tokens[step.firsts[n] :][: step.yields[n]].tolist()
                work.targets = [token for token in sampled if token >= 0]
        elif kind == PROMPT:
            work.read = sequence.ids(work.start, work.start + min(work.rows, READ_KEPT))
        elif kind == DRAFT:
            if sequence.running:
                work.drafts = sequence.drafts[len(drafts) :]
                work.kv_drafts = int(step.ends[n]) - work.kv
            work.proposed -= len(work.drafts)
        return work

    def save(self, path: str | Path) -> None:
        """Write what is kept as a Chrome trace: for https://ui.perfetto.dev and ``tinyspec trace``.

        Raises OSError where the file cannot be written.
        """
        text = json.dumps(chrome_trace(self.passes(), self.tokenizer))
        Path(path).write_text(text, encoding="utf-8")


def rows_of(record: PassRecord) -> dict[str, int]:
    """Rows of a traced pass by kind, padding included, and as "surplus" those of sequences that had
    gone when it was committed."""
    kinds = (PROMPT, CANONICAL, PLAIN, DRAFT, VERIFIED)
    rows = {kind: sum(w.rows for w in record.works if w.kind == kind) for kind in kinds}
    surplus = sum(record.rows.values()) - sum(rows.values())
    return {**rows, "surplus": surplus, "padding": record.padding}


def chrome_trace(passes: list[PassRecord], tokenizer: Any = None) -> dict[str, Any]:
    """``passes`` as an object of the format, with one lane for passes and one for each completion:
    times in microseconds from the first pass on; text of tokens where there is a tokenizer."""
    works = [work for one in passes for work in one.works]
    lanes = {lane: n for n, lane in enumerate(dict.fromkeys(work.lane for work in works), 1)}
    names = [("process_name", "passes", PASSES, 0), ("thread_name", "passes", PASSES, 1)]
    names.append(("process_name", "completions", COMPLETIONS, 0))
    names += [("thread_name", lane_name(lane), COMPLETIONS, n) for lane, n in lanes.items()]
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": name, "pid": process, "tid": lane, "args": {"name": value}}
        for name, value, process, lane in names
    ]
    for one in passes:
        events += _events(one, lanes, passes[0].began)
    ids = ((*w.read, *w.tokens, *w.drafts, *w.targets, w.newest) for w in works)
    tokens = set(chain(*ids)) - {-1} if tokenizer is not None else set()
    texts = {token: _text(tokenizer, token) for token in tokens}
    special = sorted(tokens & set(getattr(tokenizer, "all_special_ids", ())))
    known = {"format": FORMAT, "texts": texts, "special": special}
    return {"traceEvents": events, "displayTimeUnit": "ms", "tinyspec": known}


def _events(record: PassRecord, lanes: dict[Lane, int], begun: float) -> list[dict[str, Any]]:
    time = {"ts": round(1e6 * (record.began - begun), 3), "dur": round(1e6 * record.seconds, 3)}
    kind = "canonical" if record.canonical else "fast"
    name = f"{kind} pass of {record.bucket}{f', {record.way}' if record.way else ''}"
    of_pass = {"ph": "X", "name": name, "pid": PASSES, "tid": 1, **time}
    held = {"ph": "C", "name": "pages held", "pid": PASSES, "tid": 0, "ts": time["ts"]}
    told = {key: value for key, value in vars(record).items() if key not in ("began", "works")}
    found: list[dict[str, Any]] = [
        {**of_pass, "args": {**told, "rows": rows_of(record)}},
        {**held, "args": {"pages": record.pages_held}},
    ]
    for work in record.works:
        where = {"pid": COMPLETIONS, "tid": lanes[work.lane], **time}
        args = {"pass": record.number, **asdict(work)}
        found.append({"ph": "X", "name": title(work), **where, "args": args})
    return found


def title(work: TracedWork) -> str:
    """What its rows did."""
    if work.kind == VERIFIED:
        undone = f", {work.rejected} rolled back" if work.rejected else ""
        return f"verify {len(work.drafts)}: {work.accepted} accepted{undone}"
    return work.kind if work.rows < 2 else f"{work.kind} of {work.rows} rows"


def _text(tokenizer: Any, token: int) -> str:
    """Of a token by itself; of one that has none, as an end: its name."""
    text = tokenizer.decode([token], skip_special_tokens=True)
    return str(text or tokenizer.convert_ids_to_tokens(token))
