"""lm-eval by ``HFLM`` on a patched model: log-likelihoods that no batch size and order changes."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.drop_in import patched
from tinyspec.tools.demo import BUNDLED

pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

ANIMALS = ("fox", "dog", "bee", "turtle", "small grey mouse", "bird", "cat", "frog")
ENDS = (" was happy.", " went home and slept until the next morning.", " ran")
BATCHES = (1, 7, 32)


def requests() -> list[Instance]:
    """Multiple choice: contexts and continuations of many lengths."""
    told = [
        f"One {'very ' * n}dark day a {animal} woke up. The {animal}"
        for n, animal in enumerate(ANIMALS)
    ]
    pairs = [(context, end) for context in told for end in ENDS]
    return [Instance("loglikelihood", {}, pair, n) for n, pair in enumerate(pairs)]


def likelihoods(model, batch_size, order):
    """(log-likelihood, whether it is the greedy continuation) of each request."""
    asked = requests()
    lm = HFLM(
        pretrained=model,
        tokenizer=AutoTokenizer.from_pretrained(BUNDLED),
        batch_size=batch_size,
    )
    found = lm.loglikelihood([asked[n] for n in order], disable_tqdm=True)
    return [found[order.index(n)] for n in range(len(asked))]


def answers(model, batch_size):
    """What ``generate_until`` gives, greedy, with a stop string."""
    asked = [
        Instance("generate_until", {}, (request.args[0], {"until": ["."], "max_gen_toks": 12}), n)
        for n, request in enumerate(requests()[::3])
    ]
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED)
    lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
    return lm.generate_until(asked, disable_tqdm=True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_in_every_batch_size_and_order(dtype):
    """Control: the plain model's differ."""
    model = AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=dtype)
    in_order = list(range(len(requests())))
    shuffled = random.Random(0).sample(in_order, len(in_order))
    cases = [(size, order) for size in BATCHES for order in (in_order, shuffled)]
    plain = [likelihoods(model, *case) for case in cases]
    assert any(found != plain[0] for found in plain)
    with patched(model, None, deterministic=True, forward=True):
        ours = [likelihoods(model, *case) for case in cases]
        said = [answers(model, size) for size in BATCHES]
    assert said[0] == said[1] == said[2] and all(said[0])
    assert len(ours[0]) == len(in_order)
    assert all(found == ours[0] for found in ours)
    close = {"rel": 1e-4} if dtype == torch.float32 else {"rel": 0.05, "abs": 0.5}
    for (value, _), (expected, _) in zip(ours[0], plain[0], strict=True):
        assert value == pytest.approx(expected, **close)
