"""A saved trace, read back, and diagrams of what happened in it: ``drawing`` and ``terminal`` set
them out. Knows neither pixels nor terminals.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from tinyspec.engine.trace import (
    COMPLETIONS,
    DRAFT,
    FORMAT,
    PASSES,
    PROMPT,
    READ_KEPT,
    VERIFIED,
    Lane,
    TracedWork,
    lane_name,
)
from tinyspec.scheduler.passes import PassRecord
from tinyspec.tools.terminal import ARROW, Cell, Diagram, Row

# A pass and what one completion has in it.
Part = tuple[PassRecord, TracedWork]
# Drafts that are read at a glance; a verify with as few is shown rather than a longer one.
FEW_DRAFTS = 8
# Of the tokens shown of a plain request: so many first, so many last.
FIRST, LAST = 6, 2
MODEL = Cell(f"{ARROW} Transformer Model {ARROW}")


@dataclass
class Run:
    """texts: of tokens by id; empty where the engine had no tokenizer. special: ids that are no
    text, as an end of sequence."""

    passes: list[PassRecord]
    texts: dict[int, str]
    special: frozenset[int] = frozenset()

    def of(self, lane: Lane) -> list[Part]:
        """The passes that a completion has a part in, in order."""
        return [(one, w) for one in self.passes for w in one.works if w.lane == lane]

    @property
    def lanes(self) -> list[Lane]:
        """(request id, index) of each completion, in the order in which they came."""
        return list(dict.fromkeys(work.lane for one in self.passes for work in one.works))

    def text(self, *tokens: int) -> str:
        """Of tokens in one line, or their ids."""
        texts = (self.texts.get(token, "?" if token < 0 else f"#{token}") for token in tokens)
        return " ".join(map(shown, texts))


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
        told = f"{path} is not a trace that engine.trace.save wrote: {' '.join(reason.split())}"
        raise ValueError(told) from error


def run_of(data: dict[str, Any]) -> Run:
    """Of an object of the Chrome trace format."""
    known = data["tinyspec"]
    if known["format"] != FORMAT:
        raise ValueError(f"format {known['format']!r} instead of {FORMAT}")
    passes: dict[int, PassRecord] = {}
    for event in data["traceEvents"]:
        kind, args = (event["ph"], event["pid"]), dict(event["args"])
        if kind == ("X", PASSES):
            passes[args["number"]] = PassRecord(**args, began=event["ts"] / 1e6)
        elif kind == ("X", COMPLETIONS):
            passes[args.pop("pass")].works.append(TracedWork(**args))
    texts = {int(token): str(text) for token, text in known["texts"].items()}
    return Run(list(passes.values()), texts, frozenset(known.get("special", ())))


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


def diagrams(run: Run) -> list[Diagram]:
    """A verify with a rollback and one without, where there are; else, of a single completion, how
    it was prefilled and decoded."""
    found = [find_verify(run, rollback) for rollback in (True, False)]
    whole = len(run.lanes) == 1 and run.passes[0].works[0].kind == PROMPT
    verifies = [one for one in found if one is not None]
    return verifies or ([plain_diagram(run)] if whole else [])


def whole_verifies(run: Run) -> list[Part]:
    """Verifies in order, but for those that a stop has cut off, which show neither outcome."""
    found = [(o, w) for o in run.passes for w in o.works if w.kind == VERIFIED and w.drafts]
    return [(o, w) for o, w in found if len(w.tokens) == w.accepted + 1 and not w.end]


def find_verify(run: Run, rollback: bool, names: dict[str, str] | None = None) -> Diagram | None:
    """The verify that shows most, with a rollback or with all drafts accepted and the bonus token:
    of a request in ``names``, of several but few drafts, some accepted, beside other requests; the
    first of the best. None where there is none. names: what requests are called instead of their
    ids."""
    names = names or {}

    def worth(found: Part) -> tuple[int, ...]:
        (one, work), drafts = found, len(found[1].drafts)
        good = drafts <= FEW_DRAFTS, work.accepted > 0, -1 not in work.drafts
        return (work.request_id in names, *good, min(drafts, 3), len(one.works) > 1)

    fitting = [(o, w) for o, w in whole_verifies(run) if (w.accepted < len(w.drafts)) == rollback]
    if not fitting:
        return None
    one, work = max(fitting, key=worth)
    return verify_diagram(run, one, work, names.get(work.request_id, lane_name(work.lane)))


def _others(parts: list[Part], lane: Lane) -> Row:
    """How many other requests had rows in these passes; nothing where there are no passes."""
    ids = {work.request_id for one, _ in parts for work in one.works if work.rows}
    return [_enters(f"other requests: {len(ids - {lane[0]})}")] if parts else []


def _enters(words: str) -> Cell:
    return Cell(f"{words} {ARROW}")


def _kv(label: str, **counts: int) -> Row:
    """Parts of the KV cache by colour."""
    words = {"prompt": "prompt", "canonical": "verified before", "draft": "drafts"}
    words |= {"accepted": "verified now", "plain": "output"}
    parts = [Cell(f"{n} {words[name]}", name) for name, n in counts.items() if n > 0]
    return [Cell(f"{label}:"), *parts]


def verify_diagram(run: Run, one: PassRecord, work: TracedWork, name: str) -> Diagram:
    """Of a verify with one token more committed than drafts accepted. Tokens are named as in the
    papers' figures: T0 is known, T1' a draft, T1 the verifier's token at its place."""
    lane, accepted, drafts, prompt = work.lane, work.accepted, len(work.drafts), work.prompt_tokens
    own = f"T{accepted + 1}"
    before = [(o, w) for o, w in run.of(lane) if o.number < one.number]
    drafting = list(takewhile(lambda part: part[1].kind == DRAFT, reversed(before)))

    def named(tokens: list[int], form: str, colour: str, first: int = 1) -> Row:
        pairs = enumerate(tokens, first)
        return [Cell(f"{form.format(n=n)} {run.text(token)}", colour) for n, token in pairs]

    ours = work.source == "assistant"
    drafted = named(work.drafts, "T{n}'", "assistant" if ours else "draft")
    right = named(work.drafts[:accepted], "T{n} (=T{n}')", "accepted")
    wrong = named(work.drafts[accepted:], "T{n}'", "rejected", accepted + 1)
    kept = named([work.newest, *work.tokens], "T{n}", "accepted", 0)
    kept[0].colour, kept[-1].colour = "canonical", "bonus"
    # Behind a draft that is wrong the last row has yielded a token as well.
    behind = named(work.targets[drafts:], "T{n}", "rejected", drafts + 1) if wrong else []
    legend = [Cell("accepted tokens", "accepted"), Cell("bonus token", "bonus")]
    end, after = "No Rollback", f"accepting all tokens (including {own})"
    note = f"Sequence and KV after {after}; the next pass writes the KV of {own}."
    if wrong:
        legend[1:] = [Cell("rejected tokens", "rejected"), Cell("the verifier's own", "bonus")]
        end, after = "Rollback", "verify-rollback"
        gone = f"{own}'" if len(wrong) == 1 else f"{own}' to T{drafts}'"
        note = f"{gone} dropped, {own} kept (the verifier's own). Sequence and KV cache restored "
        note += f"until the final accepted token (T{accepted}); beyond the figure, tinyspec keeps "
        note += f"{own}, whose KV the next pass writes."
    others = _others([part for part in before if part[1].kind == PROMPT], lane)
    asked = [_enters("deterministic request"), *others, Cell(f"{prompt} prompt tokens", PROMPT)]
    whose = {"assistant": "the assistant", "ngram": "n-gram look-up"}.get(work.source, "a drafter")
    by = [_enters(f"drafts of {whose}: no KV")] if work.proposed else []
    by = _others(drafting, lane) or by
    stored = {"prompt": prompt, "canonical": work.start - prompt}
    held = drafting[0][1].kv_drafts if drafting else 0
    checked = [kept[0], *right, *wrong[:1], kept[-1], *wrong[1:], *behind]
    cache = "KV cache after"
    stages = {
        "Prefill": [asked, _kv(f"{cache} prefill", prompt=prompt)],
        "Decode": [[*by, kept[0], *drafted], _kv(f"{cache} decode", **stored, draft=held)],
        "Verify": [
            [*_others([(one, work)], lane), *checked],
            _kv(f"{cache} {after}", **stored, accepted=accepted + 1),
        ],
        end: [kept],
    }
    return Diagram(f"{end}: {name}, pass {one.number}", stages, legend, note)


