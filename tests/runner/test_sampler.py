"""Sampling: the right distribution, the right tokens kept, and every row by itself."""

import random
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests.support.tiny import VOCAB, prompts, tiny
from tests.support.tolerances import FORMULA, LOGPROBS, near
from tinyspec import Engine, EngineConfig, SamplingParams
from tinyspec.kernels import backend as kernels
from tinyspec.kernels.twins.sample import sample, softmax
from tinyspec.runner import processors
from tinyspec.runner.processors import SpecialRow, keep_top_k
from tinyspec.runner.sampler import NOT_FINITE, SampleBatch, Sampler, SpecialResult
from tinyspec.scheduler.request import noise_key


class Row(NamedTuple):
    """One token to be sampled; fields as in ``SampleBatch`` and ``SpecialRow``."""

    logits_row: int
    params: SamplingParams
    key: int = 0
    position: int = 0
    num_generated: int = 0
    history: list[int] = ()


OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


def sample_rows(sampler, logits, rows):
    """(token, log-probability if it is asked for, top ones, error) of each, all of them special."""
    params = [row.params for row in rows]
    columns = {
        name: np.array([(p.filtered and getattr(p, name)) or off for p in params])
        for name, off in OFF.items()
    }
    numbers = ("logits_row", "key", "position")
    columns |= {name: np.array([getattr(row, name) for row in rows]) for name in numbers}
    batch = SampleBatch(
        temperature=np.array([p.temperature for p in params], np.float64),
        logprobs=any(p.logprobs or p.top_logprobs for p in params),
        special={n: SpecialRow(r.params, r.num_generated, r.history) for n, r in enumerate(rows)},
        **columns,
    )
    sampled = sampler.sample(logits, batch)
    logprobs = None if sampled.logprobs is None else sampled.logprobs.cpu().numpy()
    tokens, results = sampled.tokens.cpu().numpy(), []
    found = sampled.special_results(tokens, logprobs)
    for n, (token, own) in enumerate(zip(tokens.tolist(), params, strict=True)):
        special = found.get(n, SpecialResult(error=NOT_FINITE))
        if token < 0:
            results.append((token, None, [], special.error))
        else:
            wanted = own.logprobs or own.top_logprobs
            logprob = float(logprobs[n]) if wanted else None
            results.append((token, logprob, special.top, None))
    return results


def one_by_one(sampler, logits, rows):
    """What each of these rows, the n-th of the logits, gives alone."""
    return [
        sample_rows(sampler, logits[n : n + 1], [row._replace(logits_row=0)])[0]
        for n, row in enumerate(rows)
    ]


keep_top_p, keep_min_p = (
    partial(keep, softmax=softmax) for keep in (processors.keep_top_p, processors.keep_min_p)
)
DRAWS = 20_000
# Upper 1e-4 quantile of the chi-square distribution with 7 degrees of freedom.
CRITICAL = 29.88


@pytest.fixture(scope="module")
def sampler():
    return Sampler(kernels.load("torch"))


def draws(logits, temperature, keys, positions):
    """One token per draw from one row of logits."""
    count = max(len(keys), len(positions))
    rows = logits.expand(count, -1)
    heat = torch.full((count,), temperature)
    return sample(rows, heat, keys.expand(count), positions.expand(count), logprobs=False)[0]


def chi_square(tokens, probabilities):
    expected = probabilities.double() * len(tokens)
    assert expected.min() > 5
    counts = torch.bincount(tokens, minlength=len(expected)).double()
    return float(((counts - expected) ** 2 / expected).sum())


VARYING = {
    "keys": (torch.tensor([noise_key(s, 0) for s in range(DRAWS)]), torch.tensor([7])),
    "positions": (torch.tensor([noise_key(11, 2)]), torch.arange(DRAWS)),
    "completions": (torch.tensor([noise_key(5, i) for i in range(DRAWS)]), torch.tensor([0])),
}


