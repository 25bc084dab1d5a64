"""From logits to tokens: penalties, processors, filters, then the sample kernel.

Every step treats each row by itself, so a row's result depends neither on other rows nor on their
number. Knows a row's own history and parameters, not its place in a pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from tinyspec.kernels.backend import Kernels
from tinyspec.model.torch_state import callers_modes
from tinyspec.runner.device_queue import to_device
from tinyspec.runner.logits_filters import keep_min_p, keep_top_k, keep_top_p, penalise_repetition
from tinyspec.sampling_params import SamplingParams
from tinyspec.scheduler.sequence_table import Array


@dataclass
class SpecialRow:
    """What few rows need: logits that are processed, or results that few ask for.

    num_generated: generated tokens before it. history: the sequence before it, if
    ``params.needs_history``. forced: the token to take regardless of the logits; -1: none.
    keeps_scores, keeps_logits: return the processed and the raw logits as well.
    """

    params: SamplingParams
    num_generated: int
    history: list[int]
    forced: int = -1
    keeps_scores: bool = False
    keeps_logits: bool = False


@dataclass
class SampleBatch:
    """N tokens to be sampled.

    logits_row: row of the logits; several samples may share one. key: of the noise. position: the
    token's place in its sequence. temperature: 0 for greedy. top_k, top_p, min_p: 0, 1 and 0 where
    they are off, as for greedy rows. All [N]. logprobs: whether any row asks for its token's.
    special: the rows that need more, by their places.
    """

    logits_row: Array
    key: Array
    position: Array
    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array
    logprobs: bool = False
    special: dict[int, SpecialRow] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.logits_row)


@dataclass
class SpecialResult:
    """What a special row has beside its token. error: why it has none; cause: the exception behind
    it. scores, logits: [V] fp32, if the row keeps them; scores are those sampled from: processed,
    divided by the temperature, filtered."""

    top: list[tuple[int, float]] = field(default_factory=list)
    error: str | None = None
    cause: Exception | None = None
    scores: Tensor | None = None
    logits: Tensor | None = None


@dataclass
class Sampling:
    """What was sampled, on the device. tokens [N] int64, -1 where there is none; logprobs [N] fp32
    if any row asked for its token's. special, errors: rows that need more and what processors
    raised, by place; raw, scores: the logits that were given and those sampled from, of which
    ``temperature`` [N] is still to be taken."""

    tokens: Tensor
    logprobs: Tensor | None = None
    special: dict[int, SpecialRow] = field(default_factory=dict)
    errors: dict[int, tuple[str, Exception]] = field(default_factory=dict)
    raw: Tensor | None = None
    scores: Tensor | None = None
    temperature: Array | None = None

    def on_host(self, tokens: Array, logprobs: Array | None) -> Sampled:
        """The same with what special rows have besides; tokens, logprobs: as fetched."""
        found = Sampled(tokens, logprobs)
        for n, row in self.special.items():
            if n in self.errors:
                found.special[n] = SpecialResult(error=self.errors[n][0], cause=self.errors[n][1])
            elif tokens[n] >= 0:
                assert self.raw is not None and self.scores is not None
                assert self.temperature is not None
                temperature = float(self.temperature[n])
                found.special[n] = _result(row, n, found, self.raw, self.scores, temperature)
        return found


@dataclass
class Sampled:
    """What was sampled, on the host. tokens [N] int64, -1 where there is none; logprobs [N] fp32 if
    any row asked for its token's; special: what special rows have besides, by their places."""

    tokens: Array
    logprobs: Array | None = None
    special: dict[int, SpecialResult] = field(default_factory=dict)


NOT_FINITE = "the logits are not finite (NaN, +inf, or every token excluded)"


