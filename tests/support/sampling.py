"""Samples row by row: what a batch of the sampler holds, as one object a row."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tinyspec import SamplingParams
from tinyspec.runner.processors import SpecialRow
from tinyspec.runner.sampler import NOT_FINITE, SampleBatch, SpecialResult


@dataclass
class SampleRow:
    """One token to be sampled; fields as in ``SampleBatch`` and ``SpecialRow``."""

    logits_row: int
    params: SamplingParams
    key: int
    position: int
    num_generated: int
    history: list[int]


@dataclass
class SampledToken:
    token: int
    logprob: float = 0.0
    top: list = field(default_factory=list)
    error: str | None = None
    cause: Exception | None = None


def batch_of(rows: list[SampleRow]) -> SampleBatch:
    """The same rows as arrays, all of them special."""
    params = [row.params for row in rows]

    def integers(name):
        return np.array([getattr(row, name) for row in rows], np.int64)

    def filters(name, off):
        values = [getattr(p, name) if p.filtered else off for p in params]
        return np.array([off if value is None else value for value in values])

    return SampleBatch(
        integers("logits_row"),
        integers("key"),
        integers("position"),
        np.array([p.temperature for p in params], np.float64),
        filters("top_k", 0),
        filters("top_p", 1.0),
        filters("min_p", 0.0),
        any(p.logprobs or p.top_logprobs for p in params),
        {n: SpecialRow(r.params, r.num_generated, r.history) for n, r in enumerate(rows)},
    )


def sample_rows(sampler, logits, rows: list[SampleRow]) -> list[SampledToken]:
    """One result a row."""
    sampling = sampler.sample(logits, batch_of(rows))
    logprobs = None if sampling.logprobs is None else sampling.logprobs.cpu().numpy()
    found = sampling.on_host(sampling.tokens.cpu().numpy(), logprobs)
    results = []
    for n, token in enumerate(found.tokens.tolist()):
        special = found.special.get(n, SpecialResult(error=NOT_FINITE))
        if token < 0:
            results.append(SampledToken(-1, error=special.error, cause=special.cause))
            continue
        logprob = 0.0 if found.logprobs is None else float(found.logprobs[n])
        results.append(SampledToken(token, logprob, special.top))
    return results