@pytest.mark.parametrize("keys, positions", VARYING.values(), ids=VARYING)
def test_distribution(keys, positions):
    """Controls: a little hotter, or two tokens exchanged, is not the same distribution."""
    logits = torch.linspace(-1.2, 1.2, 8)[torch.tensor([3, 1, 7, 0, 5, 2, 6, 4])]
    for temperature in (0.5, 1.0, 1.7):
        tokens = draws(logits, temperature, keys, positions)
        assert chi_square(tokens, torch.softmax(logits / temperature, 0)) < CRITICAL
        assert chi_square(tokens, torch.softmax(logits / temperature / 1.25, 0)) > CRITICAL
        assert chi_square(tokens, torch.softmax(logits.flip(0) / temperature, 0)) > CRITICAL


def test_noise_keys():
    """No two of (seed, completion) share a key."""
    keys = {noise_key(seed, index) for seed in range(100) for index in range(100)}
    assert len(keys) == 10_000
    assert all(-(2**63) <= key < 2**63 for key in keys)
    assert noise_key(2**64 - 1, 0) != noise_key(0, 0)


def distinct(rows, vocab, scale=3.0):
    """Random logits of which no two are equal within a row."""
    logits = torch.randn(rows, vocab) * scale
    assert all(len(row.unique()) == vocab for row in logits)
    return logits


def test_filters_keep_what_transformers_keeps():
    for vocab in (7, 128, 1000):
        torch.manual_seed(0)
        logits = distinct(12, vocab)
        for k in (1, 2, 5, vocab - 1, vocab, vocab + 3):
            kept = keep_top_k(logits, torch.full((12,), k), k)
            assert torch.equal(kept, TopKLogitsWarper(k)(None, logits))
        for keep, warper in ((keep_top_p, TopPLogitsWarper), (keep_min_p, MinPLogitsWarper)):
            for p in (1e-6, 0.02, 0.3, 0.5, 0.9, 0.99, 0.999):
                kept = keep(logits, torch.full((12,), p))
                assert torch.equal(kept, warper(p)(None, logits))
                assert kept.isfinite().any(-1).all()


STYLES = (
    {"top_k": 20},
    {"top_p": 0.8},
    {"min_p": 0.05},
    {"top_k": 30, "top_p": 0.9},
    {"top_k": 30, "min_p": 0.1},
    {"top_p": 0.95, "min_p": 0.02},
    {"top_k": 40, "top_p": 0.9, "min_p": 0.05},
)


def test_ties_go_to_the_lowest_index(sampler):
    flat = torch.zeros(1, 8)
    flat[0, 5] = 1.0

    def kept(scores):
        return scores[0].isfinite().nonzero().squeeze(1).tolist()

    assert kept(keep_top_k(flat, torch.tensor([3]), 3)) == [0, 1, 5]
    assert kept(keep_top_p(torch.zeros(1, 8), torch.tensor([0.5]))) == [0, 1, 2, 3]
    assert kept(keep_min_p(flat, torch.tensor([1.0]))) == [5]
    few = torch.randint(0, 4, (1, 4000)).float()
    survivors = kept(keep_top_p(few, torch.tensor([0.8])))
    partial = few[0, survivors].min()
    tied = (few[0] == partial).nonzero().squeeze(1).tolist()
    places = [token for token in survivors if few[0, token] == partial]
    assert 0 < len(places) < len(tied) and places == tied[: len(places)]
    greedy = Row(0, SamplingParams(top_logprobs=3))
    token, _, top, _ = sample_rows(sampler, torch.zeros(1, 8), [greedy])[0]
    assert (token, [token for token, _ in top]) == (0, [0, 1, 2])
    later = torch.tensor([[0.0, 2.0, 1.0, 2.0]])
    assert sample_rows(sampler, later, [greedy])[0][0] == 1


def halve(ids, scores):
    return scores * 0.5 + ids.sum() * 0.01 * scores.sign()


KINDS = (
    {},
    {"logprobs": True},
    {"top_logprobs": 4},
    {"top_logprobs": 3, "logprobs_mode": "raw"},
    {"repetition_penalty": 1.3, "logprobs": True},
    {"min_new_tokens": 5, "stop_token_ids": (3, 50, 90)},
    {"min_new_tokens": 4, "stop_token_ids": (7, 90, 1000)},
    {"logits_processors": (halve,), "logprobs": True},
)


def mixed_rows(rng, count, vocab=101):
    rows = []
    for n in range(count):
        sampled = {"temperature": rng.choice((0.3, 1.0, 1.9)), **rng.choice(({}, *STYLES))}
        params = SamplingParams(seed=n, **KINDS[n % len(KINDS)], **(sampled if n % 3 else {}))
        history = rng.choices(range(vocab), k=9)
        rows.append(Row(n, params, noise_key(n, 0), rng.randrange(400), n % 7, history))
    return rows


