"""What changes logits before a token is drawn: biases, penalties, bad words, minimum length, a
grammar and the user's processors, then top-k, top-p and min-p.

Rows are changed each by itself but where a processor takes all. Whether a row is changed follows
from its own request, so what it is computed in does as well. Filters sum probabilities as 40-bit
integers, so the order of addition does not matter, and ties go to the lowest index; transformers'
warpers use an unstable sort and a floating-point scan instead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from inspect import isroutine
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tinyspec.errors import named
from tinyspec.model.torch_state import callers_modes
from tinyspec.runner.device_queue import to_device
from tinyspec.sampling_params import SamplingParams
from tinyspec.scheduler.request import Sequence
from tinyspec.scheduler.sequence_table import Array

Processor = Callable[..., Tensor]
Softmax = Callable[[Tensor], Tensor]
_ONE = 1 << 40
# A larger bias would not be finite in fp32; a smaller one than its negative excludes the token.
_MOST = 1e30
SHARED = "; if it keeps state, logits_processors must be a function that makes each list anew"
# How the error of a completion begins whose grammar could not go on.
GAVE_UP = "llguidance gave up"
# The error of one whose parameters contradict each other.
NONE_LEFT = "no token may follow: allowed_token_ids, bad_words_ids and the text's form exclude all"
# What processors raised, by place.
Errors = dict[int, tuple[str, Exception]]


class BatchWide:
    """A processor that is called once for all rows: [B, V] scores from ids [B, L] and scores."""

    def __init__(self, processor: Processor):
        self._processor = processor
        self.__qualname__ = getattr(processor, "__qualname__", type(processor).__qualname__)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return self._processor(input_ids, scores)


class Scores:
    """Rows [N, V] of which those at ``places``, ascending, are to be changed.

    raw: the logits in the model's dtype, never written. own: copies of the rows at ``places`` in
    fp32, which may be written.
    """

    def __init__(self, raw: Tensor, places: Array):
        self.raw, self.places = raw, places
        whole = len(places) == len(raw)
        own = raw if whole else raw.index_select(0, to_device(places, raw.device))
        self.own = own.to(torch.float32, copy=whole)

    def row(self, place: int) -> Tensor:
        """[1, V]"""
        at = int(self.places.searchsorted(place))
        if at < len(self.places) and self.places[at] == place:
            return self.own[at : at + 1]
        return self.raw[place : place + 1]

    def exclude(self, tokens: Mapping[int, tuple[int, ...]]) -> None:
        """Ids of some rows, by the place of each, which is one of ``places``; ids beyond V are
        none."""
        sharing: dict[tuple[int, ...], list[int]] = {}
        for place, ids in tokens.items():
            sharing.setdefault(ids, []).append(place)
        count, size = self.own.shape
        for ids, places in sharing.items():
            known = np.array([token for token in ids if token < size], np.int64)
            columns = to_device(known, self.own.device)
            if len(places) == count:
                self.own.index_fill_(1, columns, -torch.inf)
            else:
                at = to_device(self.places.searchsorted(places), self.own.device)
                self.own[at[:, None], columns] = -torch.inf


@dataclass
class SpecialRow:
    """What few rows need: logits that are processed, or results that few ask for.

    num_generated: generated tokens before it. history: the sequence before it, if
    ``params.changes_logits``. forced: the token to take regardless of the logits; -1: none. keeps:
    of scores, logits, what is returned as well: the processed and the raw ones. thread: of its
    caller. grammar: of its completion: which tokens are ``allowed`` behind others. committed: how
    many of those generated are no drafts.
    """

    params: SamplingParams
    num_generated: int
    history: list[int]
    forced: int = -1
    keeps: frozenset[str] = frozenset()
    thread: int | None = None
    grammar: Any = None
    committed: int = 0

    @classmethod
    def of(cls, sequence: Sequence, position: int, forced: int = -1) -> SpecialRow:
        """For its token at ``position``, which is ``forced`` unless that is -1."""
        request, params = sequence.request, sequence.params
        generated = position - request.num_prompt
        if sequence.teacher_forced and sequence.given_tokens is not None:
            forced = sequence.given_tokens[generated]
        return cls(
            params,
            generated,
            sequence.before(position) if params.changes_logits else [],
            forced,
            request.keeps,
            request.thread,
            sequence.grammar,
            generated if sequence.teacher_forced else min(generated, sequence.num_generated),
        )

    @property
    def early(self) -> bool:
        """Whether tokens that would end it are excluded."""
        params = self.params
        return self.num_generated < params.min_new_tokens and bool(params.stop_ids)

    @property
    def processed(self) -> bool:
        """Whether its logits are changed before temperature and filters."""
        return self.params.changes_logits or self.early

    @property
    def generated(self) -> list[int]:
        """Tokens before it, behind the prompt; drafts count."""
        return self.history[len(self.history) - self.num_generated :]

    @property
    def penalties(self) -> dict[int, float]:
        """What is added to the logits of tokens generated before it."""
        frequency, presence = self.params.frequency_penalty, self.params.presence_penalty
        if not (frequency or presence):
            return {}
        counts = Counter(self.generated)
        return {token: -(frequency * n + presence) for token, n in sorted(counts.items())}

    @property
    def bad_words(self) -> dict[int, float]:
        """-inf for every token that would end one of them."""
        ends = [(last,) for last in self.params.stop_ids]
        words = [word for word in self.params.bad_words_ids or () if word not in ends]
        before = [(word, self.history[len(self.history) - len(word) + 1 :]) for word in words]
        return {word[-1]: -torch.inf for word, seen in before if [*word[:-1]] == seen}


def process(
    scores: Scores,
    special: dict[int, SpecialRow],
    places: list[int],
    together: list[list[int]] | None = None,
) -> Errors:
    """Everything before temperature, in the order of ``SamplingParams``, on the rows at ``places``.
    together: ids for ``BatchWide`` ones, of the rows at ``places``."""
    errors: Errors = {}
    left: dict[int, Iterator[Processor]] = {}
    early = [n for n in places if special[n].early and special[n].grammar is None]
    # No bias and no penalty makes anything else of -inf.
    scores.exclude({n: special[n].params.stop_ids for n in early})
    places = [n for n in places if special[n].params.changes_logits]
    for n in places:
        row, params, own = special[n], special[n].params, scores.row(n)[0]
        _add(own, params.logit_bias or {})
        if params.repetition_penalty != 1.0:
            # CTRL's: positive logits are divided by it, negative ones multiplied (Keskar et al.)
            seen, penalty = _integers(sorted({*row.history}), own.device), params.repetition_penalty
            known = own[seen]
            own.index_copy_(0, seen, torch.where(known < 0, known * penalty, known / penalty))
        _add(own, row.penalties)
        _add(own, bad := row.bad_words)
        if only := params.allowed_token_ids:
            kept = _integers(list(only), own.device)  # type: ignore[arg-type]
            own.copy_(torch.full_like(own, -torch.inf).index_copy_(0, kept, own[kept]))
        if row.grammar is not None:
            try:
                allowed = row.grammar.allowed(row.generated, row.committed, len(own), row.early)
            except Exception as error:
                errors[n] = f"{GAVE_UP}: {error}", error
            else:
                own.masked_fill_(to_device(~allowed, own.device), -torch.inf)
        if (bad or only) and bool((own == -torch.inf).all()):
            errors[n] = NONE_LEFT, ValueError(NONE_LEFT)
        left[n] = iter(params.functions["logits_processors"])
    while places:
        found = [_row_by_row(scores, special[n], n, left[n], errors) for n in places]
        wide = found[0]
        if wide is None:
            break
        assert together is not None
        rows = torch.cat([scores.row(n) for n in places])
        ids = _integers(together, rows.device)
        try:
            changed = _processed(wide, ids, rows, special[places[0]].thread)
        except Exception as error:
            errors[places[0]] = _raised(wide, error)
        else:
            for n, row_scores in zip(places, changed, strict=True):
                scores.row(n)[0].copy_(row_scores)
        if errors:
            break
    return errors


def _add(scores: Tensor, biases: Mapping[int, float]) -> None:
    """To ``scores`` [V], of each token by itself."""
    if biases:
        tokens = _integers([*biases], scores.device)
        amounts = [min(float(bias), _MOST) for bias in biases.values()]
        added = torch.tensor(amounts, dtype=torch.float32, device=scores.device)
        scores.index_copy_(0, tokens, scores[tokens] + added)


def _row_by_row(
    scores: Scores, row: SpecialRow, place: int, processors: Iterator[Processor], errors: Errors
) -> BatchWide | None:
    """Run processors of one row up to one that takes all rows, which is returned."""
    own = scores.row(place)
    for processor in processors:
        if isinstance(processor, BatchWide):
            return processor
        try:
            own.copy_(_processed(processor, _integers([row.history], own.device), own, row.thread))
        except Exception as error:
            errors[place] = _raised(processor, error)
            break
    return None


def _raised(processor: Processor, error: Exception) -> tuple[str, Exception]:
    name = getattr(processor, "__qualname__", type(processor).__qualname__)
    hint = "" if isroutine(processor) or getattr(processor, "stateless", False) else SHARED
    return f"logits processor {name} raised {named(error)}{hint}", error


def _integers(values: list[int] | list[list[int]], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


def _processed(processor: Processor, history: Tensor, scores: Tensor, thread: int | None) -> Tensor:
    """``scores`` [N, V] after a processor; +inf that it sets, unless everywhere in a row, selects
    that token and becomes the largest finite number."""
    with callers_modes(thread):
        found = processor(history, scores.clone())
    if not isinstance(found, Tensor):
        raise TypeError(f"it returned {type(found).__name__} instead of a tensor of scores")
    if found.shape != scores.shape:
        raise ValueError(f"it returned scores of shape {tuple(found.shape)}")
    unsound = (scores == torch.inf) | (found == torch.inf).all(-1, keepdim=True)
    return found.where(unsound, found.clamp(max=torch.finfo(torch.float32).max))


def keep_top_k(logits: Tensor, k: Tensor, most: int) -> Tensor:
    """Exclude (-inf) all but the ``k[n]`` > 0 highest of each row [N, V]; none exceeds ``most``."""
    vocab = logits.shape[1]
    k = k.clamp(max=vocab).long()
    threshold = logits.topk(min(most, vocab)).values.gather(1, k[:, None] - 1)
    above = logits > threshold
    tied = logits == threshold
    places = k[:, None] - above.sum(-1, keepdim=True)
    keep = above | (tied & (tied.cumsum(-1) <= places))
    return logits.masked_fill(~keep, -torch.inf)


def keep_top_p(logits: Tensor, p: Tensor, softmax: Softmax) -> Tensor:
    """Exclude the least likely tokens whose probabilities together are at most 1 - p[n].

    softmax: of rows [N, V], each by itself.
    """
    ordered, index = logits.sort(dim=-1, descending=True, stable=True)
    shares = (softmax(ordered).double() * _ONE).round().long()
    before = shares.cumsum(-1) - shares
    # The share from this token down to the least likely one must exceed what may be cut.
    rest = shares.sum(-1, keepdim=True) - before
    cut = ((1.0 - p.double()) * _ONE).floor().long()
    keep = rest > cut[:, None]
    keep[:, 0] = True
    return logits.masked_fill(~torch.zeros_like(keep).scatter_(1, index, keep), -torch.inf)


def keep_min_p(logits: Tensor, p: Tensor, softmax: Softmax) -> Tensor:
    """Exclude tokens less likely than ``p[n]`` times the likeliest of the row; softmax as above."""
    shares = softmax(logits)
    return logits.masked_fill(shares < p[:, None] * shares.amax(-1, keepdim=True), -torch.inf)
