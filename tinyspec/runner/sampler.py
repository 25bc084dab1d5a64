"""From logits to tokens: penalties, processors, filters, then the sample kernel.

Every step treats a row by itself, so that neither neighbours nor the number of rows can show.
Knows one row's own history and parameters, not where in a pass the row stood.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tinyspec.kernels.backend import Kernels
from tinyspec.runner.logits_filters import keep_min_p, keep_top_k, keep_top_p, penalise_repetition
from tinyspec.sampling_params import SamplingParams


@dataclass
class SampleRow:
    """One token to be sampled: which logits, for whom, behind which tokens.

    logits_row: row of the logits; several samples may share one. position: the token's place in its
    sequence. num_generated: generated tokens before it. history: the sequence before it, where
    ``params.needs_history``. forced: the token to take, whatever the logits say; -1: none.
    keeps_scores, keeps_logits: hand out the processed and the raw logits as well.
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
    """One sampled token; token -1 with an ``error`` where there is none.

    logprob: of the token, if the row's parameters ask for any log-probability. cause: the exception
    behind an error. scores, logits: [V] fp32, where the row keeps them; scores as they are sampled
    from: processed, divided by the temperature, filtered.
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
            raw = logits.index_select(0, torch.tensor(index, device=logits.device))
        scores, errors = self._process(raw, rows)
        temperature = [row.params.temperature for row in rows]
        filtered = [n for n, row in enumerate(rows) if row.params.filtered]
        if filtered:
            scores = self._filter(scores, rows, filtered)
            for n in filtered:
                temperature[n] = 1.0
        device = logits.device
        wants = any(_wants_logprobs(row.params) for row in rows)
        forced = None
        if any(row.forced >= 0 for row in rows):
            forced = torch.tensor([row.forced for row in rows], device=device)
        noise: tuple[Tensor | None, ...] = (None, None, None)
        if any(temperature):
            noise = (
                torch.tensor(temperature, dtype=torch.float32, device=device),
                torch.tensor([row.key for row in rows], device=device),
                torch.tensor([row.position for row in rows], device=device),
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
                seen = torch.tensor(sorted(set(row.history)), dtype=torch.long, device=raw.device)
                scores[n] = penalise_repetition(scores[n], seen, params.repetition_penalty)
            if early:
                scores[n, [t for t in params.stop_ids if t < raw.shape[1]]] = -torch.inf
            try:
                for processor in params.logits_processors:
                    history = torch.tensor([row.history], dtype=torch.long, device=raw.device)
                    scores[n] = _called(processor, history, scores[n])
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

        place = torch.tensor(filtered, device=device)
        part = scores[place] / column([p.temperature for p in params])[:, None]
        for name, off, keep in (
            ("top_k", 0, keep_top_k),
            ("top_p", 1.0, keep_top_p),
            ("min_p", 0.0, keep_min_p),
        ):
            values = [off if (v := getattr(p, name)) is None else v for p in params]
            some = [n for n, value in enumerate(values) if value != off]
            if some:
                which = torch.tensor(some, device=device)
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
            params = row.params
            if found[n].token < 0 or not (params.logprobs_mode == "raw" or params.top_logprobs):
                continue
            if params.logprobs_mode == "raw":
                own = torch.log_softmax(raw[n : n + 1], dim=-1)[0]
            else:
                heat = scores.new_tensor([[temperature[n] or 1.0]])
                own = torch.log_softmax(scores[n : n + 1] / heat, dim=-1)[0]
            if params.logprobs_mode == "raw":
                found[n].logprob = float(own[found[n].token])
            if params.top_logprobs:
                # By the logits: two that differ may round to one log-probability.
                whole = raw if params.logprobs_mode == "raw" else scores
                order = whole[n].sort(descending=True, stable=True).indices
                best = order[: params.top_logprobs]
                ids, values = best.tolist(), own[best].tolist()
                found[n].top = list(zip(ids, values, strict=True))


def _called(processor: Callable[..., Tensor], history: Tensor, scores: Tensor) -> Tensor:
    """What a processor makes of ``scores`` [V]; where it says +inf, if not everywhere, it wants
    that token."""
    found = processor(history, scores[None].clone())
    if not isinstance(found, Tensor):
        raise TypeError(f"no scores came back, but {type(found).__name__}")
    if found.shape != (1, len(scores)):
        raise ValueError(f"scores of shape {tuple(found.shape)} came back")
    unsound = (scores == torch.inf) | (found[0] == torch.inf).all()
    return found[0].where(unsound, found[0].clamp(max=torch.finfo(torch.float32).max))


def _wants_logprobs(params: SamplingParams) -> bool:
    return params.logprobs or params.top_logprobs > 0


def chosen_logprobs(logits: Tensor, tokens: list[int]) -> list[float]:
    """Log-probability of ``tokens[n]`` under row n of ``logits`` [N, V], as the model has it."""
    index = torch.tensor(tokens, device=logits.device)[:, None]
    return torch.log_softmax(logits, dim=-1).gather(1, index).squeeze(1).tolist()
