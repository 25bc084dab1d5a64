"""Twin of the recurrent layers: tiles of tokens in a few batched products, states one tile after
the other.

Every product has one shape whatever the pass: STATE_TILE tokens of one head. So a row's numbers do
not depend on what else is computed.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tinyspec.config import STATE_TILE
from tinyspec.kernels.backend import AttentionMetadata, LayerStates
from tinyspec.kernels.twins.layers import written_rows

# Numbers of fp32.
LINE = 16


class _Step(NamedTuple):
    """The n-th tiles of the first ``segments`` (of falling length), from tile ``first`` on. moved:
    which of them have more, or move their state by it; None: all. saved: places among those, and
    whose states they are."""

    first: int
    segments: int
    moved: Tensor | None
    saved: tuple[Tensor, Tensor] | None


class _Plan(NamedTuple):
    """Of a pass: rows [E] that lie in the elements of its tiles, E = tiles * STATE_TILE, 0 where
    none does; held: elements whose rows lie in rings, and their places there; empty: elements
    without a token. places [live]: elements of the rows. owners: of the segments, and which have no
    state yet [S, 1, 1, 1]."""

    rows: Tensor
    held: tuple[Tensor, Tensor] | None
    empty: Tensor | None
    places: Tensor
    owners: Tensor
    new: Tensor
    steps: list[_Step]


def _plan(metadata: AttentionMetadata, ring: int) -> _Plan:
    key = "recurrent", ring
    if key not in metadata.derived:
        metadata.derived[key] = _planned(metadata, ring)
    plan: _Plan = metadata.derived[key]
    return plan


def _planned(metadata: AttentionMetadata, ring: int) -> _Plan:
    given = metadata.checkpoints
    assert given is not None
    numbers = (metadata.cu_seqlens_q, metadata.seq_lens, given.owners, given.at, given.to)
    first, ends, owners, at, to = (x.numpy().astype(np.int64) for x in numbers)
    counts = np.diff(first)
    tiles = np.where(counts > 0, -(-(ends - at) // STATE_TILE), 0)
    order = np.argsort(-tiles, kind="stable")
    order = order[: np.count_nonzero(tiles)]
    first, ends, owners, at, to = (x[order] for x in (first[:-1], ends, owners, at, to))
    tiles, starts = tiles[order], ends - counts[order]
    most = int(tiles[0]) if len(tiles) else 0
    steps, numbered, segments, begins = [], 0, [], []
    for n in range(most):
        count = int(np.count_nonzero(tiles > n))
        end = at[:count] + (n + 1) * STATE_TILE
        moved = np.flatnonzero((tiles[:count] > n + 1) | (end <= to[:count]))
        saved = np.flatnonzero(end[moved] == to[moved])
        kept = (torch.from_numpy(saved), torch.from_numpy(owners[moved[saved]]))
        some = None if len(moved) == count else torch.from_numpy(moved)
        steps.append(_Step(numbered, count, some, kept if len(saved) else None))
        segments.append(np.arange(count))
        begins.append(end - STATE_TILE)
        numbered += count
    segment = np.concatenate(segments) if segments else np.zeros(0, np.int64)
    begin = np.concatenate(begins) if begins else np.zeros(0, np.int64)
    position = begin[:, None] + np.arange(STATE_TILE)
    offset = position - starts[segment, None]
    rows = first[segment, None] + offset
    live, there = position < ends[segment, None], offset >= 0
    own = live & there
    places = np.empty(int(own.sum()), np.int64)
    elements = np.arange(own.size)
    places[rows[own]] = elements[own.ravel()]
    held = elements[(live & ~there).ravel()]
    ringed = (owners[segment, None] * ring + position % ring)[live & ~there]
    empty = elements[~live.ravel()]
    return _Plan(
        torch.from_numpy(np.where(own, rows, 0).ravel()),
        (torch.from_numpy(held), torch.from_numpy(ringed)) if len(held) else None,
        torch.from_numpy(empty) if len(empty) else None,
        torch.from_numpy(places),
        torch.from_numpy(owners),
        torch.from_numpy(at == 0)[:, None, None, None],
        steps,
    )


def _padded(x: Tensor, dims: int) -> Tensor:
    """With zeros up to multiples of a cache line of fp32 in the last dimensions: a product's bits
    may depend on where its matrices begin."""
    wanted = [-size % LINE for size in reversed(x.shape[-dims:])]
    return F.pad(x, [n for count in wanted for n in (0, count)]) if any(wanted) else x


def _tiled(x: Tensor, ring: Tensor | None, plan: _Plan) -> Tensor:
    """[tiles, heads, STATE_TILE, ...] fp32 of rows x [R, heads, ...], and of those in the ring
    [N, L, W]; 0 where there is none."""
    found = x.index_select(0, plan.rows).float()
    if ring is not None and plan.held is not None:
        places, slots = plan.held
        held = ring.flatten(0, 1).index_select(0, slots)
        found.index_copy_(0, places, held.view(-1, *x.shape[1:]).float())
    if plan.empty is not None:
        found.index_fill_(0, plan.empty, 0)
    return found.view(-1, STATE_TILE, *x.shape[1:]).transpose(1, 2)


def _decays(g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of log decays g [tiles, H, T]: what is left at row i of row j [..., T, T], 0 before it; at
    row i of what was before the tile, and at the end of row j [..., T] each."""
    # Of the tokens between two rows alone: differences of long sums would be less exact.
    between = g[..., None].expand(*g.shape, STATE_TILE).tril(-1).cumsum(-2)
    sums = g.cumsum(-1)[..., None, :]
    # One exp of a multiple of 32 numbers: elsewhere its bits may depend on the place.
    left = torch.cat([between, sums, sums], -2).exp_()
    return left[..., :STATE_TILE, :].tril(), left[..., STATE_TILE, :], left[..., STATE_TILE - 1, :]


