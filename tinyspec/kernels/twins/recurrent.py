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
    new: Tensor | None
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
        torch.from_numpy(at == 0)[:, None, None, None] if (at == 0).any() else None,
        steps,
    )


def _padded(x: Tensor, dims: int) -> Tensor:
    """With zeros up to multiples of a cache line of fp32 in the last dimensions: a product's bits
    may depend on where its matrices begin."""
    wanted = [-size % LINE for size in reversed(x.shape[-dims:])]
    return F.pad(x, [n for count in wanted for n in (0, count)]) if any(wanted) else x


def _tiled(rows: Tensor, ring: Tensor, plan: _Plan) -> Tensor:
    """[E, W] fp32 of rows [R, W]; the last columns of those that lie in the ring [N, L, w] are from
    there; 0 where there is none."""
    found = rows.index_select(0, plan.rows).float()
    if plan.held is not None:
        places, slots = plan.held
        held = ring.flatten(0, 1).index_select(0, slots).float()
        found[:, found.shape[1] - held.shape[1] :].index_copy_(0, places, held)
    return found if plan.empty is None else found.index_fill_(0, plan.empty, 0)


def _decays(g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of log decays g [tiles, H, T]: what is left at row i of row j [..., T, T], 0 before it; at
    row i of what was before the tile, and at the end of row j [..., T] each."""
    # Of the tokens between two rows alone: differences of long sums would be less exact.
    between = g[..., None].expand(*g.shape, STATE_TILE).tril(-1).cumsum(-2)
    sums = g.cumsum(-1)[..., None, :]
    # One exp of a multiple of 32 numbers: elsewhere its bits may depend on the place.
    left = torch.cat([between, sums, sums], -2).exp_()
    return left[..., :STATE_TILE, :].tril(), left[..., STATE_TILE, :], left[..., STATE_TILE - 1, :]


def _grouped(x: Tensor, heads: int) -> Tensor:
    """[tiles, Hk, T, n] as [tiles * H, T, n]: consecutive heads share one of x."""
    wide = x[:, :, None].expand(*x.shape[:2], heads // x.shape[1], *x.shape[2:])
    return wide.reshape(-1, *x.shape[2:])


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
    plan, pool = _plan(metadata, states.kv.shape[1]), states.state
    (rows, heads, dv), (key_heads, dk) = v.shape, k.shape[1:]
    if not plan.steps:
        return torch.zeros(v.shape, dtype=torch.float32, device=v.device)
    given = _tiled(torch.cat([x.flatten(1) for x in (q, k, v)], -1), states.kv, plan)
    keys, values = given.view(-1, STATE_TILE, given.shape[1]).split(
        [2 * key_heads * dk, heads * dv], 2
    )
    keys = keys.unflatten(2, (2 * key_heads, dk))
    if eps is not None:
        keys = keys * torch.rsqrt((keys * keys).sum(-1, keepdim=True) + eps)
    # All in one layout: that of a view, as of one tile, may give other bits.
    queries, keys = (x.contiguous() for x in _padded(keys, 1).transpose(1, 2).chunk(2, 1))
    values = _padded(values.unflatten(2, (heads, dv)), 1).transpose(1, 2).contiguous()
    values = values.flatten(0, 1)
    both = _tiled(gates.flatten(1), states.gates, plan).view(-1, STATE_TILE, heads, 2)
    g, beta = both.permute(3, 0, 2, 1).contiguous()  # [tiles, H, T]
    pairs, begin, end = (x.flatten(0, 1) for x in _decays(g))
    beta, queries = beta.view(-1, 1, STATE_TILE), queries * scale

    def products(a: Tensor) -> Tensor:
        """[tiles * H, T, T] of rows of ``a`` with keys, as far as they have not decayed."""
        found = torch.bmm(a.flatten(0, 1), keys.flatten(0, 1).transpose(1, 2))
        return _grouped(found.view(*a.shape[:3], -1), heads) * pairs

    scores, own = products(queries), _grouped(keys, heads)
    if delta:
        system, one = beta.transpose(1, 2) * products(keys), torch.eye(STATE_TILE)
        solved = torch.linalg.solve_triangular(system, one, upper=False, unitriangular=True)
        solved *= beta
        updates, read = torch.bmm(solved, values), torch.bmm(solved * begin[:, None], own)
    else:
        updates = beta.transpose(1, 2) * values
    queries = _grouped(queries, heads) * begin[..., None]
    own = own * end[..., None]
    left = begin[:, -1:, None]

    state = pool.index_select(0, plan.owners)
    if plan.new is not None:
        state.masked_fill_(plan.new, 0)
    state, parts = _padded(state, 2).flatten(0, 1), []
    for step in plan.steps:
        tiles = slice(step.first * heads, (step.first + step.segments) * heads)
        state, update = state[: step.segments * heads], updates[tiles]
        if delta:
            update = torch.baddbmm(update, read[tiles], state, alpha=-1)
        parts.append(torch.bmm(scores[tiles], update).baddbmm_(queries[tiles], state))
        moved = [own[tiles], update, left[tiles], state]
        if (chosen := step.moved) is not None:
            if not len(chosen):
                break  # no later tile
            wide = (x.unflatten(0, (-1, heads)).index_select(0, chosen) for x in moved)
            moved = [x.flatten(0, 1) for x in wide]
        state = (moved[3] * moved[2]).baddbmm_(moved[0].transpose(1, 2), moved[1])
        if step.saved is not None:
            places, owners = step.saved
            kept = state.unflatten(0, (-1, heads)).index_select(0, places)
            pool.index_copy_(0, owners, kept[..., :dk, :dv])
    found = torch.cat(parts) if len(parts) > 1 else parts[0]
    found = found.unflatten(0, (-1, heads)).transpose(1, 2).flatten(0, 1)[..., :dv]
    if len(plan.places) == rows:
        return found.index_select(0, plan.places)
    out = torch.zeros(v.shape, dtype=torch.float32, device=v.device)
    out[: len(plan.places)] = found.index_select(0, plan.places)
    return out


def keep_rows(ring: Tensor, rows: Tensor, slots: Tensor, metadata: AttentionMetadata) -> None:
    """Write rows [R, ...] to their places ``slots`` [R] int64 of a ring [N, L, W]; -1: nowhere."""
    chosen, places = written_rows(slots, metadata.derived)
    rows = rows.reshape(len(rows), -1)
    ring.flatten(0, 1).index_copy_(0, places, rows if chosen is None else rows[chosen])
