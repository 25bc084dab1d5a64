"""Twin of the recurrent layers: tiles of tokens in a few batched products, states one tile after
the other.

Every product has one shape whatever the pass: a tile of tokens of one head. So a row's numbers do
not depend on what else is computed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

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
    """Of a pass: rows [E] that lie in the elements of its tiles, E = tiles * T, 0 where none does;
    held: elements whose rows lie in rings, and their places there; empty: elements without a token.
    places [live]: elements of the rows. owners: of the segments; new [S, 1, 1, 1]: which have no
    state yet, None: all have one."""

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
    size, first, length = given.tile, metadata.cu_seqlens_q.long(), metadata.seq_lens.long()
    counts, at = first.diff(), given.at.long()
    tiles = torch.where(counts > 0, (length - at + size - 1) // size, 0)
    tiles, order = tiles.sort(descending=True, stable=True)
    live = int((tiles > 0).sum())
    tiles, order = tiles[:live], order[:live]
    columns = first[:-1], length, given.owners.long(), at, given.to.long(), counts
    first, length, owners, at, to, counts = (column[order] for column in columns)

    steps, numbered = [], 0
    for n in range(int(tiles[0]) if live else 0):
        many = int((tiles > n).sum())
        end = at[:many] + (n + 1) * size
        moved = ((tiles[:many] > n + 1) | (end <= to[:many])).nonzero().squeeze(-1)
        saved = (end[moved] == to[moved]).nonzero().squeeze(-1)
        kept = (saved, owners[moved[saved]]) if len(saved) else None
        steps.append(_Step(numbered, many, None if len(moved) == many else moved, kept))
        numbered += many

    def numbers(end: int) -> Tensor:
        return torch.arange(end, dtype=torch.int64, device=first.device)

    segment = torch.cat([numbers(step.segments) for step in steps] or [first])
    turns = [at[: step.segments] + n * size for n, step in enumerate(steps)]
    position = torch.cat(turns or [first])[:, None] + numbers(size)
    offset = position - (length - counts)[segment, None]
    rows = first[segment, None] + offset
    there, own = position < length[segment, None], offset >= 0
    own &= there
    elements = numbers(own.numel()).view(own.shape)
    places = numbers(int(own.sum())).index_copy_(0, rows[own], elements[own])
    ringed = there & ~own
    slots = (owners[segment, None] * ring + position % ring)[ringed]
    return _Plan(
        torch.where(own, rows, 0).flatten(),
        (elements[ringed], slots) if len(slots) else None,
        None if bool(there.all()) else elements[~there],
        places,
        owners,
        (at == 0)[:, None, None, None] if bool((at == 0).any()) else None,
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
    size = g.shape[-1]
    between = g[..., None].expand(*g.shape, size).tril(-1).cumsum(-2)
    sums = g.cumsum(-1)[..., None, :]
    # One exp of a multiple of 32 numbers: elsewhere its bits may depend on the place.
    left = torch.cat([between, sums, sums], -2).exp_()
    return left[..., :size, :].tril(), left[..., size, :], left[..., size - 1, :]


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
    their norms first, and q multiplied by ``scale``. Summed in fp32: by tiles of T tokens
    from position 0 on, whatever the segments are. Padding rows get 0.
    """
    assert metadata.checkpoints is not None
    size, plan, pool = metadata.checkpoints.tile, _plan(metadata, states.kv.shape[1]), states.state
    (rows, heads, dv), (key_heads, dk) = v.shape, k.shape[1:]
    if not plan.steps:
        return torch.zeros(v.shape, dtype=torch.float32, device=v.device)
    given = _tiled(torch.cat([x.flatten(1) for x in (q, k, v)], -1), states.kv, plan)
    keys, values = given.view(-1, size, given.shape[1]).split([2 * key_heads * dk, heads * dv], 2)
    keys = keys.unflatten(2, (2 * key_heads, dk))
    if eps is not None:
        keys = keys * torch.rsqrt((keys * keys).sum(-1, keepdim=True) + eps)
    # All in one layout: that of a view, as of one tile, may give other bits.
    queries, keys = (x.contiguous() for x in _padded(keys, 1).transpose(1, 2).chunk(2, 1))
    values = _padded(values.unflatten(2, (heads, dv)), 1).transpose(1, 2).contiguous()
    values = values.flatten(0, 1)
    both = _tiled(gates.flatten(1), states.gates, plan).view(-1, size, heads, 2)
    g, beta = both.permute(3, 0, 2, 1).contiguous()  # [tiles, H, T]
    pairs, begin, end = (x.flatten(0, 1) for x in _decays(g))
    beta, queries = beta.view(-1, 1, size), queries * scale

    def products(a: Tensor) -> Tensor:
        """[tiles * H, T, T] of rows of ``a`` with keys, as far as they have not decayed."""
        found = torch.bmm(a.flatten(0, 1), keys.flatten(0, 1).transpose(1, 2))
        return _grouped(found.view(*a.shape[:3], -1), heads) * pairs

    scores, own = products(queries), _grouped(keys, heads)
    if delta:
        system = beta.transpose(1, 2) * products(keys)
        one = torch.eye(size, dtype=torch.float32, device=v.device)
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