def test_rows_do_not_depend_on_rows(sampler):
    """Any subset in any order gives every row what it has alone, to the bit."""
    rng = random.Random(0)
    logits, rows = torch.randn(42, 101) * 2, mixed_rows(rng, 42)
    alone = one_by_one(sampler, logits, rows)
    assert all(error is None for *_, error in alone)
    assert sample_rows(sampler, logits, rows) == alone
    for _ in range(40):
        some = rng.sample(range(42), rng.randint(1, 42))
        found = sample_rows(sampler, logits, [rows[n] for n in some])
        assert found == [alone[n] for n in some]
        packed = [rows[n]._replace(logits_row=place) for place, n in enumerate(some)]
        assert sample_rows(sampler, logits[some], packed) == found
    other = [row._replace(key=row.key + 1) for row in rows]
    assert sample_rows(sampler, logits, other) != alone


def test_rows_do_not_depend_on_rows_in_16_bits():
    """The Triton kernels: rows that are changed are sampled apart, in fp32, the others as they
    are."""
    read, triton = [], kernels.load("triton")

    def sample(rows, *args, **kwargs):
        read.append((rows.dtype, len(rows)))
        return triton.sample(rows, *args, **kwargs)

    sampler = Sampler(replace(triton, sample=sample))
    logits, rows = (torch.randn(11, 101) * 2).half(), mixed_rows(random.Random(0), 11)
    alone = one_by_one(sampler, logits, rows)
    changed = sum(dtype == torch.float32 for dtype, _ in read)
    assert len(read) == 11 and 0 < changed < 11
    assert sample_rows(sampler, logits, rows) == alone
    assert read[11:] == [(torch.float16, 11 - changed), (torch.float32, changed)]
    some = [7, 2, 10, 3, 0]
    assert sample_rows(sampler, logits, [rows[n] for n in some]) == [alone[n] for n in some]
    # The same numbers in fp32; and a control.
    assert sample_rows(sampler, logits.float(), rows) == alone
    other = [row._replace(key=row.key + 1) for row in rows]
    assert sample_rows(sampler, logits, other) != alone


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_is_not_finite_yields_no_token(sampler, temperature):
    for style in (*KINDS, *STYLES):
        logits = torch.randn(5, VOCAB)
        params = SamplingParams(temperature=temperature, seed=1, **style)
        rows = [Row(n, params, noise_key(n, 0), n, 9, [1, 2]) for n in range(5)]
        expected = sample_rows(sampler, logits, rows)
        logits[1, 5], logits[2, 9], logits[3] = torch.nan, torch.inf, -torch.inf
        found = sample_rows(sampler, logits, rows)
        assert [found[0], found[4]] == [expected[0], expected[4]]
        assert found[0][0] >= 0 and found[0][-1] is None
        assert [token for token, *_ in found[1:4]] == [-1] * 3
        assert all("finite" in error for *_, error in found[1:4])
        logits[3, 17] = -3.0  # one that is left is the one
        assert 17 in (sample_rows(sampler, logits, rows)[3][0], *params.stop_ids)


SMALL = {"reference_rows": 16, "max_rows": 16, "page_size": 16}


