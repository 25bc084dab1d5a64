"""Sample: temperature, seeded Gumbel noise, argmax and log-probability in one read of the logits.

    token = argmax_v(x_v / T + g_v)        logprob = x_token / T - logsumexp(x / T)

logits [N, V] in bf16, fp16 or fp32. A program owns one block of BLOCK_V entries of one row and
writes the block's best entry, its maximum and its sum of exp(x / T - maximum); a second kernel
makes a token and a log-probability of them. Blocks are counted from entry 0 and what a thread holds
follows from dtype and V, so the order of additions depends on these two alone. Ties go to the
lowest index.

A forced token replaces the best entry; its log-probability is computed in the same way and has the
same bits as if the row had chosen it.

The merge: of the blocks of a row, its token, log-probability and log-sum-exp.

    highest = max_b highest_b        rest = log(sum_b total_b * exp(highest_b - highest))
    logprob = (x_token / T - highest) - rest

The log-sum-exp stays in two parts: their sum would be rounded at the size of the logits.

A program owns one row. Its blocks are lanes of one tile, whose width follows from V alone, so their
sums are added in one order. Ties go to the lowest index. A row that holds NaN or +inf has a NaN
among its sums; such a row, or one of -inf alone, yields token -1 and NaN.

Noise is Gumbel's, of philox4x32-10:

    u = ((x >> 9) + 1/2) / 2**23        g = -log(-log(u))

Entry v of a row's noise is lane ``v & 3`` of the four outputs at counter (v >> 2, position, 0, 0)
under the row's 64-bit key, so it depends on nothing else. The rounds are written out instead of
calling ``tl.philox``, because the bits of a seed must not change with the triton version.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinyspec.kernels import launch
from tinyspec.kernels.jit import kernel


@triton.jit
def philox(c0, c1, c2, c3, k0, k1):
    """Four uint32 outputs of the uint32 counter (c0, c1, c2, c3) under the uint32 key (k0, k1)."""
    ROUND_A: tl.constexpr = 0xD2511F53
    ROUND_B: tl.constexpr = 0xCD9E8D57
    KEY_A: tl.constexpr = 0x9E3779B9
    KEY_B: tl.constexpr = 0xBB67AE85
    for _ in tl.static_range(10):
        high_a, low_a = tl.umulhi(c0, tl.full(c0.shape, ROUND_A, tl.uint32)), c0 * ROUND_A
        high_b, low_b = tl.umulhi(c2, tl.full(c2.shape, ROUND_B, tl.uint32)), c2 * ROUND_B
        c0, c1, c2, c3 = high_b ^ c1 ^ k0, low_b, high_a ^ c3 ^ k1, low_a
        k0 += KEY_A
        k1 += KEY_B
    return c0, c1, c2, c3


@triton.jit
def gumbel(start, position, k0, k1, BLOCK: tl.constexpr):
    """Noise [BLOCK] fp32 of the entries from ``start`` (a multiple of 4) on; position and key
    uint32."""
    quad = start // 4 + tl.arange(0, BLOCK // 4)
    zero = tl.zeros([BLOCK // 4], tl.uint32)
    x0, x1, x2, x3 = philox(quad.to(tl.uint32), zero + position, zero, zero, k0, k1)
    x = tl.reshape(tl.join(tl.join(x0, x2), tl.join(x1, x3)), [BLOCK])
    u = ((x >> 9).to(tl.float32) + 0.5) * (1.0 / 8388608)
    return -tl.log(-tl.log(u))


@kernel(["logit_ptr", "temperature_ptr", "key_ptr", "position_ptr", "forced_ptr"])
def sample_kernel(
    logit_ptr,  # [N, V]
    temperature_ptr,  # [num_temperatures] fp32
    key_ptr,  # [num_temperatures] int64
    position_ptr,  # [num_temperatures] int64
    forced_ptr,  # [num_forced] int64
    partial_ptr,  # [3, N, B] fp32: a block's highest x / T + g, highest x / T, sum
    place_ptr,  # [N, B] int32: where the first of the three is
    width,  # V and the row stride in units of VEC elements
    stride,
    num_temperatures,  # N, or 0: all rows are greedy
    num_forced,  # N, or 0: no row is forced
    VEC: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    VEC_BYTES: tl.constexpr = VEC * logit_ptr.dtype.element_ty.primitive_bitwidth // 8
    vocab_size = width * VEC
    blocks = tl.cdiv(vocab_size, BLOCK_V)
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64)
    start = program % blocks * BLOCK_V
    temperature = tl.load(temperature_ptr + row, mask=row < num_temperatures, other=0.0)
    sampled = temperature > 0
    free = tl.load(forced_ptr + row, mask=row < num_forced, other=-1) < 0

    v = start + tl.arange(0, BLOCK_V)
    row_ptr = tl.multiple_of(logit_ptr + row * stride * VEC, VEC_BYTES)
    x = tl.load(row_ptr + v, mask=v < vocab_size, other=float("-inf")).to(tl.float32)
    if sampled:
        x = tl.div_rn(x, tl.zeros_like(x) + temperature)

    # A NaN or +inf makes the sum NaN.
    highest = tl.max(x, axis=0)
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.sum(tl.exp(x - shift), axis=0)

    z = x
    if sampled & free:
        key = tl.load(key_ptr + row)
        k0 = (key & 0xFFFFFFFF).to(tl.uint32)
        k1 = ((key >> 32) & 0xFFFFFFFF).to(tl.uint32)
        position = (tl.load(position_ptr + row) & 0xFFFFFFFF).to(tl.uint32)
        z = x + gumbel(start, position, k0, k1, BLOCK_V)
    best = tl.max(z, axis=0)
    place = tl.min(tl.where(z == best, v, vocab_size), axis=0)

    partials = tl.num_programs(0)
    tl.store(place_ptr + program, place)
    tl.store(partial_ptr + program, best)
    tl.store(partial_ptr + partials + program, highest)
    tl.store(partial_ptr + 2 * partials + program, total)


@kernel(["logit_ptr", "temperature_ptr", "forced_ptr"])
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

    logits [N, V] bf16, fp16 or fp32, excluded tokens at -inf; temperature [N] fp32, 0 for greedy;
    keys [N] int64; positions [N] int64 -> tokens [N] int64, log-probabilities [N] fp32 under
    softmax(logits / T) (T = 0: softmax(logits)). Where all rows are greedy the three may be None.
    The token is argmax(logits / T + noise), the lowest index on ties; a row without a finite
    maximum (NaN, +inf, or nothing left) yields token -1 and log-probability NaN.
    forced [N] int64: where it is not negative, the token that the row yields instead; its
    log-probability has the bits of a free choice of it (-inf if it is excluded, or not below V).
    """
    assert (temperature is None) == (keys is None) == (positions is None)
    tokens, chosen, _ = sample_rows(logits, temperature, keys, positions, forced)
    return tokens, chosen if logprobs else None