def plain_diagram(run: Run) -> Diagram:
    """How its one completion was prefilled and decoded: its prompt gives the first token, and each
    token is fed back for the next, down to the end of sequence."""
    works = [work for one in run.passes for work in one.works]
    size, ended = works[0].prompt_tokens, works[-1].end
    read = [Cell(run.text(t), PROMPT) for work in works for t in work.read][:READ_KEPT]
    read += [Cell(f"of {size} tokens", PROMPT)] if size > len(read) else []
    tokens = [token for work in works for token in work.tokens]
    said = [Cell(run.text(token), "generated") for token in tokens]
    if tokens and tokens[-1] in run.special and ended == "stop":
        said[-1].text += " EoS"
    fed, given = said[:-1], said[1:]
    if len(fed) > FIRST + LAST:
        gap = [Cell(f"{len(fed) - FIRST - LAST} more", "plain")]
        fed, given = (cells[:FIRST] + gap + cells[-LAST:] for cells in (fed, given))
    note = f"{len(tokens)} tokens: the first by prefill, each other when the one before it is fed "
    note += f"back; finish reason: {ended}."
    stored = {"prompt": size, "plain": len(tokens) - 1}
    stages = {
        "prefill": [[_enters("prompt"), *read, MODEL, *said[:1]], _kv("kv cache", prompt=size)],
        "decode": [
            [_enters("each generated token, fed back"), *fed, MODEL, *given],
            _kv("kv cache", **stored),
        ],
    }
    legend = [Cell("prompt", PROMPT), Cell("generated tokens", "generated")]
    return Diagram(f"Prefill and decode: {lane_name(works[0].lane)}", stages, legend, note)
