"""Second half of sample: of the blocks of a row, its token, log-probability and log-sum-exp.

    highest = max_b highest_b        rest = log(sum_b total_b * exp(highest_b - highest))
    logprob = (x_token / T - highest) - rest

The log-sum-exp stays in two parts: their sum would be rounded at the size of the logits.

A program owns one row. Its blocks are lanes of one tile, whose width follows from V alone, so their
sums are added in one order. Ties go to the lowest index. A row that holds NaN or +inf has a NaN
among its sums; such a row, or one of -inf alone, yields token -1 and NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=["width", "stride", "num_temperatures", "num_forced"],
    do_not_specialize_on_alignment=["logit_ptr", "temperature_ptr", "forced_ptr"],
)
def sample_merge_kernel(
    logit_ptr,  # [N, V]
    temperature_ptr,  # [num_temperatures] fp32
    forced_ptr,  # [num_forced] int64
    partial_ptr,  # [3, N, B] fp32: as sample_kernel writes them
    place_ptr,  # [N, B] int32
    token_ptr,  # [N] int64
    logprob_ptr,  # [N] fp32
    norm_ptr,  # [2, N] fp32: highest, rest
    width,  # V and the row stride in units of VEC elements
    stride,
    num_temperatures,  # N, or 0: all rows are greedy
    num_forced,  # N, or 0: no row is forced
    VEC: tl.constexpr,
    BLOCK_V: tl.constexpr,
    LANES: tl.constexpr,
):
    vocab_size = width * VEC
    blocks = tl.cdiv(vocab_size, BLOCK_V)
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row, mask=row < num_temperatures, other=0.0)
    forced = tl.load(forced_ptr + row, mask=row < num_forced, other=-1)

    lane = tl.arange(0, LANES)
    there = lane < blocks
    partial = partial_ptr + row * blocks + lane
    rows = tl.num_programs(0).to(tl.int64) * blocks
    best = tl.load(partial, mask=there, other=float("-inf"))
    highest = tl.load(partial + rows, mask=there, other=float("-inf"))
    total = tl.load(partial + 2 * rows, mask=there, other=0.0)
    place = tl.load(place_ptr + row * blocks + lane, mask=there, other=0)

    top = tl.max(best, axis=0)
    token = tl.min(tl.where(best == top, place, vocab_size), axis=0).to(tl.int64)
    token = tl.where(forced < 0, token, forced)
    row_max = tl.max(highest, axis=0)
    shift = tl.where(row_max == float("-inf"), 0.0, row_max)
    rest = tl.log(tl.sum(total * tl.exp(highest - shift), axis=0))
    sound = (rest == rest) & (row_max > float("-inf"))
    rest = tl.where(sound, rest, float("nan"))

    inside = token < vocab_size  # a forced token may not be
    x_ptr = logit_ptr + row * stride * VEC + token
    x = tl.load(x_ptr, mask=inside, other=float("-inf")).to(tl.float32)
    x = tl.div_rn(x, tl.where(temperature > 0, temperature, 1.0))
    tl.store(token_ptr + row, tl.where(sound, token, -1))
    tl.store(logprob_ptr + row, (x - shift) - rest)
    tl.store(norm_ptr + row, shift)
    tl.store(norm_ptr + tl.num_programs(0) + row, rest)