def test_seeds():
    """A missing seed is drawn and recorded, repeatably under EngineConfig.seed."""
    params = SamplingParams(max_new_tokens=5, temperature=1.0, deterministic=True)

    def run(seed, wanted=params):
        with Engine(tiny(), config=EngineConfig(seed=seed, **SMALL)) as engine:
            outputs = engine.generate([[5, 6]] * 3, wanted)
        return [(o.params.seed, o.completions[0].token_ids) for o in outputs]

    first = run(9)
    assert run(9) == first
    assert len({seed for seed, _ in first}) == len({tuple(t) for _, t in first}) == 3
    assert {seed for seed, _ in run(10)}.isdisjoint(seed for seed, _ in first)
    assert {seed for seed, _ in run(None)}.isdisjoint(seed for seed, _ in run(None))
    assert run(None, [replace(params, seed=seed) for seed, _ in first]) == first
    assert run(9, replace(params, temperature=0.0))[0][0] is None


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_raw_and_processed_logprobs(sampler, temperature):
    """Of the model's own distribution, or of the one that was sampled from."""
    logits = distinct(5, VOCAB)
    style = {"temperature": temperature, "seed": 1, "top_k": 9, "repetition_penalty": 1.5}
    processed = SamplingParams(top_logprobs=3, logprobs=True, **style)
    raw = replace(processed, logprobs_mode="raw")
    history = list(range(0, VOCAB, 2))
    for n in range(5):
        own = torch.log_softmax(logits[n], 0)
        row = Row(n, raw, noise_key(n, 0), 3, 0, history)
        (token, logprob, top, _), (same, other, *_) = (
            sample_rows(sampler, logits, [row._replace(params=asked)])[0]
            for asked in (raw, processed)
        )
        assert logprob == own[token].item()
        best = own.topk(3)
        assert top == list(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        scores = RepetitionPenaltyLogitsProcessor(1.5)(torch.tensor([history]), logits[n][None])
        if temperature:
            scores = TopKLogitsWarper(9)(None, scores / temperature)
        sampled_from = torch.log_softmax(scores[0], 0)
        assert same == token
        assert other == near(sampled_from[token].item(), FORMULA)
        assert other != logprob


def test_top_logprobs_of_a_near_tie(sampler):
    """Logits one ulp apart may share a log-probability; the order stays that of the logits."""
    logits = torch.full((1, VOCAB), 0.9)
    logits[0, 3] = 1.0
    logits[0, 9] = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))
    params = SamplingParams(logprobs=True, top_logprobs=1)
    token, logprob, top, _ = sample_rows(sampler, logits, [Row(0, params)])[0]
    assert token == 9 and top == [(9, logprob)]


def hf_prompt_logprobs(model, prompt):
    with torch.no_grad():
        shares = torch.log_softmax(model(torch.tensor([prompt])).logits[0].float(), -1)
    return [shares[n, token].item() for n, token in enumerate(prompt[1:])]


@pytest.mark.crossed(0.7)
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("max_rows", [16, 24, 512])
def test_prompt_logprobs(max_rows, deterministic):
    """Of every prompt token but the first, as transformers' forward has them."""
    params = SamplingParams(max_new_tokens=2, prompt_logprobs=True, deterministic=deterministic)
    model = tiny()
    expected = [hf_prompt_logprobs(model, prompt) for prompt in prompts(5)]
    config = EngineConfig(reference_rows=16, max_rows=max_rows, page_size=16)
    with Engine(model, config=config) as engine:
        outputs = engine.generate(prompts(5), params)
    for output, values in zip(outputs, expected, strict=True):
        first, *rest = output.prompt_logprobs
        assert first is None
        assert rest == near(values, LOGPROBS)


def test_kept_noise_changes_no_bit(sampler):
    """Greedy and sampled rows, filtered ones, some without kept noise; and what is kept of it."""
    rng, count, vocab = np.random.default_rng(0), 12, 997
    logits = torch.tensor(rng.normal(size=(count, vocab)), dtype=torch.float32)
    keys, positions = rng.integers(0, 1 << 62, count), rng.integers(1, 90, count)
    heat = np.where(np.arange(count) % 4, rng.uniform(0.3, 1.5, count), 0.0)

    def found(own, rows=slice(None)):
        places = np.arange(count)[rows]
        top_k = np.where((places % 3 > 0) | (heat[rows] == 0), 0, 20)
        ones = np.ones(len(places))
        given = keys[rows], positions[rows], heat[rows], top_k, ones, 0 * ones
        batch = SampleBatch(np.arange(len(places)), *given, logprobs=True)
        drawn = own.sample(logits[rows], batch)
        return drawn.tokens.tolist(), drawn.logprobs.tolist()

    expected = found(sampler)
    assert found(sampler)[0] != logits.argmax(1).tolist(), "control"
    own = Sampler(kernels.load("torch"))
    for kept in (slice(0, 7), slice(4, None), slice(None)):
        own.keep_noise(keys[kept], positions[kept], vocab)
        assert found(own) == expected
        assert found(own, kept) == tuple(part[kept] for part in expected)
        assert len(own._noise) == len(own._at) == len(keys[kept])
