"""Thinking requests keep the contract: thoughts, tokens and log-probabilities, bit for bit."""

import copy
import random
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.support.cases import drain
from tests.support.sensitive import ShapeSensitiveLinear, replace_linears
from tests.support.thinking import all_bits, engine_of, exact, params, prompt_of, thinking_model
from tinyspec import Engine
from tinyspec.thinking.thinker import REFERENCE

NEEDLES = [
    (prompt_of(67, 67), exact()),
    (prompt_of(80, 80), exact(temperature=0.9, seed=3)),
    (prompt_of(21, 21), exact(num_return_sequences=2, temperature=1.2, seed=5)),
    (prompt_of(5, 5), exact()),
]


def model_of(name):
    """A kind, with linears whose bits depend on the row count if "sensitive" is added."""
    model = thinking_model(name.split()[0])
    return replace_linears(model, ShapeSensitiveLinear) if "sensitive" in name else model


def crowd(count, seed):
    """Plain and thinking neighbours, deterministic and not."""
    rng = random.Random(seed)
    found = []
    for n in range(count):
        changes = {"thinking": rng.random() < 0.6, "deterministic": rng.random() < 0.3}
        changes |= {"temperature": rng.choice((0.0, 0.8)), "seed": n, "logprobs": False}
        found.append(
            (prompt_of(rng.randint(1, 90), 100 + n), params(rng.randint(1, 12), **changes))
        )
    return found


def test_plain_bits_depend_on_what_else_runs():
    """Control: the same requests without ``deterministic``."""
    model = model_of("llama sensitive")
    plain = [(prompt, replace(wanted, deterministic=False)) for prompt, wanted in NEEDLES]
    with engine_of(model, thinking_window=1) as engine:
        one = [all_bits(engine.generate([prompt], wanted)[0]) for prompt, wanted in plain]
    with engine_of(model, thinking_window=None) as engine:
        both = plain + crowd(6, 0)
        found = engine.generate([p for p, _ in both], [w for _, w in both])
    assert [all_bits(output) for output in found[: len(plain)]] != one


class Mixing(nn.Module):
    """A linear that adds to every chunk a little of its neighbours."""

    def __init__(self, linear):
        super().__init__()
        self.linear = linear

    def forward(self, x):
        return self.linear(x + 1e-6 * x.roll(1, 0))


class ByPlace(Mixing):
    """A linear whose results depend on the index in the batch."""

    def forward(self, x):
        return self.linear(x * (1 + 1e-6 * torch.arange(len(x))[:, None, None]))


def bits_with_neighbours(model, prove):
    """Of one deterministic request alone and beside others."""
    with engine_of(model, prefix_cache=False) as engine:
        thinker = engine.core.committer.thinker
        thinker.batches.proven = not prove
        one = all_bits(engine.generate(*NEEDLES[1])[0])
        thinker.forget_states()
        many = engine.generate([p for p, _ in NEEDLES], [w for _, w in NEEDLES])
        return one, all_bits(many[1]), thinker.batches.reference


@pytest.mark.parametrize("kind", [Mixing, ByPlace])
def test_blocks_that_mix_chunks_run_one_by_one(kind):
    model = thinking_model()
    mlp = model.compression.block.layer.mlp
    mlp.up_proj = kind(mlp.up_proj)
    one, many, batch = bits_with_neighbours(model, prove=True)
    assert batch == 1 and one == many
    # Control: without the probe it shows.
    one, many, batch = bits_with_neighbours(model, prove=False)
    assert batch == REFERENCE and one != many


def test_fingerprint():
    model = thinking_model()
    with Engine(model.backbone) as engine:
        plain = engine.contract.fingerprint
    with Engine(model) as engine:
        thinking = engine.contract.fingerprint
    parts = dict(thinking.parts)
    assert parts.pop("thinking") and parts == plain.parts
    other = thinking_model(chunk_size=4)
    with Engine(other) as engine:
        found = engine.contract.fingerprint
    differing = {name for name in found.parts if found.parts[name] != thinking.parts[name]}
    assert differing == {"thinking"}


