"""Twin of the recurrent layers: tiles of tokens in a few batched products, states one tile after
the other.

Every product has one shape whatever the pass: a tile of tokens of one head. So a row's numbers do
not depend on what else is computed.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tinyspec.kernels.backend import AttentionMetadata, LayerStates
from tinyspec.kernels.twins.attention_plan import as_slice, integers
from tinyspec.kernels.twins.layers import write_rows

# Numbers of fp32 in a line of cache; what is left of a row, if less, is nothing: numbers with fewer
# bits than fp32 has (denormals), which it would make, make a product last eight times as long.
LINE, LEAST = 16, 2.0**-100


class _Step(NamedTuple):
    """The n-th tiles of the first ``segments`` (of falling length), from tile ``first`` on. read:
    whether rows of the pass lie in any. moved: which of them have more, or move their state by it;
    None: all. saved: places among those, None: all, and whose states they are."""

    first: int
    segments: int
    read: bool
    moved: Tensor | None
    saved: tuple[Tensor | None, Tensor | slice] | None


class _Plan(NamedTuple):
    """Of a pass: rows [E] that lie in the elements of its tiles, E = tiles * T, 0 where none does;
    ringed [E]: where in rings all rows are once the pass's own are kept there (some row of the
    sequence for an element without a token); None: they do not fit. held: then elements whose rows
    lie in rings, and their places there; empty: elements without a token. places [live]: elements
    of the rows. owners: of the segments, as a slice where they follow each other; new [S, 1, 1, 1]:
    which have no state yet, None: all have one. one, above: matrices. moves: whether any state is
    moved."""

    rows: Tensor
    ringed: Tensor | None
    held: tuple[Tensor, Tensor] | None
    empty: Tensor | None
    places: Tensor
    owners: Tensor | slice
    new: Tensor | None
    one: Tensor
    above: tuple[Tensor, Tensor]
    steps: list[_Step]
    moves: bool


class _Segment(NamedTuple):
    """Rows ``row`` to ``end`` - 1; the rest as in ``AttentionMetadata`` and ``Checkpoints``."""

    row: int
    end: int
    length: int
    owner: int
    at: int
    to: int


@cache
@torch.inference_mode(False)  # autograd may see them, too
def _matrices(size: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """The unit matrix [T, T], and what is above the diagonal of [T, T + 1 or more] and [T, T]."""
    # One exp of a multiple of 32 numbers: elsewhere its bits may depend on the place.
    wide = size + 1 + -(size + 1) % (32 // min(size, 32))
    above = torch.ones((size, wide), dtype=torch.bool, device="cpu").triu(1)
    return torch.eye(size, dtype=torch.float32, device="cpu"), (above, above[:, :size])


def _plan(metadata: AttentionMetadata, ring: int) -> _Plan:
    """Once per pass."""
    if (key := ("recurrent", ring)) in metadata.derived:
        return metadata.derived[key]
    given = metadata.checkpoints
    assert given is not None
    ends, size = metadata.cu_seqlens_q, given.tile
    columns = ends[:-1], ends[1:], metadata.seq_lens, given.owners, given.at, given.to
    found = [_Segment(*one) for one in zip(*(column.tolist() for column in columns), strict=True)]
    segments = sorted((s for s in found if s.end > s.row), key=lambda s: (s.at - s.length) // size)
    steps, turns = list[_Step](), list[tuple[int, ...]]()
    while now := [s for s in segments if s.length - s.at > len(steps) * size]:
        tokens = (len(steps) + 1) * size
        moved = [k for k, s in enumerate(now) if s.at + tokens <= max(s.to, s.length - 1)]
        saved = [place for place, k in enumerate(moved) if now[k].at + tokens == now[k].to]
        whose = as_slice([now[moved[place]].owner for place in saved])
        kept = (None if len(saved) == len(moved) else integers(saved), whose) if saved else None
        chosen = None if len(moved) == len(now) else integers(moved)
        read = any(s.at + tokens > s.length - (s.end - s.row) for s in now)
        steps.append(_Step(len(turns), len(now), read, chosen, kept))
        turns += [
            (s.at + tokens - size, s.end - s.length, s.length - s.end + s.row, s.length, s.owner)
            for s in now
        ]
    tiles = torch.tensor(turns, dtype=torch.int64, device="cpu").view(-1, 5, 1)
    begin, shift, start, length, owner = tiles.unbind(1)
    position = begin + torch.arange(size, dtype=torch.int64, device="cpu")
    there, own = position < length, position >= start
    own &= there
    rows, elements = position + shift, own.flatten().nonzero().squeeze(-1)
    places = torch.empty_like(elements).index_copy_(0, rows.flatten()[elements], elements)
    slots = owner * ring + torch.minimum(position, length - 1) % ring
    fit, at = all(s.length - s.at <= ring for s in segments), [s.at for s in segments]
    before = None if fit else (there & ~own).flatten().nonzero().squeeze(-1)
    new = torch.tensor(at, dtype=torch.int64, device="cpu")[:, None, None, None] == 0
    plan = metadata.derived[key] = _Plan(
        torch.where(own, rows, 0).flatten(),
        slots.flatten() if fit else None,
        None if before is None or not len(before) else (before, slots.flatten()[before]),
        None if bool(there.all()) else (~there).flatten().nonzero().squeeze(-1),
        places,
        as_slice([s.owner for s in segments]),
        None if all(at) else new,
        *_matrices(size),
        steps,
        bool(steps) and (steps[0].moved is None or len(steps[0].moved) > 0),
    )
    return plan


def _padded(x: Tensor, dims: int) -> Tensor:
    """With zeros up to multiples of a cache line of fp32 in the last dimensions: a product's bits
    may depend on where its matrices begin."""
    wanted = [-size % LINE for size in reversed(x.shape[-dims:])]
    return F.pad(x, [n for count in wanted for n in (0, count)]) if any(wanted) else x


def _tiled(rows: Tensor, ring: Tensor, plan: _Plan, metadata: AttentionMetadata) -> Tensor:
    """[E, W] fp32 of rows [R, W], and of those in the ring [N, L, W], where the rows are kept; any
    finite numbers where there is none."""
    assert metadata.checkpoints is not None
    slots = metadata.checkpoints.slots
    if plan.ringed is not None:
        keep_rows(ring, rows, slots, metadata)
        return ring.flatten(0, 1).index_select(0, plan.ringed).float()
    found = rows.index_select(0, plan.rows)
    if plan.held is not None:
        places, there = plan.held
        found.index_copy_(0, places, ring.flatten(0, 1).index_select(0, there))
    keep_rows(ring, rows, slots, metadata)  # where some that were read may have been
    return found.float()


def _decays(g: Tensor, above: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Of log decays g [tiles, H, T]: what is left at row i of row j [..., T, T], 0 before it; at
    row i of what was before the tile [..., T, 1], and at the end of row j [..., T]."""
    size = g.shape[-1]
    # Of the tokens since a row alone, in column 0 of all: differences of long sums would be less
    # exact.
    logs = torch.where(above[0], 0.0, g[..., None]).cumsum(-2)
    left = torch.threshold_(logs.exp_(), LEAST, 0.0)
    # ``tril`` would wake threads for the smallest matrices.
    after = left[..., 1 : size + 1].masked_fill_(above[1], 0)
    return after, left[..., :1], after[..., -1, :]


