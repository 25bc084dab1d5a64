"""Twins of the kernels over rows of hidden states and heads: KV write, RMSNorm, gated MLP, linear.

The KV write and the norm follow transformers operation by operation and dtype by dtype, so they
round where transformers does. A cache holds numbers in the dtype of q, k and v, or e4m3 codes
(uint8) by torch's own e4m3fn, saturating.

Activations go row by row: torch rounds what is left behind whole vectors by another function, and
threads divide a tensor of many rows at places that depend on how many there are.

``linear`` works in tiles of sixteen rows, the last padded with zeros: for a given weight every call
has the same shape. Required is only that *at sixteen rows* a row's bits do not depend on its place
and its neighbours. Measured with the probes on cancelling inputs over 147
to 201 shapes (K and N from 1 to 8192, odd ones too, both layouts of the weight, with bias and
without; 1, 2, 4 and 8 threads; AVX-512 with AMX, and limited to AVX2 and SSE4; torch 2.13):

- fp32 by oneDNN: no bit differed.
- fp32 by ``F.linear`` (MKL): bits differed at N = 64, K 100 to 512, with two threads on AVX2, and
  at K = 8192, N = 1 with eight threads. Hence oneDNN, where torch has its operator.
- bf16 and fp16 by ``F.linear``: no bit differed. Both sum in fp32 and round once.

The address of the tile and neighbours of NaN changed nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Derived = dict[Hashable, Any]
CODES = torch.uint8
NAN = 0x7F
LARGEST = torch.finfo(torch.float8_e4m3fn).max
TILE = 16
# What inductor emits; private, so a build may lack it.
_ONEDNN = hasattr(torch.ops.mkldnn, "_linear_pointwise")
_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}
ACTIVATIONS = tuple(_FUNCTIONS)


def stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x as a cache of ``dtype`` holds it: as it is, or its codes: of 448 beyond it, NAN of NaN,
    whose sign depends on how torch gets to an element."""
    if dtype != CODES:
        return x
    codes = x.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).view(CODES)
    return codes.masked_fill_(x.isnan(), NAN)


def values(cache: Tensor, dtype: torch.dtype) -> Tensor:
    """What a cache holds: as it is, or what its codes mean in ``dtype``, exactly."""
    return cache.view(torch.float8_e4m3fn).to(dtype) if cache.dtype == CODES else cache


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x32 = x.float()
    x32 = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return weight * x32.to(x.dtype)


