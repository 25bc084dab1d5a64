"""Log-probabilities of given tokens with the bits of generation, and their gradient.

For training on what was generated. Knows logits and the settings of a distribution; neither models
nor how the logits came to be.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tinyspec.config import EngineConfig
from tinyspec.errors import refuse
from tinyspec.kernels import backend as kernels
from tinyspec.model.torch_settings import pinned
from tinyspec.model.torch_state import without_modes
from tinyspec.runner.device_queue import to_device
from tinyspec.runner.sampler import SampleBatch, Sampler
from tinyspec.sampling_params import SamplingParams
from tinyspec.scheduler.sequence_table import Array

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Logits that are worked on at a time.
PART = 1 << 22


@torch.compiler.disable
def token_logprobs(
    logits: Tensor,
    ids: Any,
    temperature: Any = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    *,
    return_kept_mass: bool = False,
    backend: str = "auto",
) -> Any:
    """Log-probabilities of tokens, with the bits of generation and a gradient into ``logits``.

    logits: [..., V] bf16, fp16 or fp32, as the model's head gave them (on a GPU logits that were
    cast have other bits). ids: [...] integers below V, the token of each row. temperature, top_k,
    top_p, min_p: as in ``SamplingParams``, in this order; temperature may also be a tensor or list
    that broadcasts to [...], without a gradient, and 0 means softmax(logits) without filters, as
    for greedy requests.

    Returns float32 [...], natural logarithms: for logits that have the bits of an engine's, those
    of ``Completion.logprobs`` and ``Engine.score`` under the same settings
    (``logprobs_mode="raw"``: those for temperature 1 without filters). -inf where the filters
    exclude the token, with gradient 0; NaN where a row holds NaN or +inf, or -inf alone.
    return_kept_mass: return also the logarithm of the probability that the filters kept of
    softmax(logits / temperature), float32 [...], 0 without filters.

    backend: "triton", "torch" or "auto", as in the ``EngineConfig`` of the engine.

    The gradient is that of log softmax(x)[id], x = filtered(logits / temperature), at a fixed set
    of tokens kept, in the dtype of ``logits``:

        d logprob / d logits = (onehot(id) - softmax(x)) / temperature
        d kept mass / d logits = (softmax(x) - softmax(logits / temperature)) / temperature

    Rows are worked on a few at a time, forward and backward. Raises ValueError naming the field,
    its value and what is allowed; -100, the label that losses ignore, is no token: clamp the ids
    and leave such rows out of the result.
    """
    params = SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p)  # raises
    if not isinstance(logits, Tensor) or logits.dtype not in DTYPES or not logits.ndim:
        is_tensor = isinstance(logits, Tensor)
        given = f"{logits.dtype} {list(logits.shape)}" if is_tensor else type(logits).__name__
        raise refuse("logits", given, "a tensor [..., V] in bf16, fp16 or fp32")
    name = EngineConfig(backend=backend).backend_on(logits.device.type)
    if (reason := kernels.refusal(name, logits.device.type)) is not None:
        raise refuse("backend", backend, reason)
    tokens, temperatures = _tokens(ids, logits), _temperatures(temperature, logits)
    rows = _Rows(Sampler(kernels.load(name)), tokens, temperatures, params, return_kept_mass)
    found = tuple(one.view(logits.shape[:-1]) for one in _TokenLogprobs.apply(logits, rows))
    return found if return_kept_mass else found[0]


def _tokens(ids: Any, logits: Tensor) -> Array:
    """``ids`` [N] int64, on the host."""
    given, (*shape, vocab_size) = torch.as_tensor(ids, device="cpu"), logits.shape
    if given.is_floating_point() or given.is_complex() or given.dtype == torch.bool:
        raise refuse("ids.dtype", given.dtype, "integers")
    if list(given.shape) != shape:
        raise refuse("ids.shape", list(given.shape), f"{shape}, the logits' without V")
    found: Array = given.to(torch.int64, copy=True).reshape(-1).numpy()
    if len(wrong := found[(found < 0) | (found >= vocab_size)]):
        hint = "; clamp labels to ignore (-100) and leave their rows out of the result"
        allowed = f"token ids in [0, {vocab_size}){hint if wrong[0] < 0 else ''}"
        raise refuse("ids", int(wrong[0]), allowed)
    return found


def _temperatures(given: Any, logits: Tensor) -> Array:
    """[N] float64, one for each row."""
    shape = logits.shape[:-1]
    try:
        found = torch.as_tensor(given, dtype=torch.float64, device="cpu").detach().expand(shape)
    except (TypeError, ValueError, RuntimeError):
        raise refuse("temperature", given, f"numbers that broadcast to {list(shape)}") from None
    values: Array = found.reshape(-1).numpy()
    if not ((values == 0) | ((values >= 1e-6) & np.isfinite(values))).all():
        raise refuse("temperature", given, "0 (greedy) or finite numbers of at least 1e-6")
    return values


@dataclass
class _Rows:
    """What is asked of N rows of logits. tokens, temperature: [N]. with_mass: whether the kept mass
    is wanted."""

    sampler: Sampler
    tokens: Array
    temperature: Array
    params: SamplingParams
    with_mass: bool

    def parts(self, logits: Tensor) -> Iterator[tuple[slice, Tensor, SampleBatch]]:
        """A few rows at a time: their places, [n, V] in the dtype that is sampled from, and what is
        asked of them."""
        (*shape, vocab_size), count = logits.shape, len(self.tokens)
        step = max(1, PART // max(1, vocab_size))
        for start in range(0, count, step):
            part = slice(start, min(start + step, count))
            if logits.ndim < 3 or logits.is_contiguous():
                rows = logits.reshape(-1, vocab_size)[part]
            else:  # of a slice of a batch, say, ``reshape`` would copy all
                places = np.unravel_index(np.arange(part.start, part.stop), shape)
                rows = logits[tuple(to_device(each, logits.device) for each in places)]
            on_gpu = self.sampler.kernels.backend == "triton"
            yield part, rows if on_gpu else rows.float(), self._batch(part)

    def _batch(self, part: slice) -> SampleBatch:
        temperature, params = self.temperature[part], self.params
        sampled, zeros = temperature > 0, np.zeros(len(temperature), np.int64)
        top_p = 1.0 if params.top_p is None else params.top_p
        return SampleBatch(
            np.arange(len(zeros)),
            key=zeros,
            position=zeros,
            temperature=temperature,
            top_k=np.where(sampled, params.top_k or 0, 0),
            top_p=np.where(sampled, top_p, 1.0),
            min_p=np.where(sampled, params.min_p or 0.0, 0.0),
            logprobs=True,
            forced=self.tokens[part],
        )

    def scaled(self, rows: Tensor, batch: SampleBatch) -> tuple[Tensor, Tensor, Tensor]:
        """``rows`` [n, V] fp32 divided by their temperatures, with and without filters; and the
        temperatures [n, 1], 1 for 0."""
        rows, temperature = rows.float(), np.where(batch.temperature > 0, batch.temperature, 1.0)
        divisor = to_device(temperature.astype(np.float32), rows.device)[:, None]
        kept = whole = rows / divisor
        if len(batch.filtered):
            where = to_device(batch.filtered, rows.device)
            kept = whole.index_copy(0, where, self.sampler.filter(rows[where], batch))
        return kept, whole, divisor

    def kept_mass(self, rows: Tensor, batch: SampleBatch) -> Tensor:
        """[n] fp32, by the likeliest token, which every filter keeps: its log-probability without
        filters, less that with them."""
        kept, whole, _ = self.scaled(rows, batch)
        likeliest, of_kept = self.sampler.kernels.sample(kept, None, None, None)
        of_whole: Tensor = self.sampler.kernels.chosen_logprobs(whole, likeliest.clamp(min=0))
        return (of_whole - of_kept).clamp(max=0)


class _TokenLogprobs(torch.autograd.Function):
    """Log-probabilities and kept mass, [N] fp32: by the kernels forward, by the formulas of
    ``token_logprobs`` backward, under torch's settings of passes."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, rows: _Rows) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(logits)
        ctx.rows = rows
        logprobs = torch.zeros(len(rows.tokens), dtype=torch.float32, device=logits.device)
        kept_mass = torch.zeros_like(logprobs)
        with pinned(logits.device.type), without_modes(), torch.cuda.device_of(logits):
            for part, some, batch in rows.parts(logits):
                sampling = rows.sampler.sample(some, batch)
                assert sampling.logprobs is not None
                logprobs[part] = sampling.logprobs
                if rows.with_mass and len(batch.filtered):
                    kept_mass[part] = rows.kept_mass(some, batch)
        return logprobs, kept_mass

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_logprobs: Tensor, of_mass: Tensor) -> tuple[Tensor, None]:
        (logits,), rows = ctx.saved_tensors, ctx.rows
        softmax = rows.sampler.kernels.softmax
        found = torch.empty_like(logits, memory_format=torch.contiguous_format)
        flat = found.view(len(rows.tokens), logits.shape[-1])
        with pinned(logits.device.type), without_modes(), torch.cuda.device_of(logits):
            for part, some, batch in rows.parts(logits):
                kept, whole, divisor = rows.scaled(some, batch)
                ids = to_device(rows.tokens[part], logits.device)[:, None]
                excluded = kept.gather(1, ids) == -torch.inf
                weight = (of_logprobs[part, None] / divisor).masked_fill(excluded, 0)
                shares = softmax(kept)
                total = shares.scatter_add(1, ids, torch.full_like(weight, -1)).mul_(-weight)
                if rows.with_mass and len(batch.filtered):
                    total += (shares - softmax(whole)) * (of_mass[part, None] / divisor)
                flat[part] = total
        return found, None