@pytest.mark.parametrize("block", ["thinking", "compression"])
def test_changes_of_the_blocks_are_seen(block):
    model = thinking_model()
    weight = getattr(model, block).block.layer.mlp.up_proj.weight
    with engine_of(model) as engine:
        before = engine.generate(*NEEDLES[0])[0]
        with torch.no_grad():
            weight.mul_(-1)
        after = engine.generate(*NEEDLES[0])[0]
        assert after.fingerprint != before.fingerprint and all_bits(after) != all_bits(before)
        name = engine.add_request(*NEEDLES[0])
        while not (request := engine.tracker.requests[name]).sequences[0].num_generated:
            engine.step()
        with torch.no_grad():
            weight.mul_(-1)
        done = drain(engine)[name]
        assert request.thoughts and "changed while it was running" in done.completions[0].error
        again = engine.generate(*NEEDLES[0])[0]
        assert again.fingerprint == before.fingerprint and all_bits(again) == all_bits(before)


def test_changed_while_it_thinks():
    """What was thought with other weights is thought again."""
    model = thinking_model()
    with engine_of(model, thinking_window=1) as engine:
        name = engine.add_request(*NEEDLES[0])
        for _ in range(4):
            engine.step()
        with torch.no_grad():
            model.compression.block.layer.mlp.up_proj.weight.mul_(-1)
        done = drain(engine)[name]
        again = engine.generate(*NEEDLES[0])[0]
    assert all_bits(done) == all_bits(again) and done.fingerprint == again.fingerprint


@pytest.mark.parametrize("steps", [3, 14])
def test_changed_while_several_completions_run(steps):
    """All of them read the prompt again, which is thought about once."""
    model = thinking_model()
    wanted = params(30, num_return_sequences=3, logprobs=True)
    prompt = prompt_of(67, 67)
    for settings in ({"thinking_window": 1}, {"max_rows": 21}):
        with engine_of(model, **settings) as engine:
            name = engine.add_request(prompt, wanted)
            for _ in range(steps):
                engine.step()
            with torch.no_grad():
                model.compression.block.layer.mlp.up_proj.weight.mul_(-1)
            done = drain(engine)[name]
            again = engine.generate([prompt], wanted)[0]
        assert [t.token_ids for t in done.thoughts] == [t.token_ids for t in again.thoughts]
        assert all(completion.error is None for completion in done.completions)


def block(model):
    other = copy.deepcopy(model.compression)
    with torch.no_grad():
        other.block.layer.mlp.up_proj.weight.mul_(-1)
    model.compression = other


def hook(model):
    model.compression.block.layer.mlp.register_forward_hook(lambda module, given, found: 2 * found)


@pytest.mark.parametrize("change", [block, hook])
def test_other_blocks_are_noticed(change):
    model = thinking_model()
    with engine_of(model) as engine:
        before = engine.generate(*NEEDLES[0])[0]
        change(model)
        after = engine.generate(*NEEDLES[0])[0]
    assert all_bits(after) != all_bits(before) and after.fingerprint != before.fingerprint
    with engine_of(model) as engine:
        again = engine.generate(*NEEDLES[0])[0]
    assert all_bits(again) == all_bits(after) and again.fingerprint == after.fingerprint


def test_blocks_that_mix_chunks_from_now_on():
    """They are proven again: each chunk runs alone, to the bits of a cold engine."""
    model, (prompt, _) = thinking_model(), NEEDLES[0]
    with engine_of(model, prefix_cache=False) as engine:
        engine.generate([prompt], exact())
        sizes = [_reference(engine)]
        mlp = model.compression.block.layer.mlp
        mlp.up_proj = Mixing(mlp.up_proj)
        alone = all_bits(engine.generate([prompt], exact())[0])
        sizes.append(_reference(engine))
        many = engine.generate([prompt, prompt[3:], prompt[5:]], exact())
        assert all_bits(many[0]) == alone
        mlp.up_proj = mlp.up_proj.linear
        engine.generate([prompt], exact())
        assert [*sizes, _reference(engine)] == [REFERENCE, 1, REFERENCE]


def _reference(engine):
    return engine.core.committer.thinker.batches.reference