def _signed(sin: Tensor, interleaved: bool) -> Tensor:
    """(-sin, sin): (-x2, x1) * sin is (x2, x1) * (-sin, sin), to the bit."""
    if interleaved:
        return torch.stack((-sin[..., ::2], sin[..., 1::2]), dim=-1).flatten(-2)
    first, second = sin.split(sin.shape[-1] // 2, dim=-1)
    return torch.cat((-first, second), dim=-1)


def _rotate(x: Tensor, cos: Tensor, signed: Tensor, interleaved: bool) -> Tensor:
    """RoPE on the head's first ``cos.shape[-1]`` dimensions, rounded once where cos and sin are
    wider than x; the pairs are halves, or even and odd dimensions (``interleaved``)."""
    rot = cos.shape[-1]
    part = x if rot == x.shape[-1] else x[..., :rot]
    if cos.dtype != x.dtype:
        part = part.to(torch.promote_types(x.dtype, cos.dtype))
    if interleaved:
        partner = part.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    else:
        partner = part.roll(rot // 2, dims=-1)
    out = (part * cos).add_(partner.mul_(signed))
    if out.dtype != x.dtype:
        out = out.to(x.dtype)
    return out if rot == x.shape[-1] else torch.cat((out, x[..., rot:]), dim=-1)


def _angles(cos: Tensor, sin: Tensor, interleaved: bool, derived: Derived) -> tuple[Tensor, Tensor]:
    """cos and signed sin [R, 1, rot] for ``_rotate``, once for all layers that share them."""
    key = "angles", interleaved, id(cos), id(sin)
    if key not in derived:
        # Keep cos and sin alive: ``id()`` is the key.
        derived[key] = cos[:, None], _signed(sin, interleaved)[:, None], cos, sin
    return derived[key][:2]


def write_rows(places: Tensor, rows: Tensor, slots: Tensor, derived: Derived) -> None:
    """Write rows [R, ...] to their ``slots`` [R] int64 among places [P, ...]; -1: nowhere."""
    key = "written", id(slots)
    if key not in derived:
        chosen, there = None, slots
        if int(slots.min()) < 0:
            chosen = (slots >= 0).nonzero().squeeze(-1)
            there = slots[chosen]
        derived[key] = chosen, there, slots
    chosen, there, _ = derived[key]
    places.index_copy_(0, there, rows if chosen is None else rows.index_select(0, chosen))


def norm_and_rotate(
    q: Tensor,
    k: Tensor,
    angles: tuple[Tensor, Tensor] | None,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    interleaved: bool = False,
    derived: Derived | None = None,
) -> tuple[Tensor, Tensor]:
    """q and k as ``fused_kv_write`` returns and writes them; angles: cos and sin."""
    if q_weight is not None:
        q = _rms_norm(q, q_weight, eps)
    if k_weight is not None:
        k = _rms_norm(k, k_weight, eps)
    if angles is None:
        return q, k
    known = _angles(*angles, interleaved, {} if derived is None else derived)
    both = _rotate(torch.cat((q, k), dim=1), *known, interleaved)
    q, k = both.split((q.shape[1], k.shape[1]), dim=1)
    return q, k


def fused_kv_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    interleaved: bool = False,
    derived: Derived | None = None,
) -> Tensor:
    """Norm and rotate q and k, write k and v where ``slot_mapping`` says, return the rotated q.

    q [R, Hq, D], k and v [R, Hkv, D]; cos and sin [R, rot] with rot <= D, in any float dtype (a
    wider one: rotated in it, rounded once), or None for no RoPE; caches [N, page_size, Hkv, D], of
    q's dtype or uint8: e4m3 codes of what was rounded; slot_mapping [R] int64, page * page_size +
    offset, -1 to skip. q_weight and k_weight [D]: RMSNorm over the head before RoPE (Qwen3).
    interleaved: RoPE rotates even with odd dimensions (GLM) instead of the first with the second
    half. derived: ``AttentionMetadata.derived``; between calls that share it cos, sin and
    slot_mapping do not change.
    """
    derived = {} if derived is None else derived
    angles = None if cos is None or sin is None else (cos, sin)
    q, k = norm_and_rotate(q, k, angles, q_weight, k_weight, eps, interleaved, derived)
    for cache, x in ((k_cache, k), (v_cache, v)):
        held = x if cache.dtype == x.dtype else stored(x, cache.dtype)
        write_rows(cache.flatten(0, 1), held, slot_mapping, derived)
    return q


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """act(gate) * up, each rounded once; gate and up [..., I] of one dtype -> [..., I].

    activation: one of ACTIVATIONS.
    """
    function, size = _FUNCTIONS[activation], gate.shape[-1]
    rows = [function(row) for row in gate.reshape(-1, size)]
    return torch.stack(rows).view(gate.shape) * up if rows else gate * up


def gated_at_once(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """As ``gated`` up to rounding, with gradients."""
    return _FUNCTIONS[activation](gate) * up


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, unit_offset: bool = False
) -> tuple[Tensor, Tensor]:
    """The RMSNorm of x + residual, and the sum; of x, and x itself, without a residual.

    x and residual [..., H], weight [H], of one dtype -> two [..., H]. unit_offset: the weight is
    stored less one, and multiplied before the norm is rounded.
    """
    summed = x if residual is None else x + residual
    wide = summed.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    normed = wide * (1.0 + weight.float()) if unit_offset else wide.to(x.dtype) * weight
    return normed.to(x.dtype), summed


def _tile(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """One tile [TILE, K] -> [TILE, N]."""
    if _ONEDNN and x.dtype == torch.float32:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias; the bits of a row depend on that row, the weight and the bias alone.

    x [R, K], weight [N, K], bias [N] or None, all of one dtype (bf16, fp16 or fp32) -> [R, N] in
    that dtype, summed in fp32 and rounded once.
    """
    rows, width = x.shape
    tiles = x.new_zeros(-(-rows // TILE), TILE, width)
    tiles.view(-1, width)[:rows] = x
    out = x.new_empty(len(tiles), TILE, weight.shape[0])
    for n, tile in enumerate(tiles):
        out[n] = _tile(tile, weight, bias)
    return out.flatten(0, 1)[:rows]


def sort_by_expert(index: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """index [R, k] int64, from 0 to E - 1, E = ``num_experts`` -> the pairs of a row and an expert
    by expert and then by number [R * k], and the first of every expert among them [E + 1]; int64.
    """
    chosen = index.flatten()
    counts = chosen.bincount(minlength=num_experts)
    return chosen.argsort(stable=True), F.pad(counts.cumsum(0), (1, 0))


def grouped_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, pairs: Tensor, starts: Tensor
) -> Tensor:
    """Every pair of x [P, K] times the weight of its expert, plus its bias -> [P, N]; the bits of a
    pair depend on itself and its expert alone, and are those of ``linear``.

    x bf16, fp16 or fp32; weight [E, N, K], bias [E, N] or None, rounded to x's dtype; pairs,
    starts: of ``sort_by_expert``.
    """
    parts = x.index_select(0, pairs).split(starts.diff().tolist())
    shifts = [None] * len(weight) if bias is None else bias.to(x.dtype)
    found = [
        linear(part, one.to(x.dtype), shift)
        for part, one, shift in zip(parts, weight, shifts, strict=True)
        if len(part)
    ]
    return x.new_empty(len(x), weight.shape[1]).index_copy_(0, pairs, torch.cat(found))


def add_experts(out: Tensor, scales: Tensor, index: Tensor, dtype: torch.dtype) -> Tensor:
    """out [R * k, H], one for each expert of a row, scales and index [R, k] -> [R, H] in ``dtype``:
    out times scales, in the wider dtype of both, added in fp32 in ascending order of ``index``."""
    weighed = out.view(*index.shape, -1) * scales[..., None]
    order = index.argsort(dim=1, stable=True)
    first, *others = weighed.take_along_dim(order[..., None], dim=1).unbind(1)
    total = first.float()
    for other in others:
        total = total + other
    return total.to(dtype)
