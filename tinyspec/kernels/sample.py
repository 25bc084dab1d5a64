"""Sample: temperature, seeded Gumbel noise, argmax and log-probability in one read of the logits.

    token = argmax_v(x_v / T + g_v)        logprob = x_token / T - logsumexp(x / T)

logits [N, V] fp32. A program owns one row and walks it BLOCK_V entries at a time. Every lane keeps
its own best entry and its own running (max, sum) of the logsumexp; lanes are reduced once, at the
end, so the order of additions is fixed by BLOCK_V alone. Ties go to the lowest index.

A forced token replaces the best entry; its log-probability is computed in the same way and has the
same bits as if the row had chosen it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinyspec.kernels import launch
from tinyspec.kernels.philox import gumbel


@triton.jit(
    do_not_specialize=["vocab_size", "stride", "num_forced"],
    do_not_specialize_on_alignment=[
        "logit_ptr",
        "temperature_ptr",
        "key_ptr",
        "position_ptr",
        "forced_ptr",
    ],
)
def sample_kernel(
    logit_ptr,  # [N, V] fp32
    temperature_ptr,  # [N] fp32
    key_ptr,  # [N] int64
    position_ptr,  # [N] int64
    forced_ptr,  # [num_forced] int64
    token_ptr,  # [N] int64
    logprob_ptr,  # [N] fp32
    vocab_size,
    stride,
    num_forced,  # N, or 0: no row is forced
    BLOCK_V: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    sampled = temperature > 0
    divisor = tl.where(sampled, temperature, 1.0)
    key = tl.load(key_ptr + row)
    k0 = (key & 0xFFFFFFFF).to(tl.uint32)
    k1 = ((key >> 32) & 0xFFFFFFFF).to(tl.uint32)
    position = (tl.load(position_ptr + row) & 0xFFFFFFFF).to(tl.uint32)
    forced = tl.load(forced_ptr + row, mask=row < num_forced, other=-1)
    free = forced < 0

    lane = tl.arange(0, BLOCK_V)
    best = tl.full([BLOCK_V], float("-inf"), tl.float32)
    best_x = tl.full([BLOCK_V], float("-inf"), tl.float32)
    best_v = tl.zeros([BLOCK_V], tl.int32)
    highest = tl.full([BLOCK_V], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_V], tl.float32)
    broken = tl.zeros([BLOCK_V], tl.int32)
    for start in range(0, vocab_size, BLOCK_V):
        v = start + lane
        x = tl.load(logit_ptr + row * stride + v, mask=v < vocab_size, other=float("-inf"))
        x = tl.div_rn(x, tl.zeros_like(x) + divisor)
        broken = tl.where((x != x) | (x == float("inf")), 1, broken)

        z = x
        if sampled & free:
            z = x + gumbel(start, position, k0, k1, BLOCK_V)
        z = tl.where(free, z, tl.where(v == forced, float("inf"), float("-inf")))
        # A later entry of the lane has the higher index, so it has to be strictly better.
        better = z > best
        best = tl.where(better, z, best)
        best_x = tl.where(better, x, best_x)
        best_v = tl.where(better, v, best_v)

        higher = tl.maximum(highest, x)
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(highest - shift) + tl.exp(x - shift)
        highest = higher

    top = tl.max(best, axis=0)
    token = tl.min(tl.where(best == top, best_v, vocab_size), axis=0)
    chosen = tl.max(tl.where((best == top) & (best_v == token), best_x, float("-inf")), axis=0)
    row_max = tl.max(highest, axis=0)
    shift = tl.where(row_max == float("-inf"), 0.0, row_max)
    norm = shift + tl.log(tl.sum(total * tl.exp(highest - shift), axis=0))

    finite = (tl.max(broken, axis=0) == 0) & (row_max > float("-inf"))
    tl.store(token_ptr + row, tl.where(finite, token, -1).to(tl.int64))
    tl.store(logprob_ptr + row, tl.where(finite, chosen - norm, float("nan")))


def sample(
    logits: Tensor,
    temperature: Tensor | None,
    keys: Tensor | None,
    positions: Tensor | None,
    *,
    logprobs: bool = True,
    forced: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """One token per row and, if asked for, its log-probability (it costs nothing more here).

    logits [N, V] fp32, excluded tokens at -inf; temperature [N] fp32, 0 for greedy; keys [N] int64;
    positions [N] int64 -> tokens [N] int64, log-probabilities [N] fp32 under softmax(logits / T) (T
    = 0: softmax(logits)). Where all rows are greedy the three may be None. The token is argmax(
    logits / T + noise), the lowest index on ties; a row without a finite maximum (NaN, +inf, or
    nothing left) yields token -1 and log-probability NaN.
    forced [N] int64, below V: where it is not negative, the token that the row yields instead; its
    log-probability has the bits of a free choice of it (-inf if it is excluded).
    """
    rows, vocab_size = logits.shape
    if temperature is None:
        temperature = logits.new_zeros(rows)
        keys = positions = torch.zeros(rows, dtype=torch.int64, device=logits.device)
    assert keys is not None and positions is not None
    assert logits.dtype == temperature.dtype == torch.float32 and logits.stride(1) == 1
    assert keys.dtype == positions.dtype == torch.int64
    assert forced is None or forced.dtype == torch.int64
    for each in (temperature, keys, positions, keys if forced is None else forced):
        assert each.shape == (rows,) and each.is_contiguous()

    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    chosen = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows == 0:
        return tokens, chosen if logprobs else None

    entry = launch.sample()
    grid = (rows,)
    sample_kernel[grid](
        logit_ptr=logits,
        temperature_ptr=temperature,
        key_ptr=keys,
        position_ptr=positions,
        forced_ptr=keys if forced is None else forced,
        token_ptr=tokens,
        logprob_ptr=chosen,
        vocab_size=vocab_size,
        stride=logits.stride(0),
        num_forced=0 if forced is None else rows,
        BLOCK_V=entry.block_v,
        num_warps=entry.num_warps,
        **launch.OPTIONS,
    )
    return tokens, chosen if logprobs else None
