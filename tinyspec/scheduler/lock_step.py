"""The rows of one call of ``generate`` that advance together, for code of the user's that is
written for a batch. Host only.

A row whose logits are there waits until those of all are; then all get their next token at once.
It needs no pages meanwhile: where not all fit, those that wait are preempted for the others.
A row that has ended goes on behind its end, as in transformers, until all have.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tinyspec.scheduler.request import Request, Sequence


@dataclass(eq=False)
class LockStep:
    """B rows of one call, [B, W] tokens as it was given them, and what each has got since.

    prompts: ids, pads included. pad: what follows in a row that has ended; -1: what it would have.
    criteria: called with [B, W + t] ids and the scores of every step, or None; [B] answers, or one
    for all. numbers: of the rows. logits: of the rows' next tokens, by their number, so far as they
    are there. done: the rows that have ended. scores: [B, V] of every step, where they are kept.
    """

    prompts: list[list[int]]
    pad: int
    criteria: list[Callable[..., Any]]
    sequences: list[Sequence] = field(default_factory=list)
    numbers: dict[Sequence, int] = field(default_factory=dict)
    logits: dict[int, Any] = field(default_factory=dict)
    done: list[bool] = field(default_factory=list)
    scores: list[Any] = field(default_factory=list)

    def own(self, requests: list[Request]) -> None:
        """The rows are the completions of ``requests``, one behind the other, which compute their
        prompts each."""
        for request in requests:
            request.lock_step = self
            request.sequences[0].siblings = []
            self.sequences += request.sequences
        self.numbers = {sequence: n for n, sequence in enumerate(self.sequences)}
        self.done = [False] * len(self.sequences)

    @property
    def ready(self) -> bool:
        """Whether every row has the logits of its next token, and none was aborted."""
        missing = len(self.sequences) - len(self.logits)
        return not (missing or any(sequence.finished for sequence in self.sequences))

    def ids(self) -> list[list[int]]:
        """[B][W + t]: all committed tokens."""
        return [
            prompt + sequence.ids(sequence.request.num_prompt, sequence.length)
            for prompt, sequence in zip(self.prompts, self.sequences, strict=True)
        ]


def waits_for_others(sequence: Sequence) -> bool:
    """Whether it has the logits of its next token, and others of its call have not."""
    lock: LockStep | None = sequence.request.lock_step
    return lock is not None and lock.numbers[sequence] in lock.logits


def forget_logits(sequence: Sequence) -> None:
    """The model changed: those of its call are found again."""
    if sequence.request.lock_step is not None:
        sequence.request.lock_step.logits.clear()


class BatchWide:
    """A logits processor of the user's that is called once for all rows of a ``LockStep``."""

    def __init__(self, processor: Callable[..., Any]):
        self._processor = processor
        self.__qualname__ = getattr(processor, "__qualname__", type(processor).__qualname__)

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """[B, V] scores from [B, W + t] ids and [B, V] scores."""
        return self._processor(input_ids, scores)
