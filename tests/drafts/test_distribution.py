"""Drafts with the target's noise: how often they must agree, and that plain requests which get some
keep their distribution."""

import copy
from itertools import product

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.cases import engine_of
from tests.support.tiny import config_of
from tinyspec import SamplingParams
from tinyspec.kernels.twins.sample import sample

DRAWS, SMALL, REQUESTS = 20_000, 6, 3_000
# Upper 1e-4 quantile of the chi-square distribution with 35 degrees of freedom.
CRITICAL = 74.9


def drawn(logits, key):
    positions = torch.arange(DRAWS)
    keys = torch.full_like(positions, key)
    rows = logits.expand(DRAWS, -1)
    return sample(rows, torch.ones(DRAWS), keys, positions, logprobs=False)[0]


@pytest.mark.parametrize("spread", [0.3, 1.0, 2.0])
def test_share_of_agreement(spread):
    """At least (1 - TV) / (1 + TV) (arXiv 2408.07978); less without the noise in common."""
    generator = torch.Generator().manual_seed(1)
    target = 2 * torch.randn(50, generator=generator)
    other = target + spread * torch.randn(50, generator=generator)
    distance = (target.softmax(0) - other.softmax(0)).abs().sum().item() / 2
    least = (1 - distance) / (1 + distance)
    together = (drawn(target, 7) == drawn(other, 7)).float().mean().item()
    apart = (drawn(target, 7) == drawn(other, 8)).float().mean().item()
    assert together > least - 4 * (least * (1 - least) / DRAWS) ** 0.5
    assert apart < 0.8 * together, "control"


@torch.no_grad()
def pairs(model, prompt):
    """Probabilities of the second and third tokens behind ``prompt``, [SMALL * SMALL]."""
    prefixes = torch.tensor([[*prompt, *pair] for pair in product(range(SMALL), repeat=2)])
    shares = model(prefixes).logits[:, len(prompt) - 1 :].softmax(-1)
    first, second, third = shares.double().unbind(1)
    chance = [
        first[n, a] * second[n, b] for n, (a, b) in enumerate(product(range(SMALL), repeat=2))
    ]
    joint = torch.stack(chance)[:, None] * third
    return joint.view(SMALL, SMALL, SMALL).sum(0).flatten()


def test_plain_requests_keep_their_distribution():
    """Over all pairs of drafted tokens; the assistant's own distribution is another."""
    config = config_of("llama")
    config.vocab_size, config.initializer_range = SMALL, 0.1
    config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    other, prompt = copy.deepcopy(model), [1, 2, 0, 5]
    with torch.no_grad():
        other.lm_head.weight += 0.03 * torch.randn_like(other.lm_head.weight)
    params = [
        SamplingParams(max_new_tokens=3, temperature=1.0, seed=n, ignore_eos=True)
        for n in range(REQUESTS)
    ]
    settings = {"verify": "always", "draft_window": 2, "page_size": 8}
    with engine_of(model, drafter=other, **settings) as engine:
        outputs = engine.generate([prompt] * REQUESTS, params)
        stats = engine.stats()
    assert stats.accepted_by["assistant"] > REQUESTS / 2 < 4 * stats.rollbacks_by["assistant"]
    tokens = torch.tensor([output.completions[0].token_ids for output in outputs])
    counts = torch.bincount(tokens[:, 1] * SMALL + tokens[:, 2], minlength=SMALL**2).double()

    def chi_square(of):
        expected = REQUESTS * pairs(of, prompt)
        assert expected.min() > 5
        return ((counts - expected) ** 2 / expected).sum().item()

    assert chi_square(model) < CRITICAL < chi_square(other)
