"""One verify of a trace close up, and its picture: prefill, decode, verify, rollback or none."""

from __future__ import annotations

from dataclasses import dataclass

from tinyspec.engine.traced import DRAFT, VERIFIED, TracedWork
from tinyspec.tools.trace_run import Run, RunPass
from tinyspec.tools.trace_svg import MONOSPACE, Drawing, shown

# Drafts that are read at a glance; a verify with as few is shown rather than a longer one.
FEW_DRAFTS = 8


@dataclass
class CloseUp:
    """One verify. before: tokens of prompt and output before the newest one, T0, all with final KV.
    drafts, targets: texts, T1' to Tn' and T1 to Tn+1; a target behind a wrong draft is worth
    nothing. accepted: drafts. committed: of the targets. others: completions in the same pass.
    fast: the fast path drafted, not a drafter: the drafts have KV."""

    name: str
    number: int
    bucket: int
    prompt: int
    before: int
    newest: str
    drafts: list[str]
    targets: list[str]
    accepted: int
    committed: int
    others: int
    fast: bool

    @property
    def rolled_back(self) -> int:
        """Drafts that are dropped."""
        return len(self.drafts) - self.accepted if self.wrong else 0

    @property
    def wrong(self) -> bool:
        """Whether a draft was wrong."""
        return self.accepted < min(len(self.drafts), self.committed)

    @property
    def after(self) -> int:
        """Tokens with final KV, all before the newest."""
        return self.before + self.committed

    @property
    def outcome(self) -> str:
        return "Rollback" if self.wrong else "No rollback"


def close_up(run: Run, prefer: str | None = None) -> CloseUp | None:
    """The verify that shows most: with a rollback, of the request ``prefer``, of few drafts, with
    some accepted; the first of the best. None where nothing was verified."""

    def worth(found: tuple[RunPass, TracedWork]) -> tuple[bool, ...]:
        work, count = found[1], len(found[1].drafts)
        return (
            work.rejected > 0,
            work.request_id == prefer,
            count <= FEW_DRAFTS,
            work.accepted > 0,
            count > 1,
            -1 not in work.drafts,
        )

    verified = [(o, w) for o in run.passes for w in o.works if w.kind == VERIFIED and w.tokens]
    if not verified:
        return None
    one, work = max(verified, key=worth)
    text, lane = run.text, (work.request_id, work.index)
    fast = any(
        w.kind == DRAFT and (w.request_id, w.index) == lane for o in run.passes for w in o.works
    )
    return CloseUp(
        f"{work.request_id}{f' #{work.index}' if work.index else ''}",
        one.number,
        one.bucket,
        work.prompt_tokens,
        work.start,
        text(work.newest),
        [text(token) for token in work.drafts],
        [text(token) for token in work.targets],
        work.accepted,
        len(work.tokens),
        len(one.works) - 1,
        fast,
    )


PANEL, GAP, TOP, BLOCK, CACHE = 218.0, 16.0, 58.0, 21.0, 74.0
PALE = ("fast", "prompt")
YES, NO = "\N{CHECK MARK}", "\N{BALLOT X}"


def picture(one: CloseUp) -> Drawing:
    """Four panels side by side."""
    drawing = Drawing(4 * PANEL + 3 * GAP + 16, TOP + CACHE + BLOCK * (len(one.drafts) + 2) + 50)
    told = f"One verify of {one.name}, in pass {one.number} (canonical, bucket {one.bucket})"
    drawing.text(8, 15, told, bold=True, size=12)
    by = "the fast path" if one.fast else "a drafter"
    words = f"T0 is committed; T1' to T{len(one.drafts)}' are drafts of {by}"
    drawing.text(8, 32, words, size=10, colour="faint")
    panels = (_prefill, _decode, _verify, _rollback)
    for n, panel in enumerate(panels):
        x = 8 + n * (PANEL + GAP)
        if n:
            drawing.line(x - GAP / 2, TOP - 14, 0, drawing.height - TOP + 6, "rule")
        panel(drawing, one, x)
    return drawing


def _cache(drawing: Drawing, x: float, words: str, parts: list[tuple[int, str]]) -> None:
    """The KV cache as a pile, the oldest tokens below; a few tokens are seen beside many."""
    high, wide = CACHE - 24, 64.0
    total = sum(count for count, _ in parts)
    small = sum(count for count, _ in parts[1:])
    base = TOP + 8 + high
    for n, (count, colour) in enumerate(parts):
        share = count / max(total, 1)
        if small:
            rest = max(small / total, 0.4)
            share = 1 - rest if n == 0 else rest * count / small
        tall = high * share
        base -= tall
        if count:
            drawing.rect(x, base, wide, tall, colour)
    drawing.text(x + wide + 8, TOP + 18, "KV cache after", size=10, colour="faint")
    drawing.text(x + wide + 8, TOP + 31, words, size=10, colour="faint")
    drawing.text(x + wide + 8, TOP + 48, " + ".join(str(c) for c, _ in parts if c), size=11)


