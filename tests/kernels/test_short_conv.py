"""Short convolution over pages against fp64, and a row against itself in other passes: kernel and
twin."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels import cases
from tests.kernels.cases import DEVICE, normal
from tests.support.tolerances import assert_as_good_as_torch
from tinyspec.kernels import short_conv as kernels
from tinyspec.kernels.backend import AttentionMetadata
from tinyspec.kernels.twins import short_conv as twins

both = cases.both("module", kernels, twins)
LENGTHS = (1, 2, 13)


class Pages:
    """Sequences of ``LENGTHS`` rows on pages of ``size`` tokens, in no order, filled with NaN."""

    def __init__(
        self, module: ModuleType, dtype: torch.dtype, size: int, channels: int, reach: int
    ):
        self.device = "cpu" if module is twins else DEVICE
        self.module, self.size = module, size
        self.x = [normal(n, channels, seed=n).to(self.device, dtype) for n in LENGTHS]
        self.weight = normal(channels, reach, seed=5).to(self.device, dtype)
        self.bias = normal(channels, seed=6).to(self.device, dtype)
        counts = [-(-n // size) for n in LENGTHS]
        pages = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(size))
        self.tables = [part.tolist() for part in pages.split(counts)]
        shape = sum(counts), size, 1, channels
        self.pool = torch.full(shape, torch.nan, dtype=dtype, device=self.device)

    def run(self, parts: list[tuple[int, int, int]], padding: int = 0) -> list[Tensor]:
        """A pass of rows first to end of sequences (number, first, end): what each gets."""
        rows = [self.x[n][first:end] for n, first, end in parts]
        slots = [
            self.tables[n][at // self.size] * self.size + at % self.size
            for n, first, end in parts
            for at in range(first, end)
        ]
        spans, tables = [part[1:] for part in parts], [self.tables[n] for n, *_ in parts]
        metadata = AttentionMetadata.of(spans, tables, self.size, self.device)
        x = torch.cat([*rows, torch.ones_like(self.x[0]).expand(padding, -1)])
        mapping = torch.tensor([*slots, *[-1] * padding], device=self.device)
        given = self.weight, self.bias, self.pool, mapping, metadata
        out = self.module.short_conv(x, *given)
        assert out[len(slots) :].isfinite().all() and out.dtype == x.dtype
        return list(out[: len(slots)].split(list(map(len, rows))))


def whole(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Of all rows of a sequence, by torch."""
    behind = F.pad(x.T, (weight.shape[1] - 1, 0))[None]
    return F.conv1d(behind, weight[:, None], bias, groups=len(weight))[0].T


@both
@pytest.mark.parametrize("channels, reach", [(1, 1), (7, 3), (64, 4), (520, 3)])
@pytest.mark.parametrize("size", [1, 4, 16])
@pytest.mark.crossed(0.2)
def test_matches_reference(module, dtype, size, channels, reach):
    pages = Pages(module, dtype, size, channels, reach)
    found = pages.run([(n, 0, length) for n, length in enumerate(LENGTHS)], padding=3)
    for own, x in zip(found, pages.x, strict=True):
        wide = (t.double() for t in (x, pages.weight, pages.bias))
        rounded = (t.float() for t in (x, pages.weight, pages.bias))
        assert_as_good_as_torch(own, whole(*rounded).to(dtype), whole(*wide))


@both
@pytest.mark.crossed(7)
@pytest.mark.parametrize("size", [1, 16])
def test_a_row_anywhere(module, dtype, size):
    """Token by token, in chunks of all sizes, behind other sequences, on other pages, computed
    twice (drafts that were wrong): the same bits. Control: without the pages before it, others."""
    expected = Pages(module, dtype, 8, 20, 4).run([(n, 0, e) for n, e in enumerate(LENGTHS)])
    for chunk in (1, 3, 5):
        pages = Pages(module, dtype, size, 20, 4)
        found: list[list[Tensor]] = [[] for _ in LENGTHS]
        for first in range(0, max(LENGTHS), chunk):
            parts = [
                (n, first, min(first + chunk, length))
                for n, length in enumerate(LENGTHS)
                if first < length
            ]
            if chunk == 5:  # once with wrong numbers, which the next pass writes over
                right, pages.x = pages.x, [-x for x in pages.x]
                pages.run(parts)
                pages.x = right
            for (n, *_), rows in zip(parts, pages.run(parts[::-1], padding=2)[::-1], strict=True):
                found[n].append(rows)
        assert all(map(torch.equal, map(torch.cat, found), expected)), chunk
    pages = Pages(module, dtype, size, 20, 4)
    pages.pool.zero_()
    assert not torch.equal(pages.run([(2, 5, 13)])[0], expected[2][5:])


@both
def test_rows_that_are_not_written(module, dtype):
    """What is in their slots stays, and is what later rows see."""
    pages = Pages(module, dtype, 4, 8, 3)
    pages.run([(2, 0, 13)])
    before = pages.pool.clone()
    metadata = AttentionMetadata.of([(10, 12)], [pages.tables[2]], 4, pages.device)
    slots = torch.full((2,), -1, device=pages.device)
    given = pages.weight, None, pages.pool, slots, metadata
    out = module.short_conv(pages.x[2][10:12], *given)
    assert torch.equal(pages.pool.nan_to_num(), before.nan_to_num())
    expected = pages.run([(2, 0, 13)])[0][10:12] - pages.bias
    torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-2)
