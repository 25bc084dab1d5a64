"""Accept/truncate against the rules written as a loop over tokens. Integers only: all is exact."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from tests.kernels.cases import DEVICE, ints
from tinyspec.kernels.accept import accept_truncate
from tinyspec.kernels.twins.sample import AcceptResult

PAGE_SIZE = 4


def commit(request: dict, stops: list[int], page_size: int) -> tuple[int | bool, ...]:
    """One request, token by token."""
    drafts, targets = request["drafts"], request["targets"]
    committed = accepted = 0
    stopped = mismatch = False
    for place in range(request["num_rows"]):
        token = targets[place]
        agrees = place < len(drafts) and drafts[place] == token
        committed += 1
        accepted += agrees
        mismatch = not agrees
        stopped = (token in stops and token >= 0) or committed == request["remaining"]
        if mismatch or stopped:
            break
    left = 0 if mismatch or stopped else len(drafts) - committed
    length = request["start"] + committed
    pages = -(-(length + left) // page_size)
    free = max(0, request["pages_held"] - pages)
    return committed, accepted, left, free, int(stopped)


def run(requests: list[dict], stops: list[list[int]], width: int, page_size: int) -> AcceptResult:
    def table(name: str) -> Tensor:
        rows = [r[name][:width] + [-1] * (width - len(r[name])) for r in requests]
        return torch.tensor(rows, dtype=torch.int64, device=DEVICE).view(len(requests), width)

    def column(name: str) -> Tensor:
        return ints([r[name] for r in requests])

    most = max((len(row) for row in stops), default=0)
    padded = [row + [-1] * (most - len(row)) for row in stops]
    stop_ids = torch.tensor(padded, dtype=torch.int64, device=DEVICE).view(len(requests), most)
    return accept_truncate(
        table("drafts"),
        table("targets"),
        column("num_rows"),
        ints([len(r["drafts"]) for r in requests]),
        column("start"),
        column("remaining"),
        stop_ids,
        column("pages_held"),
        page_size,
    )


def traces(seed: int, count: int, width: int, vocab: int) -> tuple[list[dict], list[list[int]]]:
    rng = random.Random(seed)
    requests, stops = [], []
    for _ in range(count):
        num_drafts = rng.randint(0, width - 1)
        drafts = [rng.randrange(vocab) for _ in range(num_drafts)]
        targets = [d if rng.random() < 0.9 else rng.randrange(vocab) for d in drafts]
        start = rng.randint(0, 40)
        requests.append(
            {
                "drafts": drafts,
                "targets": [*targets, rng.randrange(vocab)],
                "num_rows": rng.randint(1, num_drafts + 1),
                "start": start,
                "remaining": rng.choice([1, 2, width // 2 + 1, 1000]),
                "pages_held": rng.randint(1, 40),
            }
        )
        stops.append([rng.randrange(2 * vocab) for _ in range(rng.randint(0, 3))])
    return requests, stops


def expect(
    result: AcceptResult, requests: list[dict], stops: list[list[int]], page_size: int
) -> None:
    got = list(zip(*(field.tolist() for field in result), strict=True))
    assert got == [commit(r, s, page_size) for r, s in zip(requests, stops, strict=True)]


@pytest.mark.parametrize("page_size", [1, 16, 128])
@pytest.mark.parametrize("width", [1, 2, 17, 33, 70])
def test_matches_reference(width: int, page_size: int) -> None:
    requests, stops = traces(seed=width, count=25, width=width, vocab=6)
    expect(run(requests, stops, width, page_size), requests, stops, page_size)


def test_matches_reference_without_requests() -> None:
    assert all(field.shape == (0,) for field in run([], [], 4, PAGE_SIZE))


def one(drafts: list[int], targets: list[int], **changes: int) -> dict:
    defaults = {"num_rows": len(targets), "start": 10, "remaining": 100, "pages_held": 4}
    return {"drafts": drafts, "targets": targets} | defaults | changes


def test_exact() -> None:
    cases = {
        "all agree, bonus": (one([1, 2, 3], [1, 2, 3, 4]), [], (4, 3, 0, 0, 0)),
        "mismatch": (one([1, 2, 3], [1, 9, 3, 4]), [], (2, 1, 0, 1, 0)),
        "first differs": (one([1, 2], [7, 2, 3]), [], (1, 0, 0, 1, 0)),
        "no draft": (one([], [5]), [], (1, 0, 0, 1, 0)),
        "partial verify": (one([1, 2, 3], [1, 2], num_rows=2), [], (2, 2, 1, 0, 0)),
        "stop accepted": (one([1, 2, 3], [1, 2, 3, 4]), [2, 9], (2, 2, 0, 1, 1)),
        "stop is the bonus": (one([1], [1, 8]), [8], (2, 1, 0, 1, 1)),
        "stop behind mismatch": (one([1, 2], [7, 2, 8]), [8], (1, 0, 0, 1, 0)),
        "out of tokens": (one([1, 2], [1, 2, 3], remaining=2), [], (2, 2, 0, 1, 1)),
        "padding is no stop": (one([1], [-1, 8]), [], (1, 0, 0, 1, 0)),
        "holds too few pages": (one([1], [1, 2], pages_held=1), [], (2, 1, 0, 0, 0)),
    }
    requests = [request for request, _, _ in cases.values()]
    stops = [stops for _, stops, _ in cases.values()]
    result = run(requests, stops, 4, PAGE_SIZE)
    got = zip(*(field.tolist() for field in result), strict=True)
    for (name, (_, _, expected)), values in zip(cases.items(), got, strict=True):
        assert values == expected, name
    assert {field.dtype for field in result} == {torch.int32}


def test_row_invariant() -> None:
    requests, stops = traces(seed=3, count=12, width=20, vocab=4)
    together = run(requests, stops, 20, PAGE_SIZE)
    for s, (request, stop) in enumerate(zip(requests, stops, strict=True)):
        # Wider tables, other stop lists beside it, alone: nothing but its own row counts.
        alone = run([request], [stop], 50, PAGE_SIZE)
        assert all(torch.equal(a[0], b[s]) for a, b in zip(alone, together, strict=True))
    backwards = run(requests[::-1], stops[::-1], 20, PAGE_SIZE)
    assert all(torch.equal(a.flip(0), b) for a, b in zip(backwards, together, strict=True))


def test_row_invariant_can_fail() -> None:
    """Control: a request's own draft does count."""
    right, wrong = run([one([1, 2], [1, 2, 3]), one([1, 9], [1, 2, 3])], [[], []], 3, 4)[0]
    assert right != wrong


@pytest.mark.usefixtures("poisoned")
def test_padding_untouched() -> None:
    requests, stops = traces(seed=8, count=10, width=12, vocab=5)
    clean = run(requests, stops, 12, PAGE_SIZE)
    expect(clean, requests, stops, PAGE_SIZE)
    for request in requests:
        # Targets of rows that were not verified, and what lies behind them, are garbage.
        kept = request["targets"][: request["num_rows"]]
        request["targets"] = kept + [request["drafts"][0] if request["drafts"] else 0] * 7
    dirty = run(requests, stops, 12, PAGE_SIZE)
    assert all(torch.equal(a, b) for a, b in zip(clean, dirty, strict=True))
