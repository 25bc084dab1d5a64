"""Log-probabilities of whole rows: exact enough, and every row by itself, wherever it lies.

The twin and the Triton kernels are held to the same promises.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor

from tests.kernels.cases import DEVICE, DTYPES, normal, sensitive
from tests.support.tolerances import assert_as_good_as_torch, within_units
from tinyspec.kernels import sample as kernel
from tinyspec.kernels.sample import sample
from tinyspec.kernels.twins import sample as twin

NEG, INF, NAN = float("-inf"), float("inf"), float("nan")
both = pytest.mark.parametrize(
    "module", [pytest.param(kernel, id="triton"), pytest.param(twin, id="twin")]
)
# The twin takes fp32 alone.
CASES = [
    pytest.param(twin, torch.float32, id="twin"),
    *(
        pytest.param(kernel, *case.values, id=f"triton-{case.id}", marks=case.marks)
        for case in DTYPES
    ),
]


def shifted_by_address(logits: Tensor) -> Tensor:
    """log_softmax that begins at the multiple of 16 bytes before a row, as torch's does on CUDA."""
    rows = []
    for row in logits:
        before = row.data_ptr() % 16 // row.itemsize
        padded = torch.cat([row.new_full((before,), NEG), row])
        rows.append(kernel.log_softmax(padded[None])[0, before:])
    return torch.stack(rows)


def by_address(function: Callable, row: Tensor) -> set[tuple]:
    """The bits of ``row`` [V], at every address modulo 16 bytes."""
    vocab, found = len(row), set()
    for offset in range(16 // row.itemsize):
        wide = torch.full((vocab + 16,), NAN, dtype=row.dtype, device=DEVICE)
        wide[offset : offset + vocab] = row
        found.add(tuple(function(wide[None, offset : offset + vocab])[0].tolist()))
    return found


@both
def test_a_likely_token_among_large_logits(module: ModuleType) -> None:
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


def test_a_token_beyond_the_logits() -> None:
    """Another row's memory is not read."""
    logits = torch.tensor([[0.0, 1, 2, 3], [100, 5, 5, 5]], device=DEVICE)
    tokens = torch.tensor([4, 0], device=DEVICE)
    assert kernel.chosen_logprobs(logits, tokens).tolist() == [NEG, 0.0]


@both
@pytest.mark.parametrize("vocab", [1, 67, pytest.param(5003, id="blocks")])
def test_matches_reference(module: ModuleType, vocab: int) -> None:
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


@both
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_exact(module: ModuleType) -> None:
    """The bits of the log-probabilities that are computed one by one; what is not finite."""
    logits = 4 * normal(5, 67)
    rows = torch.arange(5, device=DEVICE)
    tokens = 13 * rows
    whole = module.log_softmax(logits)
    assert torch.equal(module.chosen_logprobs(logits, tokens), whole[rows, tokens])
    assert not torch.equal(module.chosen_logprobs(logits, tokens + 1), whole[rows, tokens])
    broken = torch.tensor([[NAN, 1.0], [INF, 0.0], [NEG, NEG]], device=DEVICE)
    assert module.log_softmax(broken).isnan().all() and module.softmax(broken).isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_exact_as_sampled(dtype: torch.dtype) -> None:
    """A sampled token has the log-probability that stands in the whole row."""
    logits = (4 * normal(4, 67)).to(dtype)
    heat = torch.tensor([0.0, 1.0, 0.3, 2.5], device=DEVICE)
    tokens, logprobs = sample(logits, heat, *2 * [torch.arange(4, device=DEVICE)])
    whole = kernel.log_softmax(logits, heat)
    assert torch.equal(logprobs, whole.gather(1, tokens[:, None])[:, 0])
    assert torch.equal(whole, kernel.log_softmax(logits.float(), heat))


@pytest.mark.parametrize("module, dtype", CASES)
@pytest.mark.parametrize(
    "vocab", [67, *(pytest.param(n, marks=pytest.mark.slow("crosses", 2)) for n in (66, 4099))]
)
def test_row_invariant(module: ModuleType, dtype: torch.dtype, vocab: int) -> None:
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


def test_row_invariant_can_fail() -> None:
    """Control: sums that begin at a multiple of 16 bytes show the address."""
    logits = sensitive(4, 67)
    assert any(len(by_address(shifted_by_address, row)) > 1 for row in logits)