def _block(
    drawing: Drawing, x: float, row: int, label: str, text: str, colour: str, wide: float = 92
) -> None:
    """A token: its name, what it says."""
    y = TOP + CACHE + 8 + row * BLOCK
    drawing.rect(x, y, wide, BLOCK - 3, colour, round=3)
    colour = "dark" if colour == "draft" else "ink" if colour in PALE else "ground"
    drawing.text(x + 5, y + 13, label, size=10, bold=True, colour=colour)
    at = x + (28 if label else 5)
    words = shown(text, 9) if label else text
    drawing.text(at, y + 13, words, size=10, font=MONOSPACE, colour=colour)


def _heading(drawing: Drawing, x: float, words: str) -> None:
    drawing.text(x, TOP - 6, words, bold=True, size=13)


def _note(drawing: Drawing, one: CloseUp, x: float, words: str, line: int = 0) -> None:
    y = TOP + CACHE + 24 + (len(one.drafts) + 2) * BLOCK + 13 * line
    drawing.text(x, y, words, size=10, colour="faint")


def _prefill(drawing: Drawing, one: CloseUp, x: float) -> None:
    _heading(drawing, x, "Prefill")
    earlier = one.before - one.prompt
    _cache(drawing, x, "prefill and before", [(one.before, "canonical")])
    _block(drawing, x, 0, "", f"prompt {one.prompt}", "prompt", 130)
    if earlier > 0:
        _block(drawing, x, 1, "", f"output {earlier}", "canonical", 130)
    for n in range(min(one.others, 3)):
        _block(drawing, x + 10 + 6 * n, 2 + n, "", "", "fast", 110)
    if one.others:
        _note(drawing, one, x, "deterministic request, and in the same")
        _note(drawing, one, x, f"passes {one.others} other requests (grey)", 1)
    else:
        _note(drawing, one, x, "deterministic request, alone in its passes")


def _decode(drawing: Drawing, one: CloseUp, x: float) -> None:
    _heading(drawing, x, "Decode")
    drafts = len(one.drafts) if one.fast else 0
    _cache(drawing, x, "decode", [(one.before, "canonical"), (drafts, "draft")])
    _block(drawing, x, 0, "T0", one.newest, "canonical")
    for n, draft in enumerate(one.drafts, start=1):
        _block(drawing, x, n, f"T{n}'", draft, "draft")
    words = "drafts, in whatever pass is fastest" if one.fast else "proposed: they have no KV yet"
    _note(drawing, one, x, words)


def _verify(drawing: Drawing, one: CloseUp, x: float) -> None:
    _heading(drawing, x, "Verify")
    parts = [(one.before, "canonical"), (one.committed, "accepted")]
    lost = len(one.drafts) + 1 - one.committed
    _cache(drawing, x, "verify", [*parts, (lost, "rejected")] if lost else parts)
    for n in range(len(one.drafts) + 1):
        kept = n < one.committed
        own = kept and n >= one.accepted
        target = one.targets[n] if n < len(one.targets) else ""
        colour = "bonus" if own else "accepted" if kept else "rejected"
        _block(drawing, x, n, f"T{n + 1}", target, colour)
        y = TOP + CACHE + 21 + n * BLOCK
        if n == len(one.drafts):
            said = "bonus" if kept else "dropped"
        elif n < one.accepted:
            said = f"= T{n + 1}'"
        else:
            said = f"\N{NOT EQUAL TO} T{n + 1}'" if kept else "dropped"
        drawing.text(x + 98, y, YES if n < one.accepted or (own and not one.wrong) else NO, size=11)
        drawing.text(x + 114, y, said, size=10)
    _note(drawing, one, x, f"{len(one.drafts) + 1} rows of one canonical pass; row i")
    _note(drawing, one, x, "yields the canonical token i + 1", 1)


def _rollback(drawing: Drawing, one: CloseUp, x: float) -> None:
    _heading(drawing, x, one.outcome)
    words = "rollback" if one.wrong else "accepting all"
    _cache(drawing, x, words, [(one.before, "canonical"), (one.committed, "accepted")])
    _block(drawing, x, 0, "T0", one.newest, "canonical")
    for n in range(one.committed):
        colour = "bonus" if n >= one.accepted else "accepted"
        _block(drawing, x, n + 1, f"T{n + 1}", one.targets[n], colour)
    if one.wrong:
        drafts = f"{one.rolled_back} draft{'s' if one.rolled_back > 1 else ''} dropped; sequence"
        _note(drawing, one, x, f"{drafts} and KV")
        _note(drawing, one, x, f"cut behind T{one.committed}, the verifier's own token", 1)
    else:
        _note(drawing, one, x, f"T{one.committed} is the verifier's own token: a bonus")