def sample_rows(
    logits: Tensor,
    temperature: Tensor | None = None,
    keys: Tensor | None = None,
    positions: Tensor | None = None,
    forced: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As ``sample``, and two parts [2, N] fp32 of logsumexp(logits / T): the maximum, and what is
    added to it, NaN where a row yields no token.

    keys and positions may be None as well where every row that has a temperature is forced.
    """
    rows, vocab_size = logits.shape
    assert logits.dtype in (torch.bfloat16, torch.float16, torch.float32)
    assert temperature is None or temperature.dtype == torch.float32
    for each in (keys, positions, forced):
        assert each is None or each.dtype == torch.int64
    for each in (temperature, keys, positions, forced):
        assert each is None or (each.shape == (rows,) and each.is_contiguous())
    assert temperature is None or keys is not None or forced is not None
    vec = launch.vector(logits.dtype, vocab_size)
    logits = launch.vectorizable(logits, vec, vec * logits.itemsize)
    num_temperatures = 0 if temperature is None else rows
    num_forced = 0 if forced is None else rows

    entry = launch.SAMPLE
    blocks = triton.cdiv(vocab_size, entry.block)
    device = logits.device
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    chosen = torch.empty(rows, dtype=torch.float32, device=device)
    norms = torch.empty(2, rows, dtype=torch.float32, device=device)
    partials = torch.empty(3, rows, blocks, dtype=torch.float32, device=device)
    places = torch.empty(rows, blocks, dtype=torch.int32, device=device)
    if rows == 0:
        return tokens, chosen, norms
    # A pointer that is never read needs a type as well.
    temperature = chosen if temperature is None else temperature
    keys, positions, forced = (tokens if x is None else x for x in (keys, positions, forced))
    shared = {
        "logit_ptr": logits,
        "temperature_ptr": temperature,
        "forced_ptr": forced,
        "partial_ptr": partials,
        "place_ptr": places,
        "width": vocab_size // vec,
        "stride": logits.stride(0) // vec,
        "num_temperatures": num_temperatures,
        "num_forced": num_forced,
        "VEC": vec,
        "BLOCK_V": entry.block,
        **launch.OPTIONS,
    }
    sample_kernel[(rows * blocks,)](
        key_ptr=keys, position_ptr=positions, num_warps=entry.num_warps, **shared
    )
    sample_merge_kernel[(rows,)](
        token_ptr=tokens,
        logprob_ptr=chosen,
        norm_ptr=norms,
        LANES=launch.merge_lanes(blocks),
        num_warps=1,
        **shared,
    )
    return tokens, chosen, norms


def log_softmax(logits: Tensor, temperature: Tensor | None = None) -> Tensor:
    """Log-probabilities [N, V] fp32 under softmax(logits / T).

    logits [N, V] bf16, fp16 or fp32; temperature [N] fp32, 0 or None for T = 1. A row without a
    finite maximum yields NaN.
    """
    forced = None
    scaled = logits.float()
    if temperature is not None:  # a row that is forced needs no noise
        forced = torch.zeros_like(temperature, dtype=torch.int64)
        scaled = scaled / torch.where(temperature > 0, temperature, 1.0)[:, None]
    highest, rest = sample_rows(logits, temperature, forced=forced)[2]
    return (scaled - highest[:, None]) - rest[:, None]


def softmax(logits: Tensor) -> Tensor:
    """Probabilities [N, V] fp32; logits as for ``log_softmax``."""
    return log_softmax(logits).exp_()


def chosen_logprobs(logits: Tensor, tokens: Tensor, temperature: Tensor | None = None) -> Tensor:
    """Log-probabilities [N] fp32 of ``tokens`` [N] int64, with the bits of ``sample``, else as
    ``log_softmax``."""
    return sample_rows(logits, temperature, forced=tokens)[1]
