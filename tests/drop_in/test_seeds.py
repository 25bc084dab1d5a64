"""Seeds and ``deterministic``: as arguments, in a config, in ``patch``; and torch's global
generator, which belongs to the caller."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import transformers
from transformers import GenerationConfig

import tinyspec
from tests.support.drop_in import PAD, SMALL, patched, random_ids
from tests.support.tiny import tiny

PROMPT = random_ids(9)


# Nearly uniform, so that two samples of ten tokens are never the same by chance.
SAMPLED = {"do_sample": True, "temperature": 3.0, "top_k": 0, "max_new_tokens": 10}
SAMPLED |= {"pad_token_id": PAD}


def config(**settings):
    return GenerationConfig(**SAMPLED, **settings)


def rows(model, prompts, **arguments):
    return model.generate(prompts, **arguments)[:, max(map(len, prompts)) :].tolist()


def in_the_call(model, prompts, **asked):
    return rows(model, prompts, generation_config=config(**asked))


def in_the_model(model, prompts, **asked):
    before = copy.deepcopy(model.generation_config)
    model.generation_config = config(**asked)
    try:
        return rows(model, prompts)
    finally:
        model.generation_config = before


def in_the_patch(model, prompts, **asked):
    tinyspec.unpatch(model)
    tinyspec.patch(model, SMALL, **asked)
    return rows(model, prompts, **SAMPLED)


WAYS = pytest.mark.parametrize("way", [in_the_call, in_the_model, in_the_patch])


@WAYS
def test_deterministic_is_honoured(way, monkeypatch):
    """What it refuses is refused."""
    monkeypatch.setitem(SAMPLED, "max_time", 60.0)
    with patched(tiny()) as model:
        way(model, [PROMPT], deterministic=False)
        with pytest.raises(ValueError, match="max_time"):
            way(model, [PROMPT], deterministic=True)


A, B = PROMPT, random_ids(5, 1)


@pytest.mark.parametrize("where", ["patch", "config"])
def test_rollouts_do_not_depend_on_how_rows_are_spread_over_calls(where):
    """Of two prompts; greedy calls in between do not count. Control: another base."""

    def rollouts(size, seed=5):
        order, found = [A, B, B, A, A, B, A, B], {}
        with patched(tiny()) as model:
            asked = {"seed": seed} if where == "config" else {}
            model.generate.reseed(seed if where == "patch" else None)
            for start in range(0, len(order), size):
                part = order[start : start + size]
                for prompt, row in zip(part, in_the_call(model, part, **asked), strict=True):
                    found.setdefault(tuple(prompt), []).append(row)
                rows(model, part, max_new_tokens=1, do_sample=False, pad_token_id=PAD)
        return found

    first = rollouts(8)
    assert first == rollouts(1) == rollouts(2) == rollouts(4) == rollouts(5)
    assert len({tuple(row) for group in first.values() for row in group}) == 8
    assert rollouts(8, seed=6) != first


def test_a_resumed_run_goes_on():
    """From a base of seed and step. Control: from the base that it began with."""

    def run(steps, base=lambda step: (5 << 32) + step):
        with patched(tiny()) as model:
            for step in steps:
                model.generate.reseed(base(step))
                yield rows(model, [A, A], **SAMPLED), rows(model, [A, B], **SAMPLED)

    whole = list(run(range(4)))
    assert list(run(range(2, 4))) == whole[2:]
    assert list(run(range(2, 4), lambda step: 5 << 32)) != whole[2:]


def test_an_argument_is_the_seed_of_every_row_and_seeds_are_recorded():
    """It comes before all else, also as numpy's or torch's; a recorded one repeats its row."""
    asked = config(seed=5, return_dict_in_generate=True)
    with patched(tiny()) as model:
        given = rows(model, [PROMPT] * 2, seed=7, **SAMPLED)
        assert given[0] == given[1]
        for number in (np.int64, torch.tensor):
            flags = {"seed": number(7), "deterministic": number(0) != 0}
            assert rows(model, [PROMPT] * 2, **flags, **SAMPLED) == given
        found = model.generate([PROMPT] * 4, generation_config=asked)
        assert found.seeds == model.generate.seeds and len(set(found.seeds)) == 4
        tokens = found.sequences[:, len(PROMPT) :].tolist()
        assert rows(model, [PROMPT] * 4, seed=found.seeds, **SAMPLED) == tokens
        assert rows(model, [PROMPT], seed=found.seeds[2], **SAMPLED) == tokens[2:3]
        greedy = model.generate([PROMPT], max_new_tokens=2, return_dict_in_generate=True)
        assert greedy.seeds == [None] and "seeds" not in greedy
        model.generation_config.seed = 3
        mixed = rows(model, [PROMPT] * 3, seed=[7, None, None], **SAMPLED)
        assert mixed[0] == given[0] and mixed[1] != mixed[2]
        assert model.generate.seeds[0] == 7


def test_bases_and_flags_that_are_none_are_refused():
    with patched(tiny()) as model:
        for seed in (-1, True, "5"):
            with pytest.raises(ValueError, match=r"^seed="):
                in_the_call(model, [PROMPT], seed=seed)
        with pytest.raises(ValueError, match=r"^seed=-1"):
            model.generate.reseed(-1)
        for wrong in ({"seed": -1}, {"deterministic": "yes"}):
            tinyspec.unpatch(model)
            with pytest.raises(ValueError, match=rf"^{next(iter(wrong))}=.* is not allowed"):
                tinyspec.patch(model, **wrong)
            assert "generate" not in vars(model)


def test_what_is_asked_for_or_promised_is_never_lost():
    """Beams are not served: transformers would run, and nothing would be deterministic."""
    beams = {"num_beams": 2, "max_new_tokens": 3, "pad_token_id": PAD}
    given = torch.tensor([PROMPT])
    with patched(tiny()) as model:
        for way in (in_the_call, in_the_model):
            for name, value in (("deterministic", True), ("seed", 5)):
                with pytest.raises(NotImplementedError, match=f"beam.*{name}"):
                    way(model, [PROMPT], num_beams=2, **{name: value})
        tinyspec.unpatch(model)
        tinyspec.patch(model, SMALL, deterministic=True)
        with pytest.raises(NotImplementedError, match=r"beam.*deterministic=True"):
            model.generate(given, **beams)
        assert model.generate(given, deterministic=False, **beams).shape == (1, 12)
        plain = GenerationConfig(deterministic=False, **beams)
        assert model.generate(given, generation_config=plain).shape == (1, 12)
        tinyspec.unpatch(model)
        tinyspec.patch(model, SMALL, seed=5)  # a base for calls that sample by tinyspec
        assert model.generate(given, **beams).shape == (1, 12)


def halved(model):
    """With a hook that attention cannot be served with."""
    attention = model.model.layers[0].self_attn
    return attention.register_forward_hook(lambda m, a, out: (out[0] * 0.5, *out[1:]))


def test_a_model_that_cannot_be_served_any_more_runs_its_own_generate(caplog):
    asked = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": PAD}
    with patched(tiny()) as model:
        first = rows(model, [PROMPT], **asked)
        handle, twin = halved(model), tiny()
        halved(twin)
        given = torch.tensor([PROMPT])
        assert torch.equal(model.generate(given, **asked), twin.generate(given, **asked))
        assert "the model as it is now" in caplog.text and "hook" in caplog.text
        with pytest.raises(NotImplementedError, match=r"hook.*deterministic=True"):
            rows(model, [PROMPT], deterministic=True, **asked)
        handle.remove()
        passes = model.generate.stats().passes.copy()
        assert rows(model, [PROMPT], **asked) == first
        assert model.generate.stats().passes != passes, "served again"


PROMPTS = [random_ids(9), random_ids(14, 1), random_ids(5, 2), random_ids(20, 3)]


@pytest.fixture(scope="module")
def model():
    with patched(tiny()) as model:
        yield model


def new_tokens(model, prompts=None, **arguments) -> list[list[int]]:
    return rows(model, prompts or PROMPTS, **{**SAMPLED, **arguments})


@pytest.mark.parametrize(
    "arguments",
    [
        {"do_sample": False, "deterministic": True},
        {"do_sample": [True, False, True, False], "seed": [1, None, 2, None]},
        {"seed": 3, "num_return_sequences": 3},
    ],
    ids=str,
)
def test_the_global_generator_is_left_alone(arguments):
    """Also by patching, by the first call's probes, by unpatching, and by a refused call."""
    before = torch.get_rng_state()
    with patched(tiny()) as model:
        new_tokens(model, **arguments)
        for wrong in ({"temperature": -1.0}, {"seed": "x"}, {"max_new_tokens": [1, 2]}):
            with pytest.raises(ValueError):
                new_tokens(model, **wrong)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("asked", [{}, {"seed": [1, None, 2, 3]}], ids=["no seeds", "one without"])
