"""Fused KV write against an independent reference in fp64; the twin, to the bit, against RoPE by
transformers, whichever way a model turns."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb as cohere
from transformers.models.ernie4_5.modeling_ernie4_5 import apply_rotary_pos_emb as ernie
from transformers.models.glm.modeling_glm import apply_rotary_pos_emb as glm
from transformers.models.helium.modeling_helium import apply_rotary_pos_emb as helium
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as llama

from tests.kernels.cases import DEVICE, DTYPES, assert_row_invariant, normal
from tests.support.tolerances import assert_as_good_as_torch
from tinyspec.kernels.kv_write import fused_kv_write
from tinyspec.kernels.twins import layers as twin

EPS = 1e-6
SENTINEL = 7.0


TURNS = [pytest.param(False, id="halves"), pytest.param(True, id="interleaved")]
# Query heads, KV heads, their size, and how much of it is rotated.
SHAPES = {
    "smallest": (1, 1, 4, 2),
    "gqa-32": (4, 2, 32, 32),
    "no-rope-64": (6, 3, 64, 0),
    "mqa-partial-80": (5, 1, 80, 20),
    "mha-96": (7, 7, 96, 96),
    "gqa-128": (8, 2, 128, 128),
    "partial-256": (2, 1, 256, 64),
}


def reference(
    x: Tensor, weight: Tensor | None, cos: Tensor | None, sin: Tensor | None, interleaved: bool
) -> Tensor:
    """Norm and rotation as transformers writes them, in the dtype of ``x`` or of wider angles."""
    if weight is not None:
        wide = x if x.dtype == torch.float64 else x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
        x = weight.to(x.dtype) * wide.to(x.dtype)
    if cos is None or sin is None:
        return x
    wide = torch.promote_types(x.dtype, cos.dtype)
    cos, sin = cos.to(wide)[:, None], sin.to(wide)[:, None]
    rot = cos.shape[-1]
    rotary, rest = x[..., :rot], x[..., rot:]
    if interleaved:
        other = torch.stack([-rotary[..., 1::2], rotary[..., ::2]], dim=-1).flatten(-2)
    else:
        other = torch.cat([-rotary[..., rot // 2 :], rotary[..., : rot // 2]], dim=-1)
    return torch.cat([(rotary * cos + other * sin).to(x.dtype), rest], dim=-1)


def angles(rows: int, rot: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Every element has its own: that two of a pair are one angle is nothing to rely on."""
    angle = 3 * normal(rows, rot, seed=9)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def caches(pages: int, page_size: int, heads: int, dim: int, dtype: torch.dtype) -> list[Tensor]:
    shape = (pages, page_size, heads, dim)
    return [torch.full(shape, SENTINEL, dtype=dtype, device=DEVICE) for _ in range(2)]


def slots(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=DEVICE)


