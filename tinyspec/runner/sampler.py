"""From logits to tokens: penalties, processors, filters, then the sample kernel.

Every step treats each row by itself, so a row's result depends neither on other rows nor on their
number. Knows a row's own history and parameters, not its place in a pass.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tinyspec.kernels.backend import Kernels
from tinyspec.kernels.twins.sample import gumbel
from tinyspec.runner.device_queue import to_device
from tinyspec.runner.processors import (
    Scores,
    SpecialRow,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    process,
)
from tinyspec.sampling_params import SamplingParams
from tinyspec.scheduler.request import Sequence
from tinyspec.scheduler.sequence_table import Array

# Columns of the sequence table that tokens are sampled by.
NUMBERS = ("key", "temperature", "top_k", "top_p", "min_p")
# Numbers of noise that are kept at most: 128 MB of them.
MOST_NOISE = 1 << 25
NO_NOISE = torch.empty((0, 0), dtype=torch.float32, device="cpu")
# Where tokens come from outside logits are what is wanted.
SUPPLIED = SpecialRow(SamplingParams(), 0, [], keeps=frozenset({"logits"}))


@dataclass
class SampleBatch:
    """N tokens to be sampled.

    logits_row: row of the logits; several samples may share one. key: of the noise. position: the
    token's place in its sequence. temperature: 0 for greedy. top_k, top_p, min_p: 0, 1 and 0 where
    they are off, as for greedy rows. All [N]. logprobs: whether any row asks for its token's.
    special: the rows that need more, by their places. together: ids [N][L] for processors that are
    called once for all rows. in_order: whether ``logits_row`` counts from 0. greedy: whether all
    are.
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
    together: list[list[int]] | None = None

    def __post_init__(self) -> None:
        # Asked for behind a forward, which has the processor's caches for itself.
        self.in_order = not np.count_nonzero(self.logits_row != np.arange(len(self)))
        self.greedy = not np.count_nonzero(self.temperature)

    @classmethod
    def of(
        cls,
        numbers: dict[str, Array],
        logits_row: Array,
        position: Array,
        owners: dict[int, Sequence],
        logprobs: bool = False,
        *,
        forced: dict[int, int] | None = None,
        together: list[list[int]] | None = None,
    ) -> SampleBatch:
        """numbers: the columns ``NUMBERS``, by name. owners: the sequences of special rows, by
        place. forced: tokens that some of these get regardless. Sequences that get their tokens
        from outside are sampled ``together``, and elsewhere give their logits alone."""
        special = {
            n: SUPPLIED
            if one.request.supplied and together is None
            else SpecialRow.of(one, int(position[n]), (forced or {}).get(n, -1))
            for n, one in owners.items()
        }
        given: Any = {**numbers, "logprobs": logprobs, "special": special, "together": together}
        return cls(logits_row, position=position, **given)

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
class Sampled:
    """What was sampled, on the device. tokens [N] int64, -1 where there is none; logprobs [N] fp32
    if any row asked for its token's. Of a pass: prompt_logprobs [P] fp32; decisions [5, S] int32 of
    ``accept_truncate``, in its order. special, errors: rows that need more and what processors
    raised, by place; scores: what ``kernels`` sampled from, of which ``temperature`` [N] is still
    to be taken."""

    tokens: Tensor
    logprobs: Tensor | None = None
    prompt_logprobs: Tensor | None = field(default=None, init=False)
    decisions: Tensor | None = field(default=None, init=False)
    special: dict[int, SpecialRow] = field(default_factory=dict)
    errors: dict[int, tuple[str, Exception]] = field(default_factory=dict)
    scores: Scores | None = None
    temperature: Array | None = None
    kernels: Kernels | None = None

    def tensors(self) -> list[Tensor | None]:
        """What is fetched."""
        return [self.tokens, self.logprobs, self.prompt_logprobs, self.decisions]

    def special_results(self, tokens: Array, logprobs: Array | None) -> dict[int, SpecialResult]:
        """What special rows have besides, by their places. tokens, logprobs: on the host; where a
        row asks for its raw log-probability, that is written there."""
        found: dict[int, SpecialResult] = {}
        for n, row in self.special.items():
            if n in self.errors:
                found[n] = SpecialResult(error=self.errors[n][0], cause=self.errors[n][1])
            elif tokens[n] >= 0:
                found[n] = self._result(row, n, int(tokens[n]), logprobs)
        return found

    def _result(self, row: SpecialRow, n: int, token: int, logprobs: Array | None) -> SpecialResult:
        """What place ``n`` has beside its ``token``."""
        assert self.scores is not None and self.temperature is not None and self.kernels is not None
        result, params = SpecialResult(), row.params
        is_raw = params.logprobs_mode == "raw" and (params.logprobs or params.top_logprobs > 0)
        if not (is_raw or params.top_logprobs or row.keeps):
            return result
        raw, scores = self.scores.raw[n : n + 1], self.scores.row(n)
        temperature = float(self.temperature[n])
        if is_raw or params.top_logprobs:
            own, divisor = raw if is_raw else scores, None
            if temperature and not is_raw:
                divisor = torch.tensor([temperature], dtype=torch.float32, device=raw.device)
            shares = self.kernels.log_softmax(own, divisor)[0]
            if is_raw:
                assert logprobs is not None
                logprobs[n] = float(shares[token])
            if params.top_logprobs:
                # By the logits: two that differ may round to one log-probability.
                best = own[0].sort(descending=True, stable=True).indices[: params.top_logprobs]
                result.top = list(zip(best.tolist(), shares[best].tolist(), strict=True))
        if "scores" in row.keeps:
            result.scores = scores[0].float() / (temperature or 1.0)
        if "logits" in row.keeps:
            result.logits = raw[0].to(torch.float32, copy=True)
        return result


