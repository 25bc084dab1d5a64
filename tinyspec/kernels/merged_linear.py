"""Linear for up to three weights that multiply the same rows, in one launch.

    out_i[r, n] = sum_k x[r, k] * weight_i[n, k] + bias_i[n]

x [R, K], weight_i [N_i, K] where they lie, out_i [R, N_i]. A program owns a tile of one of them,
and computes it as ``linear`` does: the same tile of the same launch entry, so the bits are those of
one launch each. Tiles of the weights are numbered one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinyspec.kernels import launch
from tinyspec.kernels.linear import linear_tile

MOST = 3
SIZES = ("n_units", "num_bias", "stride_w")
NAMES = [f"{name}_{part}" for name in SIZES for part in range(MOST)]


@triton.jit(
    do_not_specialize=["num_rows", "k_units", "stride_x", *NAMES],
    do_not_specialize_on_alignment=[f"bias_{part}_ptr" for part in range(MOST)],
)
def merged_linear_kernel(
    x_ptr,  # [R, K]
    weight_0_ptr,  # [N_0, K]
    weight_1_ptr,
    weight_2_ptr,
    bias_0_ptr,  # [num_bias_0]
    bias_1_ptr,
    bias_2_ptr,
    out_0_ptr,  # [R, N_0]
    out_1_ptr,
    out_2_ptr,
    num_rows,
    k_units,  # K in units of VEC_K elements
    stride_x,  # in units of VEC_K elements
    n_units_0,  # N_0 in units of VEC_N elements
    n_units_1,
    n_units_2,
    num_bias_0,  # N_0, or 0: no bias
    num_bias_1,
    num_bias_2,
    stride_w_0,  # in units of VEC_K elements
    stride_w_1,
    stride_w_2,
    VEC_K: tl.constexpr,
    VEC_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tile = tl.program_id(1)
    weight_ptr, bias_ptr, out_ptr = weight_0_ptr, bias_0_ptr, out_0_ptr
    n_units, num_bias, stride_w = n_units_0, num_bias_0, stride_w_0
    first = tl.cdiv(n_units_0 * VEC_N, BLOCK_N)
    second = tl.cdiv(n_units_1 * VEC_N, BLOCK_N)
    if tile >= first + second:
        weight_ptr, bias_ptr, out_ptr = weight_2_ptr, bias_2_ptr, out_2_ptr
        n_units, num_bias, stride_w = n_units_2, num_bias_2, stride_w_2
        tile -= first + second
    elif tile >= first:
        weight_ptr, bias_ptr, out_ptr = weight_1_ptr, bias_1_ptr, out_1_ptr
        n_units, num_bias, stride_w = n_units_1, num_bias_1, stride_w_1
        tile -= first
    linear_tile(
        x_ptr,
        weight_ptr,
        bias_ptr,
        out_ptr,
        tile,
        num_rows,
        k_units,
        n_units,
        num_bias,
        stride_x,
        stride_w,
        TRANSPOSED=False,
        VEC_K=VEC_K,
        VEC_N=VEC_N,
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
        BLOCK_K=BLOCK_K,
    )


def merged_linear(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> list[Tensor]:
    """``linear`` of x with each of two or three weights and biases, with the same bits.

    x [R, K], weights [N, K] with K contiguous (others are copied), biases [N] or None -> [R, N] of
    each.
    """
    rows, width = x.shape
    sizes = [len(weight) for weight in weights]
    assert 1 < len(weights) == len(biases) <= MOST and width > 0 and min(sizes) > 0
    for weight, bias, size in zip(weights, biases, sizes, strict=True):
        assert weight.shape == (size, width) and weight.dtype == x.dtype
        assert bias is None or (bias.shape == (size,) and bias.dtype == x.dtype)
        assert bias is None or bias.is_contiguous()
    vec_k = launch.vector(x.dtype, width)
    vec_n = min(launch.vector(x.dtype, size) for size in sizes)
    x = launch.vectorizable(x, vec_k)
    stored = [launch.vectorizable(weight, vec_k) for weight in weights]

    made = [torch.empty((rows, size), dtype=x.dtype, device=x.device) for size in sizes]
    if rows == 0:
        return made

    # A pointer that is never read needs a type as well; a part without tiles stands for a third.
    parts: dict[str, object] = {}
    for part in range(MOST):
        there = part < len(sizes)
        at = part if there else 0
        bias = biases[at]
        parts |= {
            f"weight_{part}_ptr": stored[at],
            f"bias_{part}_ptr": x if bias is None else bias,
            f"out_{part}_ptr": made[at],
            f"n_units_{part}": sizes[at] // vec_n if there else 0,
            f"num_bias_{part}": 0 if bias is None else sizes[at],
            f"stride_w_{part}": stored[at].stride(0) // vec_k,
        }
    entry = launch.linear(x.dtype)
    tiles = sum(triton.cdiv(size, entry.block_n) for size in sizes)
    merged_linear_kernel[(triton.cdiv(rows, entry.block_m), tiles)](
        x_ptr=x,
        **parts,
        num_rows=rows,
        k_units=width // vec_k,
        stride_x=x.stride(0) // vec_k,
        VEC_K=vec_k,
        VEC_N=vec_n,
        BLOCK_M=entry.block_m,
        BLOCK_N=entry.block_n,
        BLOCK_K=entry.block_k,
        num_warps=entry.num_warps,
        num_stages=entry.num_stages,
        **launch.OPTIONS,
    )
    return made
