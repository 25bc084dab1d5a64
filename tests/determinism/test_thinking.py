"""Thinking requests keep the contract: thoughts, tokens and log-probabilities, bit for bit."""

import copy
import random
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from tests.support.cases import drain, run, whole
from tests.support.mixes import Liar
from tests.support.sensitive import RowByRowLinear, ShapeSensitiveLinear, replace_linears
from tests.support.thinking import (
    KINDS,
    all_bits,
    engine_of,
    exact,
    params,
    prompt_of,
    thinking_model,
)
from tinyspec import Engine
from tinyspec.determinism.rows import BatchFunction
from tinyspec.thinking.thinker import REFERENCE, SIZES, ChunkBatches

NEEDLES = [
    (prompt_of(67, 67), exact()),
    (prompt_of(80, 80), exact(temperature=0.9, seed=3)),
    (prompt_of(21, 21), exact(num_return_sequences=2, temperature=1.2, seed=5)),
    (prompt_of(5, 5), exact()),
]


def requests_of(rng, seed):
    """Prompts that begin alike, so that they find pages of each other; some think, some do not."""
    bases = [prompt_of(100, seed * 7 + n) for n in range(2)]
    found = []
    for n in range(rng.randint(3, 9)):
        prompt = rng.choice(bases)[: rng.randint(1, 100)]
        if rng.random() < 0.3:
            prompt = prompt + prompt_of(rng.randint(1, 30), seed + n)
        wanted = params(
            rng.randint(1, 20),
            deterministic=rng.random() < 0.6,
            thinking=rng.random() < 0.75,
            temperature=rng.choice((0.0, 0.9)),
            num_return_sequences=rng.choice((1, 1, 2)),
            prompt_logprobs=rng.random() < 0.2,
            logprobs=True,
            seed=n,
        )
        found.append((prompt, wanted))
    return found


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


def alone_and_beside(engine):
    """Whether one deterministic request has the same bits alone and beside others; how many chunks
    run at once."""
    thinker = engine.core.thinker
    one = all_bits(engine.generate(*NEEDLES[1])[0])
    thinker.forget_states()
    return one == all_bits(run(engine, NEEDLES)[1]), thinker.batches.reference


@pytest.mark.parametrize("kind", [Mixing, ByPlace])
def test_blocks_that_mix_chunks_run_one_by_one(kind):
    """As soon as they do, and until they do not. Control: without the probe it shows."""
    model = thinking_model()
    mlp = model.compression.block.layer.mlp
    sound, mixing = mlp.up_proj, kind(mlp.up_proj)
    with engine_of(model, prefix_cache=False) as engine:
        for block, size in ((sound, REFERENCE), (mixing, 1), (sound, REFERENCE)):
            mlp.up_proj = block
            assert alone_and_beside(engine) == (True, size)
    mlp.up_proj = mixing
    with engine_of(model, prefix_cache=False) as engine:
        engine.core.thinker.batches.proven = True
        assert alone_and_beside(engine) == (False, REFERENCE)


def test_fingerprint():
    model = thinking_model()
    parts = []
    for served in (model, thinking_model(chunk_size=4), model.backbone):
        with Engine(served) as engine:
            parts.append(dict(engine.contract.fingerprint.parts))
    thinking, other, plain = (found.pop("thinking", None) for found in parts)
    assert parts == parts[:1] * 3 and thinking and other and thinking != other and plain is None


def negated(block, model):
    with torch.no_grad():
        getattr(model, block).block.layer.mlp.up_proj.weight.mul_(-1)


def replaced(model):
    model.compression = copy.deepcopy(model.compression)
    negated("compression", model)


def hooked(model):
    model.compression.block.layer.mlp.register_forward_hook(lambda module, given, found: 2 * found)


CHANGES = {name: partial(negated, name) for name in ("thinking", "compression")}
CHANGES |= {"replaced": replaced, "hooked": hooked}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changes_of_the_blocks_are_seen(change):
    """Between calls: another fingerprint, and the bits of a new engine."""
    model = thinking_model()

    def answer(engine):
        output = engine.generate(*NEEDLES[0])[0]
        return all_bits(output), output.fingerprint

    with engine_of(model) as engine:
        before = answer(engine)
        change(model)
        after = answer(engine)
    assert after[0] != before[0] and after[1] != before[1]
    with engine_of(model) as engine:
        assert answer(engine) == after


@pytest.mark.parametrize("block", ["thinking", "compression"])
def test_changed_while_a_request_runs(block):
    """What has thought or answered ends by name; a plain request thinks again."""
    model, (prompt, asked) = thinking_model(), NEEDLES[0]
    with engine_of(model, thinking_window=1) as engine:
        for answers in (False, True):
            engine.core.thinker.forget_states()
            name, steps = engine.add_request(*NEEDLES[0]), 0
            request = engine.tracker.requests[name]
            while steps < 4 or (answers and not request.sequences[0].num_generated):
                engine.step()
                steps += 1
            negated(block, model)
            (completion,) = drain(engine)[name].completions
            assert request.thoughts.found and bool(completion.token_ids) == answers
            assert "changed while it was running" in completion.error
        plain = replace(asked, deterministic=False)
        name = engine.add_request(prompt, plain)
        for _ in range(4):
            engine.step()
        negated(block, model)
        done, again = drain(engine)[name], engine.generate([prompt], plain)[0]
    assert all_bits(done) == all_bits(again)