def test_without_a_seed_one_number_is_drawn(model, asked):
    """So that scripts that set a seed repeat, and the next call samples others."""
    transformers.set_seed(1)
    first = new_tokens(model, **asked)
    after = torch.get_rng_state()
    assert new_tokens(model, **asked) != first
    transformers.set_seed(1)
    assert new_tokens(model, **asked) == first
    transformers.set_seed(1)
    torch.randint(2**62, (1,))
    assert torch.equal(after, torch.get_rng_state())
    equal = new_tokens(model, [PROMPTS[0]] * 2)
    assert equal[0] != equal[1], "rows have seeds of their own"


OTHERS = (
    {"do_sample": [True, False, True, False], "seed": [None, 1, None, 3]},
    {"num_return_sequences": [1, 3, 1, 2], "repetition_penalty": [1.0, 1.3, 1.0, 0.7]},
    {"max_new_tokens": [10, 1, 10, 30], "deterministic": [False, True, False, True]},
)


def test_a_rows_seed_does_not_depend_on_other_rows(model):
    """Rows 0 and 2 bring no seed and ask the same every time."""
    asked = {"eos_token_id": [127]}
    transformers.set_seed(9)
    expected = new_tokens(model, **asked)
    for others in OTHERS:
        transformers.set_seed(9)
        found = new_tokens(model, **asked, **others)
        copies = others.get("num_return_sequences", [1] * 4)
        for row in (0, 2):
            assert found[sum(copies[:row])][:10] == expected[row]


def test_a_call_that_transformers_serves_draws_as_without_tinyspec(model):
    ids = torch.tensor([[5, 17, 3]])
    asked = {"do_sample": True, "max_new_tokens": 511, "pad_token_id": PAD}  # beyond the positions
    drawn = []
    for each in (model, tiny()):
        torch.manual_seed(0)
        drawn.append(each.generate(ids, **asked))
    assert torch.equal(*drawn)