def _normed(x: Tensor, eps: float | None) -> Tensor:
    return x if eps is None else x * torch.rsqrt((x * x).sum(-1, keepdim=True) + eps)


def _grouped(x: Tensor, heads: int) -> Tensor:
    """[tiles, Hk, ...] as [tiles, H, ...]: consecutive heads share one of x."""
    return x.repeat_interleave(heads // x.shape[1], 1)


def recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Tensor,
    states: LayerStates,
    metadata: AttentionMetadata,
    delta: bool,
    scale: float = 1.0,
    eps: float | None = None,
) -> Tensor:
    """What each row reads of the state of its sequence, which its own token has changed.

        S_t = exp(g_t) S_{t-1} + k_t u_t^T      u_t = beta_t v_t  (Mamba 2), or
                                                u_t = beta_t (v_t - exp(g_t) S_{t-1}^T k_t)  (delta)
        out_t = S_t^T q_t

    q, k [R, Hk, Dk], v [R, H, Dv], gates [R, H, 2] fp32: g, at most 0, and beta -> [R, H, Dv] fp32;
    consecutive heads share one of q and k. ``states`` of the layer, ``metadata.checkpoints`` which
    of them, and where rows before the segments lie. delta: which rule. eps: q and k are divided by
    their norms first, and q multiplied by ``scale``. Summed in fp32: by tiles of STATE_TILE tokens
    from position 0 on, whatever the segments are. Padding rows get 0.
    """
    plan = _plan(metadata, states.k.shape[1])
    heads = v.shape[1]
    out = torch.zeros(v.shape, dtype=torch.float32, device=v.device)
    if not plan.steps:
        return out
    keys = _padded(_normed(_tiled(k, states.k, plan), eps), 1)
    queries = _padded(_normed(_tiled(q, None, plan), eps) * scale, 1)
    values = _padded(_tiled(v, states.v, plan), 1)
    both = _tiled(gates, states.gates, plan)
    pairs, begin, end = _decays(both[..., 0])
    beta = both[..., 1:]

    def products(a: Tensor) -> Tensor:
        """[tiles, H, T, T] of rows of ``a`` with keys."""
        found = torch.bmm(a.flatten(0, 1), keys.flatten(0, 1).transpose(1, 2))
        return _grouped(found.view(*a.shape[:3], -1), heads) * pairs

    scores, updates, read = products(queries).flatten(0, 1), beta * values, None
    system = beta * products(keys) if delta else None
    keys = _grouped(keys, heads)
    if system is not None:
        right = torch.cat([updates, beta * begin[..., None] * keys], -1)
        solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        updates, read = solved.split([values.shape[-1], keys.shape[-1]], -1)
    queries = _grouped(queries, heads) * begin[..., None]
    keys = keys * end[..., None]
    total = begin[..., -1:, None]

    pool = states.state
    state = _padded(pool.index_select(0, plan.owners).masked_fill_(plan.new, 0), 2)
    parts = []
    for step in plan.steps:
        tiles = slice(step.first, step.first + step.segments)
        flat = slice(step.first * heads, (step.first + step.segments) * heads)
        if step.segments < len(state):
            state = state[: step.segments]
        before, own = state.flatten(0, 1), updates[tiles].flatten(0, 1)
        if read is not None:
            own = torch.baddbmm(own, read[tiles].flatten(0, 1), before, alpha=-1)
        now = torch.bmm(scores[flat], own)
        parts.append(now.baddbmm_(queries[tiles].flatten(0, 1), before))
        if (chosen := step.moved) is not None and not len(chosen):
            break  # no later tile
        own = own.view(step.segments, heads, *own.shape[1:])
        old, given, left = state, keys[tiles], total[tiles]
        if chosen is not None:
            old, own, given, left = (x.index_select(0, chosen) for x in (old, own, given, left))
        state = (old * left).flatten(0, 1)
        state.baddbmm_(given.flatten(0, 1).transpose(1, 2), own.flatten(0, 1))
        state = state.view(old.shape)
        if step.saved is not None:
            places, owners = step.saved
            kept = state.index_select(0, places)[..., : pool.shape[-2], : pool.shape[-1]]
            pool.index_copy_(0, owners, kept)
    found = torch.cat(parts).view(-1, heads, STATE_TILE, values.shape[-1]).transpose(1, 2)
    chosen = found.flatten(0, 1).index_select(0, plan.places)
    out[: len(chosen)] = chosen[..., : v.shape[-1]]
    return out


def keep_rows(ring: Tensor, rows: Tensor, slots: Tensor, metadata: AttentionMetadata) -> None:
    """Write rows [R, ...] to their places ``slots`` [R] int64 of a ring [N, L, W]; -1: nowhere."""
    chosen, places = written_rows(slots, metadata.derived)
    rows = rows.reshape(len(rows), -1)
    ring.flatten(0, 1).index_copy_(0, places, rows if chosen is None else rows[chosen])