@pytest.mark.crossed(0.1)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize("interleaved", TURNS)
@pytest.mark.parametrize("angle_dtype", [None, torch.float32], ids=["same", "in-fp32"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_matches_reference(shape, interleaved, angle_dtype, norm, dtype):
    q_heads, kv_heads, dim, rot = shape
    places = [33, 0, -1, 16, 7]
    rows, kept = len(places), [0, 1, 3, 4]
    q = normal(rows, q_heads, dim, seed=1, dtype=dtype)
    k = normal(rows, kv_heads, dim, seed=2, dtype=dtype)
    v = normal(rows, kv_heads, dim, seed=3, dtype=dtype)
    cos, sin = angles(rows, rot, angle_dtype or dtype) if rot else (None, None)
    weights = [normal(dim, seed=seed, dtype=dtype) if norm else None for seed in (4, 5)]
    k_cache, v_cache = caches(3, 16, kv_heads, dim, dtype)

    out = fused_kv_write(
        q, k, v, cos, sin, k_cache, v_cache, slots(places),
        q_weight=weights[0], k_weight=weights[1], eps=EPS, interleaved=interleaved,
    )  # fmt: skip

    written = k_cache.flatten(0, 1)[slots(places)[kept]]
    assert out.is_contiguous()
    for got, x, weight in ((out, q, weights[0]), (written, k, weights[1])):
        same = reference(x, weight, cos, sin, interleaved)
        exact = reference(x.double(), weight, cos, sin, interleaved)
        if x is k:
            same, exact = same[kept], exact[kept]
        assert_as_good_as_torch(got, same, exact)
    assert torch.equal(v_cache.flatten(0, 1)[slots(places)[kept]], v[kept])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", TURNS)
@pytest.mark.parametrize("page_size", [16, 128])
def test_exact(page_size, interleaved, dtype):
    """Angles of 0, 90 and 180 degrees only move and negate numbers."""
    dim, half, places = 48, 16, [page_size, 2, 2 * page_size - 1]
    x, v = (normal(3, 2, dim, seed=seed, dtype=dtype) for seed in (1, 2))
    tables = torch.tensor([[1.0, 0.0, -1.0], [0.0, 1.0, 0.0]], dtype=dtype, device=DEVICE)
    cos, sin = tables[:, :, None].repeat(1, 1, 2 * half)
    first, second, rest = x.split([half, half, dim - 2 * half], dim=-1)
    turned = [x[0], torch.cat([-second[1], first[1], rest[1]], dim=-1)]
    turned.append(torch.cat([-first[2], -second[2], rest[2]], dim=-1))
    expected = torch.stack(turned)
    if interleaved:
        # The same numbers, the two of a pair side by side.
        order = torch.arange(dim)
        order[: 2 * half] = order[: 2 * half].view(2, half).T.flatten()
        x, expected = x[..., order].contiguous(), expected[..., order]
    cached = caches(2, page_size, 2, dim, dtype)
    out = fused_kv_write(x, x, v, cos, sin, *cached, slots(places), interleaved=interleaved)
    assert torch.equal(out, expected)
    for cache, written in zip(cached, (expected, v), strict=True):
        assert torch.equal(cache.flatten(0, 1)[places], written)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", TURNS)
def test_row_invariant(interleaved, dtype):
    parts, dim = [4, 2, 2, 1, 1], 80
    weight = normal(dim, seed=5, dtype=dtype)
    options = {"q_weight": weight, "k_weight": weight, "interleaved": interleaved}

    def run(rows: Tensor) -> Tensor:
        """q, and what is in the cache, of rows of q, k, v and angles."""
        *given, cos, sin = rows.view(len(rows), -1, dim).split(parts, dim=1)
        cached = caches(1, 16, 2, dim, dtype)
        places = slots(list(range(len(rows))))
        tables = [table.flatten(1).contiguous() for table in (cos, sin)]
        out = fused_kv_write(*given, *tables, *cached, places, **options)
        return torch.cat([out, *(cache[0, places] for cache in cached)], dim=1)

    fused = normal(3, sum(parts) * dim, seed=1, dtype=dtype)
    assert_row_invariant(run, fused)


def test_row_invariant_can_fail():
    """Control: another order of the norm's sum changes bits."""
    x, weight = normal(16, 4, 80, seed=1), torch.ones(80, device=DEVICE)
    k_cache, v_cache = caches(4, 16, 4, 80, torch.float32)
    skip = slots([-1] * 16)

    def normed(y: Tensor) -> Tensor:
        return fused_kv_write(y, y, y, None, None, k_cache, v_cache, skip, q_weight=weight)

    assert torch.equal(normed(x), normed(x.clone()))
    assert not torch.equal(normed(x), normed(x.flip(-1)).flip(-1))


@pytest.mark.usefixtures("poisoned")
def test_padding_untouched():
    rows, heads, dim = 5, 2, 80
    x = normal(rows, heads, dim, seed=1)
    cos, sin = angles(rows, dim, torch.float32)
    k_cache, v_cache = caches(3, 16, heads, dim, torch.float32)
    places = [20, -1, 40, -1, -1]
    out = fused_kv_write(x, x, x, cos, sin, k_cache, v_cache, slots(places))
    assert out.isfinite().all()
    untouched = torch.ones(48, dtype=torch.bool, device=DEVICE)
    untouched[[20, 40]] = False
    for cache in (k_cache, v_cache):
        assert (cache.flatten(0, 1)[untouched] == SENTINEL).all()
        assert (cache.flatten(0, 1)[~untouched] != SENTINEL).all()


ROWS, Q_HEADS, KV_HEADS = 33, 6, 2
# name: (transformers' function, interleaved, rotates in fp32, head size, rotated)
MODELS = {
    "llama": (llama, False, False, 48, 48),
    "glm": (glm, True, False, 64, 32),
    "helium": (helium, True, False, 80, 80),
    "cohere": (cohere, True, True, 64, 64),
    "ernie": (ernie, True, True, 128, 128),
}


@pytest.mark.parametrize("rot", [0, 20, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_values_in_a_cache_are_finite(dtype, rot):
    """One that is not is 0, and its key NaN; all others as without it."""
    q, k, v = (normal(3, heads, 32, seed=heads, dtype=dtype) for heads in (6, 3, 3))
    cos, sin = angles(3, rot, dtype) if rot else (None, None)
    found = []
    for value in (v[1, 2, 5].item(), math.nan, math.inf, -math.inf):
        v[1, 2, 5] = value
        cached = caches(1, 4, 3, 32, dtype)
        out = fused_kv_write(q, k, v, cos, sin, *cached, slots([3, 0, 1]))
        found.append((out, *(cache.flatten(0, 1) for cache in cached)))
    (out, keys, values), *others = found
    assert keys.isfinite().all()
    keys[0, 2], values[0, 2, 5] = 0, 0
    for same, marked, finite in others:
        assert torch.equal(out, same) and marked[0, 2].isnan().all()
        assert torch.equal(marked.nan_to_num(0), keys) and torch.equal(finite, values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_bits_of_transformers(name, dtype):
    apply, interleaved, in_fp32, dim, rot = MODELS[name]
    x = torch.randn(ROWS, Q_HEADS + KV_HEADS, dim).to(dtype)
    angle = 3 * torch.randn(ROWS, rot // 2)
    by_pairs = angle.repeat_interleave(2, dim=-1)
    # What the model's rotary module hands over, rounded as it does: all but Ernie's in its dtype.
    own = torch.float32 if name == "ernie" else dtype
    handed = by_pairs if name == "cohere" else torch.cat([angle, angle], dim=-1)
    heads = x.transpose(0, 1)[None]
    q, k = heads.split([Q_HEADS, KV_HEADS], dim=1)
    given = [table.to(own)[None] for table in (handed.cos(), handed.sin())]
    expected = torch.cat(apply(q, k, *given), dim=1)[0].transpose(0, 1)

    angles = by_pairs if interleaved else handed
    cos, sin = (table.to(own) for table in (angles.cos(), angles.sin()))
    if in_fp32:
        cos, sin = cos.float(), sin.float()
    q, k = x.split([Q_HEADS, KV_HEADS], dim=1)
    cached = [torch.zeros(3, 16, KV_HEADS, dim, dtype=dtype) for _ in range(2)]
    places, before = torch.arange(ROWS).flip(0), x.clone()
    out = twin.fused_kv_write(q, k, k, cos, sin, *cached, places, interleaved=interleaved)
    found = torch.cat([out, cached[0].flatten(0, 1)[places]], dim=1)
    assert torch.equal(x, before) and found.dtype == dtype and torch.equal(found, expected)
