"""Accept/truncate: the kernel against its twin, and both by cases. Integers only: all is exact."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.kernels.cases import DEVICE, ints
from tinyspec.kernels.accept import accept_truncate
from tinyspec.kernels.twins import sample as twin
from tinyspec.kernels.twins.sample import AcceptResult

PAGE_SIZE = 4


def run(
    requests: list[dict],
    stops: list[list[int]],
    width: int,
    page_size: int = PAGE_SIZE,
    accept: Callable[..., AcceptResult] = accept_truncate,
) -> list[Tensor]:
    def table(rows: list[list[int]], width: int) -> Tensor:
        rows = [row[:width] + [-1] * (width - len(row)) for row in rows]
        return torch.tensor(rows, dtype=torch.int64, device=DEVICE).view(len(rows), width)

    def column(name: str) -> Tensor:
        return ints([r[name] for r in requests])

    # Behind a request's drafts there may be anything: here what its targets are.
    drafts = [r["drafts"] + r["targets"][len(r["drafts"]) :] for r in requests]
    found = accept(
        table(drafts, width),
        table([r["targets"] for r in requests], width),
        column("num_rows"),
        ints([len(r["drafts"]) for r in requests]),
        column("start"),
        column("remaining"),
        table(stops, max(map(len, stops), default=0)),
        column("pages_held"),
        page_size,
    )
    return [field.cpu() for field in found]


def traces(seed: int, count: int, width: int, vocab: int) -> tuple[list[dict], list[list[int]]]:
    """Targets behind the rows that are verified are garbage."""
    rng = random.Random(seed)
    requests, stops = [], []
    for _ in range(count):
        num_drafts = rng.randint(0, width - 1)
        drafts = [rng.randrange(vocab) for _ in range(num_drafts)]
        targets = [d if rng.random() < 0.9 else rng.randrange(vocab) for d in drafts]
        counts = {"remaining": rng.choice([1, 2, width // 2 + 1, 1000])}
        counts |= {"num_rows": rng.randint(1, num_drafts + 1), "start": rng.randint(0, 40)}
        counts |= {"pages_held": rng.randint(1, 40)}
        requests.append({"drafts": drafts, "targets": [*targets, rng.randrange(vocab)], **counts})
        stops.append([rng.randrange(2 * vocab) for _ in range(rng.randint(0, 3))])
    return requests, stops


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("width, page_size", [(1, 16), (17, 128), (33, 1), (70, 16)])
def test_matches_reference(width, page_size):
    """Together, and each alone in wider tables: nothing but its own row counts."""
    requests, stops = traces(seed=width, count=25, width=width, vocab=6)
    found = run(requests, stops, width, page_size)
    expected = run(requests, stops, width, page_size, twin.accept_truncate)
    assert all(map(torch.equal, found, expected))
    for s in range(5):
        alone = run(requests[s : s + 1], stops[s : s + 1], width + 30, page_size)
        assert all(torch.equal(a[0], b[s]) for a, b in zip(alone, found, strict=True))
    assert all(field.shape == (0,) for field in run([], [], 4))


def one(drafts: list[int], targets: list[int], **changes: int) -> dict:
    defaults = {"num_rows": len(targets), "start": 10, "remaining": 100, "pages_held": 4}
    return {"drafts": drafts, "targets": targets} | defaults | changes


CASES = {
    "all agree, bonus": (one([1, 2, 3], [1, 2, 3, 4]), [], [4, 3, 0, 0, 0]),
    "mismatch": (one([1, 2, 3], [1, 9, 3, 4]), [], [2, 1, 0, 1, 0]),
    "first differs": (one([1, 2], [7, 2, 3]), [], [1, 0, 0, 1, 0]),
    "no draft": (one([], [5]), [], [1, 0, 0, 1, 0]),
    "partial verify": (one([1, 2, 3], [1, 2], num_rows=2), [], [2, 2, 1, 0, 0]),
    "stop accepted": (one([1, 2, 3], [1, 2, 3, 4]), [2, 9], [2, 2, 0, 1, 1]),
    "stop is the bonus": (one([1], [1, 8]), [8], [2, 1, 0, 1, 1]),
    "stop behind mismatch": (one([1, 2], [7, 2, 8]), [8], [1, 0, 0, 1, 0]),
    "out of tokens": (one([1, 2], [1, 2, 3], remaining=2), [], [2, 2, 0, 1, 1]),
    "padding is no stop": (one([1], [-1, 8]), [], [1, 0, 0, 1, 0]),
    "holds too few pages": (one([1], [1, 2], pages_held=1), [], [2, 1, 0, 0, 0]),
}


@pytest.mark.parametrize("accept", [accept_truncate, twin.accept_truncate], ids=["triton", "twin"])
def test_exact(accept):
    requests, stops, expected = map(list, zip(*CASES.values(), strict=True))
    found = run(requests, stops, 4, accept=accept)
    got = torch.stack(found, dim=1).tolist()
    assert dict(zip(CASES, got, strict=True)) == dict(zip(CASES, expected, strict=True))
    assert {field.dtype for field in found} == {torch.int32}