@pytest.mark.parametrize("steps", [3, 14])
@pytest.mark.parametrize("settings", [{"thinking_window": 1}, {"max_rows": 21}], ids=str)
def test_changed_while_several_completions_run(settings, steps):
    """All of them read the prompt again, which is thought about once."""
    model, wanted = thinking_model(), params(30, num_return_sequences=3, logprobs=True)
    prompt = NEEDLES[0][0]
    with engine_of(model, **settings) as engine:
        name = engine.add_request(prompt, wanted)
        for _ in range(steps):
            engine.step()
        negated("compression", model)
        done, again = drain(engine)[name], engine.generate([prompt], wanted)[0]
    assert [t.token_ids for t in done.thoughts] == [t.token_ids for t in again.thoughts]
    assert all(completion.error is None for completion in done.completions)


# Batches of chunks

LENGTH, WIDTH = 3, 32
# By the number of chunks, where sizes do not differ.
BATCHES = {1: [1], 3: [8], 8: [8], 9: [16], 17: [32], 33: [64], 140: [64, 64, 16]}


@pytest.mark.parametrize("kind", [RowByRowLinear, ShapeSensitiveLinear])
def test_every_count_gives_the_same_bits(kind):
    """Those of the reference alone where sizes differ, larger and smaller ones where they do not.
    Control: before it is proven, sizes that differ are taken."""
    linear, sizes = kind(nn.Linear(WIDTH, WIDTH)), []
    given = torch.randn(150, LENGTH, WIDTH)
    wanted = torch.cat([linear(part) for part in given[:144].split(REFERENCE)])

    def recorded(x):
        sizes.append(len(x))
        return linear(x).detach()

    batches = ChunkBatches(lambda: [BatchFunction("it", recorded, LENGTH, torch.empty(0, WIDTH))])

    def equal(count):
        batches.run(recorded, given[:count], fills=(0,))  # looks at sizes
        sizes.clear()
        return torch.equal(batches.run(recorded, given[:count], fills=(0,)), wanted[:count])

    differs = kind is ShapeSensitiveLinear
    assert equal(20) is not differs and sizes == [20]
    batches.prove()
    for count in (*BATCHES, 65):
        assert equal(count) and sum(sizes) >= count and set(sizes) <= set(SIZES)
        if differs:
            assert set(sizes) == {REFERENCE}
        else:
            assert sizes == BATCHES.get(count, sizes)


def test_states_of_plain_requests_are_no_deterministic_ones():
    """Plain ones run in batches of any size until it is known what changes no bit."""
    model = thinking_model()
    mlp = model.compression.block.layer.mlp
    mlp.up_proj = ShapeSensitiveLinear(mlp.up_proj)
    found = []
    for plain_first in (False, True):
        with engine_of(model, prefix_cache=False) as engine:
            if plain_first:
                prompts = [NEEDLES[0][0], NEEDLES[3][0], NEEDLES[0][0][3:]]
                engine.generate(prompts, exact(deterministic=False))
                assert engine.core.thinker._states
            found.append(all_bits(engine.generate(*NEEDLES[0])[0]))
    assert found[0] == found[1]


# Random mixes of requests that think and that do not, in random engines: the bits of a cold one.


def model_of(rng):
    settings = {"chunk_size": rng.choice((1, 3, 5, 8, 8, 16))}
    settings |= {"max_thought_tokens": rng.choice((2, 4, 9)), "quiet": rng.choice((0.0, 2.0, 3.0))}
    model = thinking_model(rng.choice(list(KINDS)), **settings)
    return replace_linears(model, ShapeSensitiveLinear) if rng.random() < 0.5 else model


def settings_of(rng, seed):
    found = {"thinking_window": rng.choice((1, 2, 3, 8, None)), "page_size": rng.choice((8, 16))}
    found["verify"] = rng.choice(("auto", "auto", "always", "padded"))
    for chance, name, values in (
        (0.5, "max_rows", (17, 20, 33, 64)),
        (0.4, "num_pages", (36, 48)),
        (0.4, "drafter", (Liar(seed),)),
        (0.3, "overlap", (True,)),
        (0.3, "max_sequences", (1, 2, 4)),
    ):
        if rng.random() < chance:
            found[name] = rng.choice(values)
    return found


def run_anyhow(engine, requests, rng):
    """Outputs by number, of those that were not aborted; preempted now and then."""
    ids, done, aborted = {}, {}, set()
    for n in rng.sample(range(len(requests)), len(requests)):
        ids[n] = engine.add_request(*requests[n])
        for _ in range(rng.randint(0, 4)):
            done |= {output.request_id: output for output in engine.step()}
        if rng.random() < 0.1 and ids[n] in engine.tracker.requests:
            engine.abort(ids[n])
            aborted.add(n)
        if rng.random() < 0.1:
            engine.admission.preempt_all()
    done |= drain(engine)
    assert whole(engine)
    return {n: done[ids[n]] for n in ids if n not in aborted}


def said(output):
    return all_bits(output), output.prompt_logprobs


def test_a_random_mix():
    run_mix(5)


@pytest.mark.slow("random mixes", 4, cases=50)
def test_many_random_mixes(case_seed):
    run_mix(case_seed)


def run_mix(seed):
    rng = random.Random(seed)
    model, requests = model_of(rng), requests_of(rng, seed)
    exact = [n for n, (_, wanted) in enumerate(requests) if wanted.deterministic]
    with engine_of(model, prefix_cache=False, thinking_window=1) as engine:
        cold = {n: said(engine.generate([requests[n][0]], requests[n][1])[0]) for n in exact}
    with engine_of(model, **settings_of(rng, seed)) as engine:
        for _ in range(2):  # a cold cache, and a warm one
            outputs = run_anyhow(engine, requests, rng)
            for n in outputs.keys() & cold.keys():
                assert said(outputs[n]) == cold[n]
            assert all(c.error is None for o in outputs.values() for c in o.completions)