# Temperature, key, position and forced token of every row, [N] each; None where no row has one.
Columns = list[Array | None]
NOT_FINITE = "the logits are not finite (NaN, +inf, or every token excluded)"


def _columns(batch: SampleBatch, temperature: Array) -> Columns:
    """What the kernel is told of every row."""
    columns: Columns = [None, None, None, None]
    if not batch.greedy:
        columns[:3] = temperature.astype(np.float32), batch.key, batch.position
    if any(row.forced >= 0 for row in batch.special.values()):
        forced = np.full(len(batch), -1)
        forced[list(batch.special)] = [row.forced for row in batch.special.values()]
        columns[3] = forced
    return columns


class Sampler:
    """Samples rows of logits with one implementation of the kernels."""

    def __init__(self, kernels: Kernels):
        self.kernels = kernels
        # Noise that is kept [n, V], and where that of a key and a position is.
        self._noise = NO_NOISE
        self._at: dict[tuple[int, int], int] = {}

    def keep_noise(self, keys: Array, positions: Array, vocab_size: int) -> None:
        """Draw the noise of these tokens [N] at once, for their drafts and for the verify; other
        noise is kept no longer, and none where it is much. The Triton kernel draws noise as it
        reads logits, and keeps none."""
        before, known = self._noise, self._at if self._noise.shape[1] == vocab_size else {}
        self._noise, self._at = NO_NOISE, {}
        if self.kernels.backend != "torch" or not 0 < len(keys) * vocab_size <= MOST_NOISE:
            return
        pairs = list(zip(keys.tolist(), positions.tolist(), strict=True))
        kept = [pair for pair in pairs if pair in known]
        new = [pair for pair in pairs if pair not in known]
        numbers = torch.from_numpy(np.array(new, np.int64).reshape(-1, 2))
        drawn = gumbel(numbers[:, 0], numbers[:, 1], vocab_size)
        if kept:
            drawn = torch.cat([before[[known[pair] for pair in kept]], drawn])
        self._noise, self._at = drawn, {pair: n for n, pair in enumerate([*kept, *new])}

    def sample(self, logits: Tensor, batch: SampleBatch) -> Sampled:
        """One token for each row of ``batch``; logits [N, V], left unchanged."""
        if not len(batch):
            return Sampled(logits.new_zeros(0, dtype=torch.int64))
        device, count = logits.device, len(batch)
        raw = logits
        if count != logits.shape[0] or not batch.in_order:
            raw = logits.index_select(0, to_device(batch.logits_row, device))
        filtered = np.zeros(0, np.int64)
        if not batch.greedy:
            filtered = np.flatnonzero((batch.top_k > 0) | (batch.top_p < 1) | (batch.min_p > 0))
        if not (len(filtered) or batch.special):  # the model's logits as they are
            columns = _columns(batch, batch.temperature)
            return Sampled(*self._drawn(raw, columns, batch.logprobs))
        processed = [n for n, row in batch.special.items() if row.processed]
        places = np.array(sorted({*filtered.tolist(), *processed}), np.int64)
        scores = Scores(raw, places)
        errors = process(scores, batch.special, processed, batch.together)
        temperature = batch.temperature
        if len(filtered):
            place = to_device(scores.places.searchsorted(filtered), device)
            divisor = to_device(temperature[filtered].astype(np.float32), device)
            filters = (each[filtered] for each in (batch.top_k, batch.top_p, batch.min_p))
            scores.own[place] = self.filter(scores.own[place], divisor, *filters)
            temperature = temperature.copy()
            temperature[filtered] = 1.0
        tokens, logprobs = self._choose(scores, batch, temperature)
        if errors:
            tokens[list(errors)] = -1
        if not batch.special:
            return Sampled(tokens, logprobs)
        special = batch.special
        return Sampled(tokens, logprobs, special, errors, scores, temperature, self.kernels)

    def _choose(
        self, scores: Scores, batch: SampleBatch, temperature: Array
    ) -> tuple[Tensor, Tensor | None]:
        """Tokens [N] and, if any row asked for its own, log-probabilities [N]."""
        columns, count = _columns(batch, temperature), len(batch)
        changed = scores.places
        if len(changed) == count:
            return self._drawn(scores.own, columns, batch.logprobs)
        others = np.delete(np.arange(count), changed)
        tokens = torch.empty(count, dtype=torch.int64, device=scores.raw.device)
        logprobs = torch.empty_like(tokens, dtype=torch.float32) if batch.logprobs else None
        # A row's dtype follows from its own request: changed ones are sampled by themselves.
        for places, own in ((others, None), (changed, scores.own)):
            if not len(places):
                continue
            where = to_device(places, tokens.device)
            rows = scores.raw.index_select(0, where) if own is None else own
            part = [None if column is None else column[places] for column in columns]
            tokens[where], found = self._drawn(rows, part, batch.logprobs)
            if logprobs is not None and found is not None:
                logprobs[where] = found
        return tokens, logprobs

    def _drawn(
        self, rows: Tensor, columns: Columns, logprobs: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Tokens of ``rows`` [N, V] by ``columns`` [N] and, if wanted, log-probabilities."""
        temperature, keys, positions, _ = columns
        known = self._at and self._noise.shape[1] == rows.shape[1]
        if known and temperature is not None and columns[3] is None:
            assert keys is not None and positions is not None
            pairs = zip(keys.tolist(), positions.tolist(), strict=True)
            places = np.array([self._at.get(pair, -1) for pair in pairs])
            if ((places >= 0) | (temperature <= 0)).all():
                return self._drawn_with(self._noise[places], rows, temperature, logprobs)
        *noise, forced = (None if c is None else to_device(c, rows.device) for c in columns)
        found: tuple[Tensor, Tensor | None] = self.kernels.sample(
            rows, *noise, logprobs=logprobs, forced=forced
        )
        return found

    def _drawn_with(
        self, noise: Tensor, rows: Tensor, temperature: Array, logprobs: bool
    ) -> tuple[Tensor, Tensor | None]:
        """As ``_drawn``, by ``noise`` [N, V], which means nothing for greedy rows."""
        heat = torch.from_numpy(temperature)
        noise.masked_fill_((heat <= 0)[:, None], 0.0)
        noise += rows / torch.where(heat > 0, heat, 1.0)[:, None]
        tokens, _ = self.kernels.sample(noise, None, None, None, logprobs=False)
        if not logprobs:
            return tokens, None
        return tokens, self.kernels.chosen_logprobs(rows, tokens.clamp(min=0), heat)

    def filter(
        self, before: Tensor, temperature: Tensor, top_k: Array, top_p: Array, min_p: Array
    ) -> Tensor:
        """Temperature, then top-k, top-p and min-p, of N rows: ``before`` [N, V] fp32, left
        unchanged; temperature [N] fp32, above 0; the others [N], as in ``SampleBatch``."""
        device, softmax = before.device, self.kernels.softmax
        part = before / temperature[:, None]
        for values, off, keep in (
            (top_k, 0, partial(keep_top_k, most=int(top_k.max()))),
            (top_p, 1, partial(keep_top_p, softmax=softmax)),
            (min_p, 0, partial(keep_min_p, softmax=softmax)),
        ):
            some = np.flatnonzero(values != off)
            if len(some):
                which = to_device(some, device)
                amounts = to_device(values[some].astype(np.float32), device)
                part[which] = keep(part[which], amounts)
        unsound = before.isnan().any(-1, keepdim=True)
        return part.masked_fill(unsound, torch.nan)
