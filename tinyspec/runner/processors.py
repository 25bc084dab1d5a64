"""What changes logits before temperature and filters: repetition penalty, minimum length, and the
user's processors. Rows are changed in place, each by itself but where a processor takes all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tinyspec.model.torch_state import callers_modes
from tinyspec.runner.logits_filters import penalise_repetition
from tinyspec.runner.scores import Scores
from tinyspec.sampling_params import SamplingParams

Processor = Callable[..., Tensor]
# What processors raised, by place.
Errors = dict[int, tuple[str, Exception]]


class BatchWide:
    """A processor that is called once for all rows: [B, V] scores from ids [B, L] and scores."""

    def __init__(self, processor: Processor):
        self._processor = processor
        self.__qualname__ = getattr(processor, "__qualname__", type(processor).__qualname__)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return self._processor(input_ids, scores)


@dataclass
class SpecialRow:
    """What few rows need: logits that are processed, or results that few ask for.

    num_generated: generated tokens before it. history: the sequence before it, if
    ``params.needs_history``. forced: the token to take regardless of the logits; -1: none.
    keeps_scores, keeps_logits: return the processed and the raw logits as well. thread: of its
    caller.
    """

    params: SamplingParams
    num_generated: int
    history: list[int]
    forced: int = -1
    keeps_scores: bool = False
    keeps_logits: bool = False
    thread: int | None = None

    @property
    def early(self) -> bool:
        """Whether tokens that would end it are excluded."""
        params = self.params
        return self.num_generated < params.min_new_tokens and bool(params.stop_ids)

    @property
    def processed(self) -> bool:
        """Whether its logits are changed before temperature and filters."""
        params = self.params
        return params.repetition_penalty != 1.0 or self.early or bool(params.logits_processors)


def process(
    scores: Scores,
    special: dict[int, SpecialRow],
    places: list[int],
    together: list[list[int]] | None = None,
) -> Errors:
    """Penalty, minimum length and processors, in transformers' order, on the rows at ``places``.
    together: ids for ``BatchWide`` ones, of the rows at ``places``."""
    errors: Errors = {}
    left: dict[int, Iterator[Processor]] = {}
    for n in places:
        row, own = special[n], scores.row(n)[0]
        if row.params.repetition_penalty != 1.0:
            seen = _integers(sorted(set(row.history)), own.device)
            own.copy_(penalise_repetition(own, seen, row.params.repetition_penalty))
        if row.early:
            own[[t for t in row.params.stop_ids if t < len(own)]] = -torch.inf
        left[n] = iter(row.params.logits_processors)
    while places and not errors:
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
    return errors


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
    return f"logits processor {name} raised {type(error).__name__}: {error}", error


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
