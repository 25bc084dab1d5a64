"""One verify of a trace close up: what its picture says, in characters and in SVG.

``describe`` says everything; ``lines`` and ``draw`` set it out.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field

from tinyspec.engine.trace import DRAFT, VERIFIED, TracedWork
from tinyspec.tools.drawing import Drawing, shown
from tinyspec.tools.terminal import Style
from tinyspec.tools.trace_run import Run, RunPass, lane_name, lane_of

# Drafts that are read at a glance; a verify with as few is shown rather than a longer one.
FEW_DRAFTS = 8
YES, NO = "\N{CHECK MARK}", "\N{BALLOT X}"
ARROW, NOT = "\N{RIGHTWARDS ARROW}", "\N{NOT EQUAL TO}"


@dataclass
class Token:
    """A token, or several in one line without a label. mark, said: what became of it."""

    label: str
    text: str
    colour: str
    mark: str = ""
    said: str = ""

    def __str__(self) -> str:
        return f"{self.label}{shown(self.text)}" if self.label else self.text


@dataclass
class Panel:
    """One of four. cache: tokens of the KV cache after it, by colour, the oldest first."""

    name: str
    tokens: list[Token]
    note: str
    cache: dict[str, int]


@dataclass
class Picture:
    """name: of the completion; where: of the pass that verified. panels: what was computed before,
    the drafts, their verify, the outcome."""

    name: str
    where: str
    panels: list[Panel] = field(default_factory=list)

    @property
    def title(self) -> str:
        return f"One verify of {self.name} ({self.where})"


def describe(run: Run, prefer: str | None = None) -> Picture | None:
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
    fast = any(w.kind == DRAFT and lane_of(w) == lane_of(work) for o in run.passes for w in o.works)
    return picture(one, work, run, fast)


def picture(one: RunPass, work: TracedWork, run: Run, fast: bool) -> Picture:
    """Of one verify. fast: the fast path drafted, not a drafter: the drafts have KV."""
    drafts, committed, accepted = len(work.drafts), len(work.tokens), work.accepted
    before, prompt, others = work.start, work.prompt_tokens, len(one.works) - 1
    wrong = accepted < min(drafts, committed)
    newest = Token("T0", run.text(work.newest), "canonical")
    guesses = [run.text(token) for token in work.drafts]
    proposed = [Token(f"T{n}'", text, "draft") for n, text in enumerate(guesses, start=1)]
    targets = []
    for n in range(drafts + 1):
        text = run.text(work.targets[n]) if n < len(work.targets) else "?"
        token = Token(f"T{n + 1}", text, "accepted", YES, f"= T{n + 1}'")
        if n >= committed:
            token.colour, token.mark, token.said = "rejected", NO, "dropped"
        elif n >= accepted:
            token.colour, token.said = "bonus", "bonus"
            if wrong:
                token.mark, token.said = NO, f"{NOT} T{n + 1}'{shown(guesses[n])}"
        targets.append(token)
    early = [Token("", f"the prompt, {prompt} tokens, by canonical rows", "prompt")]
    if before > prompt:
        told = f"{before - prompt} tokens of output since, verified"
        early.append(Token("", told, "canonical"))
    kept = {"canonical": before, "accepted": committed}
    last, lost = f"T{committed}", drafts - accepted
    if wrong:
        note = f"{lost} draft{'s' if lost > 1 else ''} dropped; sequence and KV cut behind {last}, "
        note += "the verifier's own token"
    else:
        note = f"all drafts are right; {last} is the verifier's own token, a bonus"
    by = "drafts of the fast path" if fast else "drafts of a drafter: they have no KV yet"
    around = f"with {others} other requests in it" if others else "with no other request"
    return Picture(
        lane_name(lane_of(work)),
        f"pass {one.number}, bucket {one.bucket}, {around}",
        [
            Panel("Prefill", early, "", {"canonical": before}),
            Panel(
                "Decode",
                [newest, *proposed],
                by,
                {"canonical": before, "draft": drafts if fast else 0},
            ),
            Panel("Verify", targets, "", {**kept, "rejected": drafts + 1 - committed}),
            Panel(
                "Rollback" if wrong else "No rollback", [newest, *targets[:committed]], note, kept
            ),
        ],
    )


# Of a part of the KV cache: what it is called, and in characters the sign of a token of it.
PARTS = {
    "canonical": ("{} canonical", "\N{FULL BLOCK}"),
    "accepted": ("{} verified", "\N{FULL BLOCK}"),
    "draft": ("{} of drafts", "\N{MEDIUM SHADE}"),
    "rejected": ("{} dropped", "\N{LIGHT SHADE}"),
}
# Characters for the canonical part of the KV cache, which is long, and columns of names and tokens.
LONG, NAMES, TOKENS = 12, 13, 17


def lines(one: Picture, style: Style) -> list[str]:
    """In characters, at most 90 columns wide."""
    given = one.panels[1].tokens
    found = [one.title]
    for panel in one.panels:
        rows = [str(token) for token in panel.tokens]
        if panel.name == "Decode":
            arrow = f"  {ARROW}  "
            rows = [arrow.join(style(token.colour, str(token)) for token in panel.tokens)]
        elif panel.name == "Verify":
            rows = [_row(style, *pair) for pair in zip(given, panel.tokens, strict=True)]
        elif panel is one.panels[-1]:
            later = (style(token.colour, str(token)) for token in panel.tokens[1:])
            rows = ["  ".join((rows[0], *later))]
        rows += [panel.note] if panel.note else []
        names = [style("bold", f"{panel.name:{NAMES}}"), *[" " * NAMES] * len(rows)]
        found += ["", *map("".join, zip(names, rows, strict=False)), _bar(style, panel)]
    return [style.signs(line).rstrip() for line in found]


def _row(style: Style, given: Token, token: Token) -> str:
    """One row of the canonical pass: what goes in, what it yields, what becomes of that."""
    own = (
        "  the verifier's own token is kept" if (token.colour, token.mark) == ("bonus", NO) else ""
    )
    yields = style(token.colour, f"{token!s:{TOKENS}}")
    return f"{given!s:{TOKENS}} {ARROW}  {yields} {token.said}  {token.mark}{own}"


def _bar(style: Style, panel: Panel) -> str:
    """The KV cache: its long canonical part, then a character for each token."""
    there = [(part, count) for part, count in panel.cache.items() if count]
    cells = [(p, PARTS[p][1] * (LONG if p == "canonical" else count)) for p, count in there]
    bar = "".join(style(part, signs) for part, signs in cells)
    space = " " * max(LONG + 8 - sum(len(signs) for _, signs in cells), 1)
    label = f"KV cache after {panel.name.lower()}"
    return f"{'':{NAMES}}{label:27}{bar}{space}{_counted(panel)}"


def _counted(panel: Panel) -> str:
    return " + ".join(PARTS[part][0].format(n) for part, n in panel.cache.items() if n)


PANEL, GAP, TOP, BLOCK, CACHE = 218.0, 16.0, 44.0, 21.0, 74.0


def draw(one: Picture) -> Drawing:
    """Four panels side by side."""
    rows = max(len(panel.tokens) for panel in one.panels)
    drawing = Drawing(4 * PANEL + 3 * GAP + 16, TOP + CACHE + BLOCK * rows + 64)
    drawing.text(8, 15, one.title, bold=True, size=12)
    for n, panel in enumerate(one.panels):
        x = 8 + n * (PANEL + GAP)
        if n:
            drawing.line(x - GAP / 2, TOP - 14, 0, drawing.height - TOP + 6, "rule")
        drawing.text(x, TOP - 6, panel.name, bold=True, size=13)
        _pile(drawing, x, panel)
        for row, token in enumerate(panel.tokens):
            _block(drawing, x, TOP + CACHE + 8 + row * BLOCK, token, panel.name == "Verify")
        for line, words in enumerate(textwrap.wrap(panel.note, 36)):
            y = TOP + CACHE + 24 + rows * BLOCK + 13 * line
            drawing.text(x, y, words, colour="faint")
    return drawing


def _pile(drawing: Drawing, x: float, panel: Panel) -> None:
    """The KV cache, the oldest tokens below; a few tokens are seen beside many."""
    high, wide, base = CACHE - 24, 64.0, TOP + CACHE - 16
    total, first = sum(panel.cache.values()), panel.cache["canonical"]
    few = max((total - first) / max(total, 1), 0.4) if total > first else 0.0
    for part, count in panel.cache.items():
        share = 1 - few if part == "canonical" else few * count / max(total - first, 1)
        base -= high * share
        if count:
            drawing.rect(x, base, wide, high * share, part)
    label = "KV cache after", panel.name.lower()
    for n, words in enumerate((*label, *_counted(panel).split(" + "))):
        colour = "faint" if n < 2 else "ink"
        drawing.text(x + wide + 8, TOP + 13 + 13 * n, words, colour=colour)


def _block(drawing: Drawing, x: float, y: float, token: Token, marked: bool) -> None:
    """A token: its name, what it says, in a verify what becomes of it."""
    colour = {"draft": "dark", "prompt": "ink"}.get(token.colour, "ground")
    drawing.rect(x, y, 92 if token.label else PANEL - 4, BLOCK - 3, token.colour, round=3)
    drawing.text(x + 5, y + 13, token.label, bold=True, colour=colour)
    words = shown(token.text, 9) if token.label else token.text
    indent, size = (28, 10) if token.label else (5, 9)
    drawing.text(x + indent, y + 13, words, size, colour)
    if marked:
        drawing.text(x + 98, y + 13, token.mark, size=11)
        drawing.text(x + 114, y + 13, token.said)