class Sampler:
    """Samples rows of logits with one implementation of the kernels."""

    def __init__(self, kernels: Kernels):
        self.kernels = kernels

    def sample(self, logits: Tensor, batch: SampleBatch) -> Sampling:
        """One token for each row of ``batch``; logits [N, V] fp32, left unchanged."""
        if not len(batch):
            return Sampling(logits.new_zeros(0, dtype=torch.int64))
        device, count = logits.device, len(batch)
        raw = logits
        if count != len(logits) or np.count_nonzero(batch.logits_row != np.arange(count)):
            raw = logits.index_select(0, to_device(batch.logits_row, device))
        scores, errors = self._process(raw, batch.special)
        temperature = batch.temperature
        if sampled := np.count_nonzero(temperature) > 0:
            filtered = (batch.top_k > 0) | (batch.top_p < 1) | (batch.min_p > 0)
            if np.count_nonzero(filtered):
                scores = self._filter(scores, batch, np.flatnonzero(filtered))
                temperature = np.where(filtered, 1.0, temperature)
        forced = None
        if any(row.forced >= 0 for row in batch.special.values()):
            places = np.full(count, -1)
            places[list(batch.special)] = [row.forced for row in batch.special.values()]
            forced = to_device(places, device)
        noise: tuple[Tensor | None, ...] = (None, None, None)
        if sampled:
            reals = temperature.astype(np.float32)
            noise = tuple(to_device(x, device) for x in (reals, batch.key, batch.position))
        tokens, logprobs = self.kernels.sample(
            scores, *noise, logprobs=batch.logprobs, forced=forced
        )
        if errors:
            tokens[list(errors)] = -1
        if not batch.special:
            return Sampling(tokens, logprobs)
        return Sampling(tokens, logprobs, batch.special, errors, raw, scores, temperature)

    @staticmethod
    def _process(
        raw: Tensor, special: dict[int, SpecialRow]
    ) -> tuple[Tensor, dict[int, tuple[str, Exception]]]:
        """Repetition penalty, minimum length, the user's processors, in transformers' order."""
        scores = raw
        errors: dict[int, tuple[str, Exception]] = {}
        for n, row in special.items():
            params = row.params
            early = row.num_generated < params.min_new_tokens and params.stop_ids
            if params.repetition_penalty == 1.0 and not early and not params.logits_processors:
                continue
            if scores is raw:
                scores = raw.clone()
            if params.repetition_penalty != 1.0:
                seen = _integers(sorted(set(row.history)), raw.device)
                scores[n] = penalise_repetition(scores[n], seen, params.repetition_penalty)
            if early:
                scores[n, [t for t in params.stop_ids if t < raw.shape[1]]] = -torch.inf
            try:
                for processor in params.logits_processors:
                    history = _integers(row.history, raw.device)[None]
                    scores[n] = _processed(processor, history, scores[n])
            except Exception as error:
                name = getattr(processor, "__qualname__", type(processor).__qualname__)
                why = f"logits processor {name} raised {type(error).__name__}: {error}"
                errors[n] = why, error
        return scores, errors

    @staticmethod
    def _filter(scores: Tensor, batch: SampleBatch, filtered: Array) -> Tensor:
        """Temperature, then top-k, top-p and min-p on the rows ``filtered``."""
        device = scores.device

        def column(values: Array) -> Tensor:
            return to_device(values.astype(np.float32), device)

        place = to_device(filtered, device)
        part = scores[place] / column(batch.temperature[filtered])[:, None]
        for values, off, keep in (
            (batch.top_k[filtered], 0, partial(keep_top_k, most=int(batch.top_k.max()))),
            (batch.top_p[filtered], 1, keep_top_p),
            (batch.min_p[filtered], 0, keep_min_p),
        ):
            some = np.flatnonzero(values != off)
            if len(some):
                which = to_device(some, device)
                amounts = column(values[some])
                part[which] = keep(part[which], amounts)
        unsound = scores[place].isnan().any(-1, keepdim=True)
        scores = scores.clone()
        scores[place] = part.masked_fill(unsound, torch.nan)
        return scores


def _integers(values: list[int], device: torch.device) -> Tensor:
    """[n] int64."""
    return torch.tensor(values, dtype=torch.int64, device=device)


def _result(
    row: SpecialRow, n: int, found: Sampled, raw: Tensor, scores: Tensor, temperature: float
) -> SpecialResult:
    """What place ``n`` has beside its token; its log-probability, where it is the raw one."""
    result, params = SpecialResult(), row.params
    is_raw = params.logprobs_mode == "raw" and (params.logprobs or params.top_logprobs > 0)
    if is_raw or params.top_logprobs:
        own = raw if is_raw else scores
        divisor = own.new_tensor([[1.0 if is_raw else temperature or 1.0]])
        shares = torch.log_softmax(own[n : n + 1] / divisor, dim=-1)[0]
        if is_raw:
            assert found.logprobs is not None
            found.logprobs[n] = float(shares[int(found.tokens[n])])
        if params.top_logprobs:
            # By the logits: two that differ may round to one log-probability.
            best = own[n].sort(descending=True, stable=True).indices[: params.top_logprobs]
            result.top = list(zip(best.tolist(), shares[best].tolist(), strict=True))
    if row.keeps_scores:
        result.scores = scores[n] / (temperature or 1.0)
    if row.keeps_logits:
        result.logits = raw[n].clone()
    return result


def _processed(processor: Callable[..., Tensor], history: Tensor, scores: Tensor) -> Tensor:
    """``scores`` [V] after a processor; +inf that it sets, unless everywhere, selects that token
    and becomes the largest finite number."""
    with callers_modes():
        found = processor(history, scores[None].clone())
    if not isinstance(found, Tensor):
        raise TypeError(f"it returned {type(found).__name__} instead of a tensor of scores")
    if found.shape != (1, len(scores)):
        raise ValueError(f"it returned scores of shape {tuple(found.shape)}")
    unsound = (scores == torch.inf) | (found[0] == torch.inf).all()
    return found[0].where(unsound, found[0].clamp(max=torch.finfo(torch.float32).max))


def chosen_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Log-probability of ``tokens[n]`` under row n of the raw ``logits`` [N, V]."""
    return torch.log_softmax(logits, dim=-1).gather(1, tokens[:, None]).squeeze(1)
