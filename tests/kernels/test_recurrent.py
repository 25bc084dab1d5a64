"""Recurrent layers against a recurrence in fp64, and a row against itself in other passes: kernel
and twin."""

from __future__ import annotations

from itertools import pairwise
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.kernels import cases
from tests.kernels.cases import DEVICE, normal
from tests.support.recurrence import scanned
from tests.support.tolerances import assert_as_good_as_torch
from tinyspec.config import STATE_TILE
from tinyspec.kernels import recurrent as kernels
from tinyspec.kernels.backend import AttentionMetadata, Checkpoints, LayerStates
from tinyspec.kernels.twins import recurrent as twins

both = cases.both("module", kernels, twins)
RING = 48
DELTA = {"delta": True, "scale": 0.3, "eps": 1e-6}
RULES = pytest.mark.parametrize("rule", [DELTA, {"delta": False}], ids=["delta", "mamba 2"])
# Heads of keys and of values, and their sizes; the last as no model has them.
SHAPES = ((2, 4, 16, 16), (1, 2, 32, 24), (1, 3, 5, 7))


class Part(NamedTuple):
    """Rows ``first`` to ``end`` of sequence ``number``, of which those before ``final`` stay."""

    number: int
    first: int
    end: int
    final: int


class Sequences:
    """Of ``lengths`` tokens that are remembered, with states and rings full of NaN."""

    def __init__(self, module: ModuleType, dtype: torch.dtype, shape: tuple, lengths: tuple):
        device = "cpu" if module is twins else DEVICE
        self.module, self.lengths, self.device = module, lengths, device
        self.key_heads, self.heads, dk, dv = shape
        sizes = ((self.key_heads, dk), (self.key_heads, dk), (self.heads, dv))

        def rows(n: int, number: int) -> list[Tensor]:
            made = [normal(n, *size, seed=9 * number + i) for i, size in enumerate(sizes)]
            gates = torch.stack([normal(n, self.heads, seed=number + i) for i in (50, 80)], -1)
            gates = torch.stack([-0.1 * gates[..., 0].abs(), gates[..., 1].sigmoid()], -1)
            return [*(x.to(device, dtype) for x in made), gates.to(device)]

        self.rows = [rows(n, number) for number, n in enumerate(lengths)]
        count = len(lengths)
        widths = (1, self.key_heads * dk + self.heads * dv)
        rings = [torch.full((count, RING, w), torch.nan, dtype=dtype) for w in widths]
        rings.append(torch.full((count, RING, 2 * self.heads), torch.nan))
        rings.append(torch.full((count, self.heads, dk, dv), torch.nan))
        self.states = LayerStates(*(ring.to(device) for ring in rings))
        self.at = [0] * count

    def run(self, parts: list[Part], rule: dict, padding: int = 0) -> list[Tensor]:
        """A pass: what each part gets."""
        given = [[x[p.first : p.end] for x in self.rows[p.number]] for p in parts]
        q, k, v, gates = (
            torch.cat([*own, torch.ones_like(own[0][:1]).expand(padding, *own[0].shape[1:])])
            for own in zip(*given, strict=True)
        )
        spans = [(p.first, p.end) for p in parts]
        metadata = AttentionMetadata.of(spans, [[0]] * len(parts), 128, self.device)
        at = [self.at[p.number] for p in parts]
        to = [max(self.at[p.number], p.final // STATE_TILE * STATE_TILE) for p in parts]
        slots = [
            p.number * RING + n % RING if n >= p.end - RING else -1
            for p in parts
            for n in range(p.first, p.end)
        ]
        numbers = [
            torch.tensor(x, dtype=torch.int32, device=self.device)
            for x in ([p.number for p in parts], at, to)
        ]
        places = torch.tensor([*slots, *[-1] * padding], device=self.device)
        metadata.checkpoints = Checkpoints(*numbers, places, STATE_TILE)
        out = self.module.recurrent(q, k, v, gates, self.states, metadata, **rule)
        for p, moved in zip(parts, to, strict=True):
            self.at[p.number] = moved
        assert out.dtype == torch.float32 and not out[len(slots) :].any()
        return list(out[: len(slots)].split([p.end - p.first for p in parts]))

    def whole(self, rule: dict) -> list[Tensor]:
        """All of them in one pass."""
        return self.run([Part(n, 0, e, e) for n, e in enumerate(self.lengths)], rule)

    def exact(self, number: int, rule: dict, dtype: torch.dtype) -> Tensor:
        """Token by token, in another dtype."""
        q, k, v, gates = (x.to(dtype) for x in self.rows[number])
        if "eps" in rule:
            q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + rule["eps"]) for x in (q, k))
        q = q * rule.get("scale", 1.0)
        return scanned(q, k, v, *gates.unbind(-1), rule["delta"])


