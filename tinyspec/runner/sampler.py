"""From logits to tokens: penalties, processors, filters, then the sample kernel.

Every step treats each row by itself, so a row's result depends neither on other rows nor on their
number. Knows a row's own history and parameters, not its place in a pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tinyspec.kernels.backend import Kernels
from tinyspec.model.torch_state import callers_modes
from tinyspec.runner.logits_filters import keep_min_p, keep_top_k, keep_top_p, penalise_repetition
from tinyspec.sampling_params import SamplingParams


@dataclass
class SampleRow:
    """One token to be sampled: its logits, parameters and history.

    logits_row: row of the logits; several samples may share one. position: the token's place in its
    sequence. num_generated: generated tokens before it. history: the sequence before it, if
    ``params.needs_history``. forced: the token to take regardless of the logits; -1: none.
    keeps_scores, keeps_logits: return the processed and the raw logits as well.
    """

    logits_row: int
    params: SamplingParams
    key: int
    position: int
    num_generated: int
    history: list[int]
    forced: int = -1
    keeps_scores: bool = False
    keeps_logits: bool = False


@dataclass
class Sampled:
    """One sampled token; token -1 with an ``error`` if there is none.

    logprob: of the token, if the row's parameters ask for any log-probability. cause: the exception
    behind an error. scores, logits: [V] fp32, if the row keeps them; scores are those sampled from:
    processed, divided by the temperature, filtered.
    """

    token: int
    logprob: float = 0.0
    top: list[tuple[int, float]] = field(default_factory=list)
    error: str | None = None
    cause: Exception | None = None
    scores: Tensor | None = None
    logits: Tensor | None = None


NOT_FINITE = "the logits are not finite (NaN, +inf, or every token excluded)"


class Sampler:
    """Samples rows of logits with one implementation of the kernels."""

    def __init__(self, kernels: Kernels):
        self._kernels = kernels

    def sample(self, logits: Tensor, rows: list[SampleRow]) -> list[Sampled]:
        """One token for each of ``rows``; logits [N, V] fp32, left unchanged."""
        if not rows:
            return []
        index = [row.logits_row for row in rows]
        raw = logits
        if index != list(range(len(logits))):
            raw = logits.index_select(0, _integers(index, logits.device))
        scores, errors = self._process(raw, rows)
        temperature = [row.params.temperature for row in rows]
        filtered = [n for n, row in enumerate(rows) if row.params.filtered]
        if filtered:
            scores = self._filter(scores, rows, filtered)
            for n in filtered:
                temperature[n] = 1.0
        device = logits.device
        wants = any(row.params.logprobs or row.params.top_logprobs > 0 for row in rows)
        forced = None
        if any(row.forced >= 0 for row in rows):
            forced = _integers([row.forced for row in rows], device)
        noise: tuple[Tensor | None, ...] = (None, None, None)
        if any(temperature):
            noise = (
                torch.tensor(temperature, dtype=torch.float32, device=device),
                _integers([row.key for row in rows], device),
                _integers([row.position for row in rows], device),
            )
        tokens, logprobs = self._kernels.sample(scores, *noise, logprobs=wants, forced=forced)
        found = [Sampled(token) for token in tokens.tolist()]
        if wants:
            self._attach_logprobs(found, rows, raw, scores, temperature, logprobs)
        for n, (sampled, row) in enumerate(zip(found, rows, strict=True)):
            if n in errors or sampled.token < 0:
                why, cause = errors.get(n, (NOT_FINITE, None))
                found[n] = Sampled(-1, error=why, cause=cause)
                continue
            if row.keeps_scores:
                sampled.scores = scores[n] / (temperature[n] or 1.0)
            if row.keeps_logits:
                sampled.logits = raw[n].clone()
        return found

    @staticmethod
    def _process(
        raw: Tensor, rows: list[SampleRow]
    ) -> tuple[Tensor, dict[int, tuple[str, Exception]]]:
        """Repetition penalty, minimum length, the user's processors, in transformers' order."""
        scores = raw
        errors: dict[int, tuple[str, Exception]] = {}
        for n, row in enumerate(rows):
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
    def _filter(scores: Tensor, rows: list[SampleRow], filtered: list[int]) -> Tensor:
        """Temperature, then top-k, top-p and min-p on the rows that ask for any of them."""
        device = scores.device
        params = [rows[n].params for n in filtered]

        def column(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device)

        place = _integers(filtered, device)
        part = scores[place] / column([p.temperature for p in params])[:, None]
        for name, off, keep in (
            ("top_k", 0, keep_top_k),
            ("top_p", 1.0, keep_top_p),
            ("min_p", 0.0, keep_min_p),
        ):
            values = [off if (v := getattr(p, name)) is None else v for p in params]
            some = [n for n, value in enumerate(values) if value != off]
            if some:
                which = _integers(some, device)
                amounts = column([values[n] for n in some])
                if name == "top_k":
                    amounts = amounts.long()
                part[which] = keep(part[which], amounts)
        unsound = scores[place].isnan().any(-1, keepdim=True)
        scores = scores.clone()
        scores[place] = part.masked_fill(unsound, torch.nan)
        return scores

    @staticmethod
    def _attach_logprobs(
        found: list[Sampled],
        rows: list[SampleRow],
        raw: Tensor,
        scores: Tensor,
        temperature: list[float],
        logprobs: Tensor,
    ) -> None:
        for n, value in enumerate(logprobs.tolist()):
            found[n].logprob = value
        for n, row in enumerate(rows):
            top, is_raw = row.params.top_logprobs, row.params.logprobs_mode == "raw"
            if found[n].token < 0 or not (is_raw or top):
                continue
            own = raw if is_raw else scores
            divisor = own.new_tensor([[1.0 if is_raw else temperature[n] or 1.0]])
            shares = torch.log_softmax(own[n : n + 1] / divisor, dim=-1)[0]
            if is_raw:
                found[n].logprob = float(shares[found[n].token])
            if top:
                # By the logits: two that differ may round to one log-probability.
                best = own[n].sort(descending=True, stable=True).indices[:top]
                found[n].top = list(zip(best.tolist(), shares[best].tolist(), strict=True))


def _integers(values: list[int], device: torch.device) -> Tensor:
    """[n] int64."""
    return torch.tensor(values, dtype=torch.int64, device=device)


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


def chosen_logprobs(logits: Tensor, tokens: list[int]) -> list[float]:
    """Log-probability of ``tokens[n]`` under row n of the raw ``logits`` [N, V]."""
    index = _integers(tokens, logits.device)[:, None]
    return torch.log_softmax(logits, dim=-1).gather(1, index).squeeze(1).tolist()
