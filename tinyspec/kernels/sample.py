"""Sample: temperature, seeded Gumbel noise, argmax and log-probability in one read of the logits.

    token = argmax_v(x_v / T + g_v)        logprob = x_token / T - logsumexp(x / T)

logits [N, V] in bf16, fp16 or fp32. A program owns one block of BLOCK_V entries of one row and
writes the block's best entry, its maximum and its sum of exp(x / T - maximum); ``sample_merge``
makes a token and a log-probability of them. Blocks are counted from entry 0 and what a thread holds
follows from dtype and V, so the order of additions depends on these two alone. Ties go to the
lowest index.

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
from tinyspec.kernels.sample_merge import sample_merge_kernel


@triton.jit(
    do_not_specialize=["width", "stride", "num_temperatures", "num_forced"],
    do_not_specialize_on_alignment=[
        "logit_ptr",
        "temperature_ptr",
        "key_ptr",
        "position_ptr",
        "forced_ptr",
    ],
)
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

    entry = launch.sample()
    blocks = triton.cdiv(vocab_size, entry.block_v)
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
        "BLOCK_V": entry.block_v,
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