@both
@RULES
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.crossed(1)
def test_matches_reference(module, dtype, rule, shape):
    made = Sequences(module, dtype, shape, (1, 40))
    parts = [Part(n, 0, end, end) for n, end in enumerate(made.lengths)]
    for n, own in enumerate(made.run(parts, rule, padding=3)):
        of_32, of_64 = (made.exact(n, rule, kind) for kind in (torch.float32, torch.float64))
        assert_as_good_as_torch(own, of_32, of_64)


def chunks(made: Sequences, size: int) -> list[list[Part]]:
    return [
        [
            Part(n, first, min(first + size, end), min(first + size, end))
            for n, end in enumerate(made.lengths)
            if first < end
        ]
        for first in range(0, max(made.lengths), size)
    ]


@both
@RULES
@pytest.mark.parametrize("size", [1, 5, 17, 32])
@pytest.mark.crossed(2)
def test_a_row_anywhere(module, dtype, rule, size):
    """Token by token, in chunks, in another order, and after others that did not stay (drafts that
    were wrong): the same bits. Control: with an empty state, others."""
    quick = module is kernels  # interpreted
    lengths = (2, 35) if quick else (1, 16, 37, 75, 100)
    shape = (1, 2, 16, 16) if quick else SHAPES[1]
    expected = Sequences(module, dtype, shape, lengths).whole(rule)
    made = Sequences(module, dtype, shape, lengths)
    found: list[list[Tensor]] = [[] for _ in lengths]
    for parts in chunks(made, size):
        if size == 5:  # once with wrong numbers, of which nothing stays
            right, made.rows = made.rows, [[-x for x in rows[:3]] + rows[3:] for rows in made.rows]
            made.run([p._replace(final=p.first) for p in parts], rule)
            made.rows = right
        rows = made.run(parts[::-1], rule, padding=2)[::-1]
        for part, own in zip(parts, rows, strict=True):
            found[part.number].append(own)
    assert all(map(torch.equal, map(torch.cat, found), expected))
    last = len(lengths) - 1
    made.states.state.zero_()
    again = Part(last, lengths[last] - 1, lengths[last], 0)
    assert not torch.equal(made.run([again], rule)[0], expected[last][-1:])


@RULES
@pytest.mark.parametrize("shape", [*SHAPES, (16, 32, 128, 128), (3, 6, 96, 192)], ids=str)
def test_the_twin_in_any_crowd(rule, shape):
    """Batched products: as many as there are sequences and heads."""
    lengths = tuple(1 + 37 * n % 90 for n in range(12))
    expected = Sequences(twins, torch.float32, shape, lengths).whole(rule)
    alone = Sequences(twins, torch.float32, shape, lengths)
    for n, end in enumerate(lengths):
        assert torch.equal(alone.run([Part(n, 0, end, end)], rule)[0], expected[n])


@both
def test_a_chunk_as_long_as_the_ring(module, dtype):
    """Rows that are kept have the places of those that the same pass reads."""
    lengths = (10 + RING + 5,)
    (expected,) = Sequences(module, dtype, SHAPES[0], lengths).whole(DELTA)
    made = Sequences(module, dtype, SHAPES[0], lengths)
    cuts = (0, 10, 10 + RING, lengths[0])
    found = [made.run([Part(0, first, end, end)], DELTA)[0] for first, end in pairwise(cuts)]
    assert torch.equal(torch.cat(found), expected)


def test_decays_make_no_denormals():
    """Products with numbers below fp32's least normal one take a CPU some eight times as long."""
    g = torch.full((2, 3, STATE_TILE), -30.0)
    above = twins._matrices(STATE_TILE)[1]
    least = torch.finfo(torch.float32).tiny

    def denormal(x: Tensor) -> Tensor:
        return (x != 0) & (x.abs() < least)

    assert denormal(g.cumsum(-1).exp()).any(), "control"
    pairs, begin, end = twins._decays(g, above)
    assert not any(denormal(x).any() for x in (pairs, begin, end))
    assert torch.equal(pairs.diagonal(dim1=-2, dim2=-1), torch.ones(2, 3, STATE_TILE))
    assert torch.equal(begin[..., 0, 0], g[..., 0].exp()) and torch.equal(
        end[..., -1], pairs[..., -1, -1]
    )
    assert (begin[..., -1, 0] == 0).all() and (end[..., 0] == 0).all()
