"""One verify of a trace, close up: prefill, decode, verify, and rollback or none."""

from __future__ import annotations

from dataclasses import dataclass

from tinyspec.engine.traced import DRAFT, VERIFIED, TracedWork
from tinyspec.tools.trace_run import Run, RunPass

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
