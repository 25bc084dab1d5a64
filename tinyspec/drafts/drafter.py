"""Drafters propose tokens for a verify; they see token ids only.

A wrong proposal costs rows but changes no result: committed tokens are always the verifier's.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any, Protocol, runtime_checkable

import numpy as np
from transformers import PreTrainedModel

from tinyspec.drafts.mtp import head_of
from tinyspec.errors import refuse
from tinyspec.model.supported import recurrent_layers, vocab_size
from tinyspec.model.torch_state import callers_modes
from tinyspec.scheduler.buckets import Buckets
from tinyspec.scheduler.passes import PassRecord
from tinyspec.scheduler.sequence_table import Array

# Prompt lookup: of the passes' time, what proposals may cost that win nothing; their length until
# they have won something; how much is remembered from one pass to the next.
SHARE, TRIAL, REMEMBERS = 0.02, 4, 0.995
Proposals = list[list[int] | Exception]
# Equal tokens that n-gram drafts follow where an assistant would draft otherwise.
BEFORE_A_MODEL = 3


@runtime_checkable
class Drafter(Protocol):
    """Anything with this method may be given as ``EngineConfig.drafter``."""

    def propose(self, sequences: list[Sequence[int]], n: int) -> list[list[int]]:
        """Up to ``n`` tokens to follow each of ``sequences``, which are prompt and answer so far;
        an empty list leaves a sequence to the fast path. Proposals end before the first id that is
        no token of the model; what is raised ends the request it was asked for."""
        ...


class NgramDrafter:
    """What followed the same last tokens earlier in the text (prompt lookup decoding).

    Until proposals have won more time than they and looking them up cost, they are short, follow at
    least two equal tokens, and pause while they cost more than SHARE of the passes' time.
    """

    def __init__(self, longest: int = 3, most: int | None = None, shortest: int = 1):
        self.longest, self.most, self._shortest = longest, most, shortest
        # Seconds of recent passes; of them by proposals, and what accepted ones would have taken.
        self._total = self._spent = self._won = 0.0

    def propose(self, sequences: list[Sequence[int]] | list[Array], n: int) -> list[list[int]]:
        """As ``Drafter.propose``; arrays of one dimension will do as well."""
        n, shortest = n if self.most is None else min(n, self.most), self._shortest
        if self._won <= self._spent:
            n, shortest = min(n, TRIAL), max(min(2, self.longest), shortest)
        return [self._lookup(np.asarray(sequence), n, shortest) for sequence in sequences]

    @property
    def pauses(self) -> bool:
        """Whether it need not be asked now."""
        return self._spent > self._won + SHARE * self._total

    def _lookup(self, tokens: np.ndarray, n: int, shortest: int) -> list[int]:
        """Up to ``n`` tokens after a place with most of the same tokens as the end: the last that
        has so many behind it, or the first."""
        found, ends = -1, np.flatnonzero(tokens[:-1] == tokens[-1])
        for size in range(1, self.longest + 1):
            if size > 1:
                ends = ends[ends >= size - 1]
                ends = ends[tokens[ends - size + 1] == tokens[-size]]
            if not len(ends):
                break
            if size >= shortest:
                enough = int(np.searchsorted(ends, len(tokens) - n))
                found = int(ends[max(0, enough - 1)])
        return list(map(int, tokens[found + 1 : found + 1 + n])) if found >= 0 else []

    def account(
        self, record: PassRecord, proposed: int, accepted: int, buckets: Buckets, asking: float = 0
    ) -> None:
        """Note a pass that had ``proposed`` tokens among its rows; without them it would have been
        a fast one. asking: seconds in which they were looked up."""
        seconds = cost = buckets.seconds(record.bucket, record.canonical)
        won = 0.0
        if proposed:
            without = buckets.fit(max(1, sum(record.rows.values()) - proposed))
            seconds = min(cost, buckets.seconds(without))
            won = seconds * accepted / without
        for name, more in (("_total", cost), ("_spent", asking + cost - seconds), ("_won", won)):
            setattr(self, name, getattr(self, name) * REMEMBERS + more)


def assistant_refusal(model: PreTrainedModel, served: PreTrainedModel) -> str | None:
    """What ``model`` has that keeps it from drafting for ``served`` on its pages, or None."""
    own, needed = vocab_size(model), vocab_size(served)
    if own < needed:
        return f"a vocabulary of {own} tokens, and the served model one of {needed}"
    if model.device != served.device:
        return f"its weights on {model.device}, and the served model on {served.device}"
    if recurrent_layers(model):
        return "recurrent layers, whose states no page holds"
    return None


def in_order(drafter: Any) -> tuple[Drafter | PreTrainedModel, ...]:
    """What ``make_drafter`` has made, one by one: who follows drafts where those before do not."""
    several = isinstance(drafter, tuple) and not isinstance(drafter, Drafter)
    return drafter if several else (drafter,)


def source_of(drafter: Drafter | PreTrainedModel) -> str:
    """What its drafts are called."""
    if isinstance(drafter, PreTrainedModel):
        return "assistant"
    return "ngram" if isinstance(drafter, NgramDrafter) else "drafter"


def make_drafter(choice: Any, served: PreTrainedModel, field: str = "drafter") -> Any:
    """The drafter that ``choice`` names (as ``EngineConfig.drafter``), for the model ``served``: an
    assistant model is its own; of a pair with "ngram" both, for ``in_order``; None: drafts are
    decode rows on the fast path.

    Raises ValueError naming ``field``.
    """
    if choice is served:
        raise refuse(field, type(choice).__name__, "another model than the one served")
    if choice is None:
        return None
    if isinstance(choice, tuple) and len(choice) == 2 and choice[0] == "ngram":
        second = make_drafter(choice[1], served, field)
        if isinstance(second, PreTrainedModel):
            return NgramDrafter(shortest=BEFORE_A_MODEL), second
    if choice == "ngram":
        return NgramDrafter()
    if choice == "mtp":
        try:
            return head_of(served)
        except ValueError as error:
            raise refuse(field, choice, f"a model of a checkpoint with a head: {error}") from error
    if isinstance(choice, PreTrainedModel):
        if (reason := assistant_refusal(choice, served)) is not None:
            raise refuse(field, type(choice).__name__, f"another model: this one has {reason}")
        return choice
    if isinstance(choice, Drafter):
        return choice
    allowed = '"ngram", "mtp", a model, ("ngram", model or "mtp"), or anything with propose'
    raise refuse(field, choice, f"None, {allowed}(sequences, n)")


def proposals(drafter: Drafter, histories: list[Any], n: int, thread: int) -> Proposals:
    """What ``drafter`` proposes for each; what it raised for one alone stands in its place. thread:
    whose it is."""
    try:
        with callers_modes(thread):
            given = drafter.propose(histories, n)
        found: Proposals = [[index(token) for token in each] for each in given]
        if len(found) != len(histories):
            raise ValueError(f"{len(found)} proposals for {len(histories)} sequences")
    except Exception as error:
        if len(histories) == 1:
            return [error]
        return [proposals(drafter, [history], n, thread)[0] for history in histories]
    return found
