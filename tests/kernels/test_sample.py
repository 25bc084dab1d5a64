"""Sample against numpy: philox in 64-bit integers, everything else in fp64.

Forced tokens are one promise of the kernel and its twin, so both are held to it here.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.kernels.cases import (
    DEVICE,
    DTYPES,
    normal,
    poisoned,  # noqa: F401 - a fixture
    sensitive,
)
from tests.support.tolerances import NOISE, assert_as_good_as_torch, near
from tinyspec.kernels import launch
from tinyspec.kernels.sample import philox, sample
from tinyspec.kernels.twins import sample as twins

NEG, INF, NAN = float("-inf"), float("inf"), float("nan")


both = pytest.mark.parametrize(
    "scorer", [pytest.param(sample, id="triton"), pytest.param(twins.sample, id="twin")]
)


def longs(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=DEVICE)


def floats(values: list) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=DEVICE)


def philox_reference(counter: list[np.ndarray], key: tuple[int, int]) -> list[np.ndarray]:
    c, k = [np.asarray(x, np.uint64) for x in counter], [np.uint64(x) for x in key]
    low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    for _ in range(10):
        a, b = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [(b >> shift) ^ c[1] ^ k[0], b & low, (a >> shift) ^ c[3] ^ k[1], a & low]
        k = [(k[0] + np.uint64(0x9E3779B9)) & low, (k[1] + np.uint64(0xBB67AE85)) & low]
    return c


def gumbel_reference(key: int, position: int, vocab: int) -> np.ndarray:
    v = np.arange(vocab)
    zero = np.zeros(vocab)
    words = (key & 0xFFFFFFFF, (key >> 32) & 0xFFFFFFFF)
    lanes = np.stack(philox_reference([v >> 2, zero + position, zero, zero], words))
    x = lanes[v & 3, v].astype(np.uint64)
    u = ((x >> np.uint64(9)).astype(np.float64) + 0.5) * 2.0**-23
    return -np.log(-np.log(u))


def case(rows: int, vocab: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    logits = 4 * normal(rows, vocab, seed=seed)
    logits[:, 1::7] = NEG
    temperature = floats([(0.0, 1.0, 0.3, 2.5)[r % 4] for r in range(rows)])
    keys = longs([(r * 0x9E3779B97F4A7C15 + seed) % 2**64 - 2**63 for r in range(rows)])
    positions = longs([(r * 7919) % 2**31 for r in range(rows)])
    return logits, temperature, keys, positions


@triton.jit
def philox_kernel(words_ptr, out_ptr):
    c = tl.arange(0, 1)
    w0 = tl.load(words_ptr + 0).to(tl.uint32) + c.to(tl.uint32)
    w1 = tl.load(words_ptr + 1).to(tl.uint32) + c.to(tl.uint32)
    w2 = tl.load(words_ptr + 2).to(tl.uint32) + c.to(tl.uint32)
    w3 = tl.load(words_ptr + 3).to(tl.uint32) + c.to(tl.uint32)
    k0 = tl.load(words_ptr + 4).to(tl.uint32)
    k1 = tl.load(words_ptr + 5).to(tl.uint32)
    x0, x1, x2, x3 = philox(w0, w1, w2, w3, k0, k1)
    tl.store(out_ptr + 0 + c, x0.to(tl.int64))
    tl.store(out_ptr + 1 + c, x1.to(tl.int64))
    tl.store(out_ptr + 2 + c, x2.to(tl.int64))
    tl.store(out_ptr + 3 + c, x3.to(tl.int64))


@pytest.mark.parametrize(
    "words, expected",
    [
        pytest.param([0] * 6, "6627e8d5 e169c58d bc57ac4c 9b00dbd8", id="zeros"),
        pytest.param([0xFFFFFFFF] * 6, "408f276d 41c83b0e a20bc7c6 6d5451fd", id="ones"),
        pytest.param(
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0],
            "d16cfe09 94fdcceb 5001e420 24126ea1",
            id="pi",
        ),
    ],
)
def test_philox_known_answers(words: list[int], expected: str) -> None:
    """The vectors that Random123 ships (kat_vectors, philox4x32 10)."""
    out = longs([0] * 4)
    philox_kernel[(1,)](longs(words), out)
    assert " ".join(f"{x & 0xFFFFFFFF:08x}" for x in out.tolist()) == expected


@pytest.mark.parametrize(
    "rows, vocab",
    [
        pytest.param(1, 1, id="smallest"),
        pytest.param(5, 63, id="odd"),
        pytest.param(8, 1000, id="one-tile"),
        pytest.param(4, 4096, id="full-tile"),
        pytest.param(6, 9001, id="many-tiles"),
    ],
)
def test_matches_reference(rows: int, vocab: int) -> None:
    logits, temperature, keys, positions = case(rows, vocab, seed=vocab)
    tokens, logprobs = sample(logits, temperature, keys, positions)

    divisor = torch.where(temperature > 0, temperature, 1.0)[:, None]
    exact = torch.log_softmax(logits.double() / divisor.double(), dim=-1)
    same = torch.log_softmax(logits / divisor, dim=-1)
    for r in range(rows):
        scores = (logits[r].double() / divisor[r].double()).cpu().numpy()
        if temperature[r] > 0:
            scores = scores + gumbel_reference(keys[r].item(), positions[r].item(), vocab)
        token = tokens[r].item()
        assert scores[token] >= scores.max() - 1e-5
    chosen = tokens[:, None]
    assert_as_good_as_torch(logprobs, same.gather(1, chosen)[:, 0], exact.gather(1, chosen)[:, 0])


@both
def test_all_greedy_need_no_noise(scorer: Callable) -> None:
    logits, _, keys, positions = case(5, 300)
    tokens, logprobs = scorer(logits, torch.zeros_like(logits[:, 0]), keys, positions)
    bare, same = scorer(logits, None, None, None)
    assert torch.equal(bare, tokens) and torch.equal(same, logprobs)
    hot = torch.full_like(logits[:, 0], 2.5)
    assert not torch.equal(scorer(logits, hot, keys, positions)[0], tokens), "control"


@pytest.mark.parametrize("rows", [1, 5, 15, 17, 40])
def test_greedy_tokens_of_the_twin(rows: int) -> None:
    """Few rows and many: the lowest index on ties, none for NaN, +inf, and where all is out."""
    for seed in range(40):
        for place, value in ((3, None), (7, NAN), (511, INF), (slice(None), NEG), (3, NEG)):
            logits = normal(rows, 512, seed=seed).round(decimals=1)
            if value is not None:
                logits[-1, place] = value
            best, places = logits.max(dim=-1)
            expected = torch.where(best.isfinite(), places, -1)
            before = logits.clone()
            assert torch.equal(twins.sample(logits.cpu(), None, None, None)[0], expected.cpu())
            assert torch.equal(logits.nan_to_num(7.0), before.nan_to_num(7.0))
            assert (int(expected[-1]) < 0) == (value is not None and place != 3), "control"


def test_noise_of_the_twin() -> None:
    """Word v % 4 of counter (v // 4, position) under the key's two halves."""
    for key, position in ((0, 0), (-1, 0xFFFFFFFF), (0x1234567890ABCDEF, 77), (-(2**63), 5)):
        noise = twins.gumbel(torch.tensor([key]), torch.tensor([position]), 50)[0]
        assert noise.tolist() == near(gumbel_reference(key, position, 50).tolist(), NOISE)


def test_matches_reference_without_rows() -> None:
    tokens, logprobs = sample(*(x[:0] for x in case(1, 10)))
    assert tokens.shape == logprobs.shape == (0,)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_exact() -> None:
    """Ties, exclusion and what is not finite."""
    rows = {
        "plain": ([1.0, 3.0, 2.0, 0.0, 0.0], 1),
        "tie": ([1.0, 3.0, 3.0, 3.0, 0.0], 1),
        "all equal": ([0.0] * 5, 0),
        "one left": ([NEG, NEG, -5.0, NEG, NEG], 2),
        "nan": ([1.0, NAN, 2.0, 0.0, 0.0], -1),
        "+inf": ([1.0, INF, 2.0, 0.0, 0.0], -1),
        "none left": ([NEG] * 5, -1),
        "-0 ties with 0": ([-0.0, 0.0, -1.0, -1.0, -1.0], 0),
    }
    logits = floats([row for row, _ in rows.values()])
    keys = positions = longs(list(range(len(rows))))
    tokens, logprobs = sample(logits, floats([0.0] * len(rows)), keys, positions)
    assert dict(zip(rows, tokens.tolist(), strict=True)) == {k: t for k, (_, t) in rows.items()}
    assert torch.equal(logprobs.isnan(), tokens == -1)
    assert logprobs[3] == 0.0

    tokens, logprobs = sample(logits, floats([0.7] * len(rows)), keys, positions)
    assert (tokens == -1).tolist() == [t == -1 for _, t in rows.values()]
    assert tokens[3] == 2 and logprobs[3] == 0.0
    # Overflow by temperature is no finite maximum either.
    assert sample(floats([[1e5, 0.0]]), floats([1e-36]), longs([1]), longs([1]))[0] == -1


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_exact_in_16_bits(dtype: torch.dtype) -> None:
    """Logits are read as they are; everything after that is in fp32."""
    logits, *noise = case(4, 1001)
    logits = logits.to(dtype)
    for args in (noise, (None, None, None)):
        for narrow, wide in zip(sample(logits, *args), sample(logits.float(), *args), strict=True):
            assert torch.equal(narrow, wide)


def test_exact_ties_across_tiles() -> None:
    logits = torch.zeros(1, 9000, device=DEVICE)
    logits[0, [5000, 4999, 8999]] = 1.0
    tokens, _ = sample(logits, floats([0.0]), longs([0]), longs([0]))
    assert tokens.item() == 4999


@both
@pytest.mark.parametrize(
    "rows, vocab",
    [(1, 1), (8, 1000), pytest.param(6, 9001, marks=pytest.mark.slow("crosses", 4))],
    ids=str,
)
def test_exact_when_forced(scorer: Callable, rows: int, vocab: int) -> None:
    """A row's own choice, forced on it: the bits of the free row, greedy or hot, noise or none."""
    logits, temperature, keys, positions = case(rows, vocab, seed=vocab)
    free = scorer(logits, temperature, keys, positions)
    nobody = scorer(logits, temperature, keys, positions, forced=longs([-1] * rows))
    forced = scorer(logits, temperature, keys + 1, positions + 1, forced=free[0])
    some = torch.where(longs(list(range(rows))) % 2 == 0, free[0], -1)
    mixed = scorer(logits, temperature, keys, positions, forced=some)
    for other in (nobody, forced, mixed):
        assert all(torch.equal(a, b) for a, b in zip(free, other, strict=True))
    # Every token of a hot row, drawn freely somewhere, has the bits it has when forced.
    draws = 40
    args = (logits[-1:, :40].expand(draws, -1).contiguous(), floats([1.7] * draws))
    if vocab >= 40:
        noise = (longs([3] * draws), longs(list(range(draws))))
        tokens, logprobs = scorer(*args, *noise)
        assert len(tokens.unique()) > 5
        backwards = [x.flip(0) for x in noise]
        assert torch.equal(scorer(*args, *backwards, forced=tokens)[1], logprobs)
        # Control: another token has other bits.
        assert not torch.equal(scorer(*args, *noise, forced=tokens.roll(1))[1], logprobs)


@both
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("heat", [0.0, 0.7])
def test_exact_when_forced_on_broken_rows(scorer: Callable, heat: float) -> None:
    """A broken row yields -1 whatever is forced; an excluded token is kept, at -inf."""
    rows = [[NAN, 1.0, 0.0], [0.0, INF, 1.0], [NEG] * 3, [0.0, NEG, 1.0], [NEG, NEG, 5.0]]
    numbers = longs(list(range(5)))
    temperature = floats([heat] * 5)
    tokens, logprobs = scorer(floats(rows), temperature, numbers, numbers, forced=longs([1] * 5))
    assert tokens.tolist() == [-1, -1, -1, 1, 1]
    assert logprobs[:3].isnan().all() and logprobs[3:].tolist() == [NEG, NEG]


@both
def test_row_invariant_when_forced(scorer: Callable) -> None:
    """Which of the other rows are forced does not show."""
    rows, vocab = 6, 5003
    args = case(rows, vocab)
    forced = longs([-1 if r % 3 == 0 else 31 * r for r in range(rows)])
    whole = scorer(*args, forced=forced)
    for r in range(rows):
        alone = scorer(*(x[r : r + 1].clone() for x in args), forced=forced[r : r + 1].clone())
        others = forced.flip(0).clone()
        others[r] = forced[r]
        crowd = [x[r : r + 1] for x in scorer(*args, forced=others)]
        for found in (alone, crowd):
            assert all(torch.equal(a[0], b[r]) for a, b in zip(found, whole, strict=True))


def test_row_invariant() -> None:
    rows, vocab = 9, 5003
    args = case(rows, vocab)
    whole = sample(*args)
    for r in range(rows):
        alone = sample(*(x[r : r + 1].clone() for x in args))
        assert all(torch.equal(a[0], b[r]) for a, b in zip(alone, whole, strict=True))
    order = longs([4, 0, 8, 2, 6, 1, 3, 7, 5])
    moved = sample(*(x[order] for x in args))
    assert all(torch.equal(a, b[order]) for a, b in zip(moved, whole, strict=True))
    # Neighbours that are huge or broken, and rows that lie further apart.
    wide = torch.full((rows, vocab + 13), NAN, device=DEVICE)
    wide[:, :vocab] = args[0]
    wide[1::2] = NAN
    strided = sample(wide[:, :vocab], *args[1:])
    assert all(torch.equal(a[::2], b[::2]) for a, b in zip(strided, whole, strict=True))


def test_row_invariant_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: other blocks change the logsumexp's bits, another key or position the token."""
    logits, temperature, keys, positions = case(8, 1500)
    tokens, _ = sample(logits, temperature, keys, positions)
    hot = temperature > 0
    assert not torch.equal(sample(logits, temperature, keys + 1, positions)[0][hot], tokens[hot])
    assert not torch.equal(sample(logits, temperature, keys, positions + 1)[0][hot], tokens[hot])
    logits = sensitive(8, 300)
    tokens, logprobs = sample(logits, None, None, None)
    monkeypatch.setattr(launch, "SAMPLE", launch.RowLaunch(64, 8))
    other = sample(logits, None, None, None)
    assert torch.equal(other[0], tokens) and not torch.equal(other[1], logprobs)


@pytest.mark.usefixtures("poisoned")
def test_padding_untouched() -> None:
    """What lies behind a row's vocabulary is not read, and every output is written."""
    args = case(6, 77)
    wide = torch.full((6, 128), INF, device=DEVICE)
    wide[:, :77] = args[0]
    for forced in (None, longs([76, -1] * 3)):
        got = sample(wide[:, :77], *args[1:], forced=forced)
        assert all(map(torch.equal, got, sample(*args, forced=forced)))
    got = sample(wide[:, :77], *args[1:])
    assert (got[0] >= 0).all() and (got[0] < 77).all() and got[1].isfinite().all()
    assert (wide[:, 77:] == INF).all()
