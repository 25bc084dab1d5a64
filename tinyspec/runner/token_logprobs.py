"""Log-probabilities of given tokens with the bits of generation, and their gradient.

For training on what was generated. Knows logits and the settings of a distribution; neither models
nor how the logits came to be.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tinyspec.config import EngineConfig
from tinyspec.errors import refuse
from tinyspec.kernels import backend as kernels
from tinyspec.model.gradients import evaluated
from tinyspec.model.torch_settings import pinned
from tinyspec.model.torch_state import without_modes
from tinyspec.runner.sampler import Sampler
from tinyspec.sampling_params import COLDEST, HOTTEST, TEMPERATURES, SamplingParams

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Logits that are worked on at a time.
PART = 1 << 22


@torch.compiler.disable
def token_logprobs(
    logits: Tensor,
    ids: Any,
    temperature: float | Tensor = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    *,
    return_kept_mass: bool = False,
) -> Any:
    """Log-probabilities of tokens, with the bits of generation and a gradient into ``logits``.

    logits: [..., V] bf16, fp16 or fp32, as the model's head gave them (on a GPU logits that were
    cast have other bits). ids: [...] integers below V, the token of each row. temperature, top_k,
    top_p, min_p: as in ``SamplingParams``, in this order; temperature may also be a tensor that
    broadcasts to [...], without a gradient, and 0 means softmax(logits) without filters, as for
    greedy requests.

    Returns float32 [...], natural logarithms: for logits that have the bits of an engine's, those
    of ``Completion.logprobs`` and ``Engine.score`` under the same settings
    (``logprobs_mode="raw"``: those for temperature 1 without filters). -inf where the filters
    exclude the token, with gradient 0; NaN where a row holds NaN or +inf, or -inf alone.
    return_kept_mass: return also the logarithm of the probability that the filters kept of
    softmax(logits / temperature), float32 [...], 0 without filters.

    The gradient is that of log softmax(x)[id], x = filtered(logits / temperature), at a fixed set
    of tokens kept, in the dtype of ``logits``:

        d logprob / d logits = (onehot(id) - softmax(x)) / temperature
        d kept mass / d logits = (softmax(x) - softmax(logits / temperature)) / temperature

    Rows are worked on a few at a time, forward and backward. Raises ValueError naming the field,
    its value and what is allowed; -100, the label that losses ignore, is no token: clamp the ids
    and leave such rows out of the result.
    """
    params = SamplingParams(temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p)  # raises
    if logits.dtype not in DTYPES or not logits.ndim:
        given = f"{logits.dtype} {list(logits.shape)}"
        raise refuse("logits", given, "a tensor [..., V] in bf16, fp16 or fp32")
    sampler = Sampler(kernels.load(EngineConfig().backend_on(logits.device.type)))
    asked = _Asked(sampler, _tokens(ids, logits), _temperatures(temperature, logits), params)
    found = evaluated(asked.values, asked.gradients, torch.atleast_2d(logits))
    logprobs, kept_mass = (values.view(logits.shape[:-1]) for values in found)
    return (logprobs, kept_mass) if return_kept_mass else logprobs


def _tokens(ids: Any, logits: Tensor) -> Tensor:
    """``ids`` [N] int64, on the logits' device."""
    found, (*shape, vocab_size) = torch.as_tensor(ids, device=logits.device), logits.shape
    if found.is_floating_point() or found.is_complex() or found.dtype == torch.bool:
        raise refuse("ids.dtype", found.dtype, "integers")
    if list(found.shape) != shape:
        raise refuse("ids.shape", list(found.shape), f"{shape}, the logits' without V")
    found = found.to(torch.int64, copy=True).reshape(-1)
    if len(wrong := found[(found < 0) | (found >= vocab_size)]):
        hint = "; clamp labels to ignore (-100) and leave their rows out of the result"
        allowed = f"token ids in [0, {vocab_size}){hint if wrong[0] < 0 else ''}"
        raise refuse("ids", int(wrong[0]), allowed)
    return found


