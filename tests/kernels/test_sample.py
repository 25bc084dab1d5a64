"""Sample against numpy (philox in 64-bit integers, everything else in fp64), and log-probabilities
of whole rows.

What is one promise of the kernel and its twin both are held to here.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.kernels.cases import DEVICE, DTYPES, assert_row_invariant, normal, sensitive
from tests.support.tolerances import assert_as_good_as_torch, within_units
from tinyspec.kernels import launch
from tinyspec.kernels import sample as kernel
from tinyspec.kernels.sample import sample
from tinyspec.kernels.twins import sample as twin

NEG, INF, NAN = float("-inf"), float("inf"), float("nan")


both = pytest.mark.parametrize("scorer", [sample, twin.sample], ids=["triton", "twin"])


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


# The vectors that Random123 ships (kat_vectors, philox4x32 10): counter and key, what comes out.
KNOWN = {
    "6627e8d5 e169c58d bc57ac4c 9b00dbd8": (0,) * 6,
    "408f276d 41c83b0e a20bc7c6 6d5451fd": (0xFFFFFFFF,) * 6,
    "d16cfe09 94fdcceb 5001e420 24126ea1": (
        *(0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0),
    ),
}


def test_philox_known_answers():
    """By what stands for kernel and twin below."""
    for expected, words in KNOWN.items():
        found = philox_reference([np.array([word]) for word in words[:4]], words[4:])
        assert " ".join(f"{int(x[0]):08x}" for x in found) == expected


# Smallest, odd, of one tile, of a full one, of many.
SHAPES = [(1, 1), (5, 63), (8, 1000), (4, 4096), (6, 9001)]


@both
@pytest.mark.parametrize("rows, vocab", SHAPES)
def test_matches_reference(rows, vocab, scorer):
    """Noise: word v % 4 of counter (v // 4, position) under the key's two halves."""
    logits, temperature, keys, positions = case(rows, vocab, seed=vocab)
    tokens, logprobs = scorer(logits, temperature, keys, positions)

    divisor = torch.where(temperature > 0, temperature, 1.0)[:, None]
    exact = torch.log_softmax(logits.double() / divisor.double(), dim=-1)
    same = torch.log_softmax(logits / divisor, dim=-1)
    for r in range(rows):
        scores = (logits[r].double() / divisor[r].double()).cpu().numpy()
        if temperature[r] > 0:
            scores = scores + gumbel_reference(keys[r].item(), positions[r].item(), vocab)
        assert scores[tokens[r].item()] >= scores.max() - 1e-5
    chosen = tokens[:, None]
    assert_as_good_as_torch(logprobs, same.gather(1, chosen)[:, 0], exact.gather(1, chosen)[:, 0])


@both
def test_all_greedy_need_no_noise(scorer):
    logits, _, keys, positions = case(5, 300)
    tokens, logprobs = scorer(logits, torch.zeros_like(logits[:, 0]), keys, positions)
    bare, same = scorer(logits, None, None, None)
    assert torch.equal(bare, tokens) and torch.equal(same, logprobs)
    hot = torch.full_like(logits[:, 0], 2.5)
    assert not torch.equal(scorer(logits, hot, keys, positions)[0], tokens), "control"


@both
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_exact(scorer):
    """Ties, exclusion, what is not finite, no rows at all."""
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
    tokens, logprobs = scorer(logits, floats([0.0] * len(rows)), keys, positions)
    assert dict(zip(rows, tokens.tolist(), strict=True)) == {k: t for k, (_, t) in rows.items()}
    assert torch.equal(logprobs.isnan(), tokens == -1)
    assert logprobs[3] == 0.0

    tokens, logprobs = scorer(logits, floats([0.7] * len(rows)), keys, positions)
    assert (tokens == -1).tolist() == [t == -1 for _, t in rows.values()]
    assert tokens[3] == 2 and logprobs[3] == 0.0
    # Overflow by temperature is no finite maximum either.
    assert scorer(floats([[1e5, 0.0]]), floats([1e-36]), longs([1]), longs([1]))[0] == -1
    # Across blocks.
    logits = torch.zeros(1, 9000, device=DEVICE)
    logits[0, [5000, 4999, 8999]] = 1.0
    assert scorer(logits, None, None, None)[0].tolist() == [4999]
    assert [len(x) for x in scorer(*(x[:0] for x in case(1, 10)))] == [0, 0]


@both
@pytest.mark.parametrize(
    "rows, vocab",
    [(1, 1), (8, 1000), pytest.param(6, 9001, marks=pytest.mark.slow("crosses", 4))],
    ids=str,
)
def test_exact_when_forced(scorer, rows, vocab):
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
    draws = 12
    args = (logits[-1:, :40].expand(draws, -1).contiguous(), floats([1.7] * draws))
    if vocab >= 40:
        noise = (longs([3] * draws), longs(list(range(draws))))
        tokens, logprobs = scorer(*args, *noise)
        assert len(tokens.unique()) > 3
        backwards = [x.flip(0) for x in noise]
        assert torch.equal(scorer(*args, *backwards, forced=tokens)[1], logprobs)
        # Control: another token has other bits.
        assert not torch.equal(scorer(*args, *noise, forced=tokens.roll(1))[1], logprobs)


@both
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_exact_when_forced_on_broken_rows(scorer):
    """A broken row yields -1 whatever is forced; an excluded token is kept, at -inf."""
    rows = floats([[NAN, 1.0, 0.0], [0.0, INF, 1.0], [NEG] * 3, [0.0, NEG, 1.0], [NEG, NEG, 5.0]])
    numbers = longs(list(range(5)))
    for heat in (0.0, 0.7):
        given = rows, floats([heat] * 5), numbers, numbers
        tokens, logprobs = scorer(*given, forced=longs([1] * 5))
        assert tokens.tolist() == [-1, -1, -1, 1, 1]
        assert logprobs[:3].isnan().all() and logprobs[3:].tolist() == [NEG, NEG]


@both
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_row_invariant(scorer):
    """Alone, moved, among huge and broken rows, cut out of wider ones; whichever are forced."""
    logits, *others = case(4, 4100)
    forced = longs([-1, 31, 62, -1])
    numbered = torch.cat([logits, floats([[n] for n in range(4)])], dim=1)

    def run(rows: Tensor, *given: Tensor) -> Tensor:
        number = rows[:, -1].nan_to_num(0).clamp(0, 3).long()
        more = {"forced": given[0][number]} if given else {}
        found = scorer(rows[:, :-1], *(x[number] for x in others), **more)
        return torch.stack([x.double() for x in found], dim=1)

    assert_row_invariant(run, numbered)
    assert_row_invariant(lambda rows: run(rows, forced), numbered)


def test_row_invariant_can_fail(monkeypatch):
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


modules = pytest.mark.parametrize("module", [kernel, twin], ids=["triton", "twin"])
# The twin takes fp32 alone.
CASES = [pytest.param(kernel, *c.values, id=f"triton-{c.id}", marks=c.marks) for c in DTYPES]
CASES += [pytest.param(twin, torch.float32, id="twin")]


def by_address(function: Callable, row: Tensor) -> set[tuple]:
    """The bits of ``row`` [V], at every address modulo 16 bytes."""
    vocab, found = len(row), set()
    for offset in range(16 // row.itemsize):
        wide = torch.full((vocab + 16,), NAN, dtype=row.dtype, device=DEVICE)
        wide[offset : offset + vocab] = row
        found.add(tuple(function(wide[None, offset : offset + vocab])[0].tolist()))
    return found


@modules
def test_a_likely_token_among_large_logits(module):
    """Its log-probability is small, and must not be rounded at the size of the logits."""
    logits = 3 * normal(8, 5003, seed=1)
    logits[:, 5] = logits.max() + 14
    logits += 100
    tokens = torch.full((8,), 5, device=DEVICE)
    exact = torch.log_softmax(logits.double(), dim=-1)
    torchs = torch.log_softmax(logits, dim=-1)
    found = module.chosen_logprobs(logits, tokens)
    assert (exact[:, 5] > -1e-4).all() and (found < 0).all()
    assert within_units(found, exact[:, 5], 3)
    assert torch.equal(module.log_softmax(logits)[:, 5], found)
    assert_as_good_as_torch(module.log_softmax(logits), torchs, exact)


@modules
@pytest.mark.parametrize("vocab", [1, 67, pytest.param(5003, id="blocks")])
def test_matches_reference_of_whole_rows(module, vocab):
    logits = 4 * normal(4, vocab, seed=vocab)
    logits[:, 1::7] = NEG
    heat = torch.tensor([0.0, 1.0, 0.3, 2.5], device=DEVICE)
    divisor = torch.where(heat > 0, heat, 1.0)[:, None]
    there = logits > NEG
    for found, scaled in (
        (module.log_softmax(logits), logits),
        (module.log_softmax(logits, heat), logits / divisor),
    ):
        assert torch.equal(found == NEG, ~there)
        same, exact = (torch.log_softmax(x, dim=-1)[there] for x in (scaled, scaled.double()))
        assert_as_good_as_torch(found[there], same, exact)
    same, exact = (torch.softmax(x, dim=-1) for x in (logits, logits.double()))
    assert_as_good_as_torch(module.softmax(logits), same, exact)


@modules
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_exact_whole_rows(module):
    """The bits of the log-probabilities that are computed one by one; what is not finite."""
    logits = 4 * normal(5, 67)
    rows = torch.arange(5, device=DEVICE)
    tokens = 13 * rows
    whole = module.log_softmax(logits)
    assert torch.equal(module.chosen_logprobs(logits, tokens), whole[rows, tokens])
    assert not torch.equal(module.chosen_logprobs(logits, tokens + 1), whole[rows, tokens])
    broken = torch.tensor([[NAN, 1.0], [INF, 0.0], [NEG, NEG]], device=DEVICE)
    assert module.log_softmax(broken).isnan().all() and module.softmax(broken).isnan().all()


@pytest.mark.parametrize("module, dtype", CASES)
def test_exact_as_sampled(module, dtype):
    """A sampled token has the log-probability that stands in the whole row."""
    logits = (4 * normal(4, 67)).to(dtype)
    heat = floats([0.0, 1.0, 0.3, 2.5])
    tokens, logprobs = module.sample(logits, heat, *2 * [torch.arange(4, device=DEVICE)])
    whole = module.log_softmax(logits, heat)
    assert torch.equal(logprobs, whole.gather(1, tokens[:, None])[:, 0])
    assert torch.equal(whole, module.log_softmax(logits.float(), heat))


@pytest.mark.parametrize("module, dtype", CASES)
@pytest.mark.parametrize(
    "vocab", [67, *(pytest.param(n, marks=pytest.mark.slow("crosses", 2)) for n in (66, 4099))]
)
def test_row_invariant_of_whole_rows(module, dtype, vocab):
    """A row has the same bits at every address, in every batch and at every place of it."""
    logits = sensitive(5, vocab).to(dtype)
    whole = module.log_softmax(logits)
    assert by_address(module.log_softmax, logits[2]) == {tuple(whole[2].tolist())}
    for count in (1, 2, 4):
        assert torch.equal(module.log_softmax(logits[:count].clone()), whole[:count])
        assert torch.equal(module.log_softmax(logits[-count:]), whole[-count:])
    others = logits * 1e4
    others[1::2] = NAN
    others[2] = logits[2]
    assert torch.equal(module.log_softmax(others)[2], whole[2])