def _scaled(x: Tensor, by: Tensor) -> Tensor:
    """[tiles * H, m, T, n] of x [tiles, Hk, m, T, n] times [tiles, H, T, n or 1]: consecutive heads
    share one of x."""
    tiles, key_heads, *rest = x.shape
    found: Tensor = x[:, :, None] * by.view(tiles, key_heads, -1, 1, *by.shape[2:])
    return found.view(-1, *rest)


def _cut(x: Tensor, part: slice) -> Tensor:
    """x[part]; nothing is done where that is all of x."""
    return x if len(x) == part.stop - (part.start or 0) else x[part]


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
    their norms first, and q multiplied by ``scale``. Summed in fp32: by tiles of T tokens
    from position 0 on, whatever the segments are. Padding rows get 0. Rows with a place in the
    rings are kept there.
    """
    assert metadata.checkpoints is not None
    size, plan, pool = metadata.checkpoints.tile, _plan(metadata, states.kv.shape[1]), states.state
    (rows, heads, dv), (key_heads, dk) = v.shape, k.shape[1:]
    if not plan.steps:
        return torch.zeros(v.shape, dtype=torch.float32, device=v.device)
    rows_kv = torch.cat([k.flatten(1), v.flatten(1)], -1)
    kv = _tiled(rows_kv, states.kv, plan, metadata).split([key_heads * dk, heads * dv], 1)
    queries = q.flatten(1).index_select(0, plan.rows).float()
    rows_qk = torch.cat([queries, kv[0]], 1).view(-1, size, 2, key_heads, dk)
    if eps is not None:
        rows_qk = rows_qk * torch.rsqrt((rows_qk * rows_qk).sum(-1, keepdim=True) + eps)
    # All in one layout: that of a view, as of one tile, may give other bits.
    queries = _padded(rows_qk, 1).permute(0, 3, 2, 1, 4).contiguous()  # [tiles, Hk, 2, T, n]
    keys, queries = queries[:, :, 1], queries if delta else queries[:, :, :1]
    values = _padded(kv[1].view(-1, size, heads, dv), 1).transpose(1, 2).contiguous().flatten(0, 1)
    both = _tiled(gates.flatten(1), states.gates, plan, metadata)
    if plan.empty is not None:  # so nothing is added
        both.index_fill_(0, plan.empty, 0)
    both = both.view(-1, size, heads, 2)
    g, beta = both.permute(3, 0, 2, 1).contiguous()  # [tiles, H, T]
    pairs, begin, end = _decays(g, plan.above)
    beta = beta.view(-1, 1, size)
    flat = queries.view(-1, queries.shape[2] * size, queries.shape[4])
    products = torch.bmm(flat, keys.flatten(0, 1).transpose(1, 2)).view(*queries.shape[:4], size)
    scores, *within = _scaled(products, pairs).unbind(1)
    queries, *before = _scaled(queries, begin).unbind(1)
    left = begin.flatten(0, 1)[:, -1:]
    if delta:
        system = beta.transpose(1, 2) * within[0]
        solved = torch.linalg.solve_triangular(system, plan.one, upper=False, unitriangular=True)
        solved *= beta
        updates = torch.bmm(solved, values)
        read = F.hardshrink(torch.bmm(solved, before[0]), LEAST)
    else:
        updates = beta.transpose(1, 2) * values
    own = _scaled(keys[:, :, None], end[..., None])[:, 0] if plan.moves else queries

    state = pool[plan.owners].contiguous()
    if plan.new is not None:
        state = state.masked_fill(plan.new, 0)
    state, parts = _padded(state, 2).flatten(0, 1), []
    for step in plan.steps:
        tiles = slice(step.first * heads, (step.first + step.segments) * heads)
        state, update = _cut(state, slice(step.segments * heads)), _cut(updates, tiles)
        if delta:
            update.baddbmm_(_cut(read, tiles), state, alpha=-1)
        part = update  # of whatever numbers, where nobody reads them
        if step.read:
            part = torch.bmm(_cut(scores, tiles), update)
            part.baddbmm_(_cut(queries, tiles), state, beta=scale, alpha=scale)
        parts.append(part)
        if (chosen := step.moved) is not None and not len(chosen):
            break  # no later tile
        moved = [_cut(own, tiles), update, _cut(left, tiles), state]
        if chosen is not None:
            wide = (x.unflatten(0, (-1, heads)).index_select(0, chosen) for x in moved)
            moved = [x.flatten(0, 1) for x in wide]
        state = (moved[3] * moved[2]).baddbmm_(moved[0].transpose(1, 2), moved[1])
        if step.saved is not None:
            places, owners = step.saved
            kept = state.unflatten(0, (-1, heads))
            kept = kept if places is None else kept.index_select(0, places)
            pool[owners] = kept[..., :dk, :dv]
    found = torch.cat(parts) if len(parts) > 1 else parts[0]
    found = found.unflatten(0, (-1, heads)).transpose(1, 2).flatten(0, 1)[..., :dv]
    if len(plan.places) == rows:
        return found.index_select(0, plan.places)
    out = torch.zeros(v.shape, dtype=torch.float32, device=v.device)
    out[: len(plan.places)] = found.index_select(0, plan.places)
    return out


def keep_rows(ring: Tensor, rows: Tensor, slots: Tensor, metadata: AttentionMetadata) -> None:
    """Write rows [R, W] to their places ``slots`` [R] int64 of a ring [N, L, W]; -1: nowhere."""
    write_rows(ring.flatten(0, 1), rows, slots, metadata.derived)