def _temperatures(given: Any, logits: Tensor) -> Tensor:
    """[N] fp32 on the logits' device, one for each row."""
    shape = logits.shape[:-1]
    found = torch.as_tensor(given, dtype=torch.float64, device=logits.device).detach()
    try:
        found = found.expand(shape).reshape(-1).contiguous()
    except RuntimeError:
        raise refuse("temperature", given, f"numbers that broadcast to {list(shape)}") from None
    if not ((found == 0) | ((found >= COLDEST) & (found <= HOTTEST))).all():
        raise refuse("temperature", given, TEMPERATURES)
    return found.float()


@dataclass
class _Asked:
    """What is asked of N rows of logits. ids, temperature: [N]; params: its filters count."""

    sampler: Sampler
    ids: Tensor
    temperature: Tensor
    params: SamplingParams

    def parts(self, logits: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """A few rows at a time: their places, and [n, V] in the dtype that is sampled from."""
        (*shape, vocab_size), count = logits.shape, len(self.ids)
        step = max(1, PART // max(1, vocab_size))
        for start in range(0, count, step):
            end = min(start + step, count)
            places = torch.arange(start, end, dtype=torch.int64, device=logits.device)
            rows = logits[torch.unravel_index(places, shape)]  # ``reshape`` copies all of a slice
            by_twins = self.sampler.kernels.backend == "torch"
            yield slice(start, end), rows.float() if by_twins else rows

    def scaled(self, rows: Tensor, part: slice) -> tuple[Tensor, Tensor, Tensor]:
        """``rows`` [n, V] divided by their temperatures, fp32, with and without filters; and the
        temperatures [n, 1], 1 for 0."""
        rows, temperature = rows.float(), self.temperature[part]
        divisor = temperature.where(temperature > 0, 1.0)
        kept = whole = rows / divisor[:, None]
        if self.params.filtered:
            top_p = 1.0 if self.params.top_p is None else self.params.top_p
            filters = self.params.top_k or 0, top_p, self.params.min_p or 0.0
            columns = (np.full(len(rows), value) for value in filters)
            kept = self.sampler.filter(rows, divisor, *columns)
            kept = kept.where(temperature[:, None] > 0, whole)
        return kept, whole, divisor[:, None]

    def values(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities and kept mass, [N] fp32, by the kernels, under torch's settings of
        passes."""
        chosen, filtered = self.sampler.kernels.chosen_logprobs, self.params.filtered
        logprobs, kept_mass = (torch.zeros_like(self.temperature) for _ in range(2))
        with pinned(logits.device.type), without_modes(), torch.cuda.device_of(logits):
            for part, rows in self.parts(logits):
                ids, temperature = self.ids[part], self.temperature[part]
                logprobs[part] = chosen(rows, ids, temperature)
                if filtered:
                    kept, whole, _ = self.scaled(rows, part)
                    likeliest = kept.argmax(-1)  # which every filter keeps
                    kept_mass[part] = chosen(whole, likeliest) - chosen(kept, likeliest)
                    logprobs[part] = chosen(kept, ids).where(temperature > 0, logprobs[part])
        return logprobs, kept_mass.clamp_(max=0)

    def gradients(self, _: Any, given: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
        """That of logits, by the formulas of ``token_logprobs``."""
        (logits,), (of_logprobs, of_mass) = given, grads
        softmax, filtered = self.sampler.kernels.softmax, self.params.filtered
        found = torch.empty_like(logits, memory_format=torch.contiguous_format)
        flat = found.view(len(self.ids), logits.shape[-1])
        with pinned(logits.device.type), without_modes(), torch.cuda.device_of(logits):
            for part, rows in self.parts(logits):
                kept, whole, divisor = self.scaled(rows, part)
                ids = self.ids[part, None]
                excluded = kept.gather(1, ids) == -torch.inf
                weight = (of_logprobs[part, None] / divisor).masked_fill(excluded, 0)
                shares = softmax(kept)
                total = shares.scatter_add(1, ids, torch.full_like(weight, -1)).mul_(-weight)
                if filtered:
                    total += (shares - softmax(whole)) * (of_mass[part, None] / divisor)
                flat[part] = total
        return [found]
