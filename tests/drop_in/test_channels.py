"""``deterministic`` and ``seed`` where a library passes on a config alone, or not even that."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
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
    asked = []
    own = tinyspec.drop_in.settings.PreparedRequest.params
    monkeypatch.setattr(
        tinyspec.drop_in.settings.PreparedRequest,
        "params",
        lambda self, seed, deterministic, size: (
            asked.append(deterministic),
            own(self, seed, deterministic, size),
        )[1],
    )
    with patched(tiny()) as model:
        for value in (True, False):
            way(model, [PROMPT], deterministic=value)
    assert asked == [True, False]


@WAYS
def test_equal_prompts_differ_and_a_script_repeats(way):
    """A group of eight as GRPO samples it, in one call of 8 or as one of two groups in 16."""

    def script(groups):
        with patched(tiny()) as model:
            first = way(model, [PROMPT] * 8 * groups, seed=5)
            return first + rows(model, [PROMPT] * 8, generation_config=config(seed=5))

    for groups in (1, 2):
        found = script(groups)
        assert found == script(groups)
        assert len({tuple(row) for row in found}) == 8 * groups + 8


@WAYS
@pytest.mark.parametrize("number", [np.int64, torch.tensor], ids=["numpy", "torch"])
def test_numbers_of_numpy_and_torch(way, number):
    with patched(tiny()) as model:
        expected = way(model, [PROMPT], seed=5, deterministic=False)
    with patched(tiny()) as model:
        given = {"seed": number(5), "deterministic": number(0) != 0}
        assert way(model, [PROMPT], **given) == expected
        with pytest.raises(ValueError, match=r"^seed=-1 is not allowed"):
            way(model, [PROMPT], seed=number(-1))


def test_the_number_of_a_call_begins_anew_with_another_base():
    with patched(tiny()) as model:
        first = [in_the_call(model, [PROMPT], seed=seed) for seed in (1, 1, 2, 1)]
    assert first[0] == first[3] != first[1] and first[2] not in first[:2]


def test_an_argument_is_the_seed_of_every_row_and_comes_before_all_else():
    with patched(tiny()) as model:
        given = rows(model, [PROMPT] * 2, seed=7, **SAMPLED)
        assert given[0] == given[1]
        model.generation_config.seed = 3
        mixed = rows(model, [PROMPT] * 3, seed=[7, None, None], **SAMPLED)
        assert mixed[0] == given[0] and mixed[1] != mixed[2]
        assert model.generate.seeds[0] == 7


def test_seeds_are_recorded_and_repeat_a_row():
    asked = config(seed=5, return_dict_in_generate=True)
    with patched(tiny()) as model:
        found = model.generate([PROMPT] * 4, generation_config=asked)
        assert found.seeds == model.generate.seeds and len(set(found.seeds)) == 4
        tokens = found.sequences[:, len(PROMPT) :].tolist()
        assert rows(model, [PROMPT] * 4, seed=found.seeds, **SAMPLED) == tokens
        assert rows(model, [PROMPT], seed=found.seeds[2], **SAMPLED) == tokens[2:3]
        greedy = model.generate([PROMPT], max_new_tokens=2, return_dict_in_generate=True)
        assert greedy.seeds == [None] and "seeds" not in greedy


def test_prompts_as_embeddings_are_told_apart():
    ids = torch.tensor([PROMPT, PROMPT, PROMPT[::-1]])
    with patched(tiny()) as model:
        embeds = model.get_input_embeddings()(ids).detach()
        model.generate(inputs_embeds=embeds, generation_config=config(seed=5))
        seeds = model.generate.seeds
    assert seeds[0] == seeds[2] != seeds[1]


@pytest.mark.parametrize("seed", [-1, 2**64, True, "5", 1.5])
def test_a_base_that_is_none_is_refused(seed):
    with patched(tiny()) as model:
        with pytest.raises(ValueError, match=r"^seed="):
            in_the_call(model, [PROMPT], seed=seed)
        tinyspec.unpatch(model)
        with pytest.raises(ValueError, match=r"^seed="):
            tinyspec.patch(model, seed=seed)
        assert "generate" not in vars(model)
        with pytest.raises(ValueError, match=r"^deterministic='yes' is not allowed: True or False"):
            tinyspec.patch(model, deterministic="yes")


@pytest.mark.parametrize("asked", [{"deterministic": True}, {"seed": 5}], ids=str)
@pytest.mark.parametrize("way", [in_the_call, in_the_model])
def test_what_is_asked_for_is_never_lost(way, asked):
    """Beams are not served: transformers would run, and nothing would be deterministic."""
    (name,) = asked
    with patched(tiny()) as model, pytest.raises(NotImplementedError, match=f"beam.*{name}"):
        way(model, [PROMPT], num_beams=2, **asked)


def test_what_patch_promises_is_never_lost():
    beams_config = {"num_beams": 2, "max_new_tokens": 3}
    beams = {"inputs": torch.tensor([PROMPT]), **beams_config}
    with patched(tiny()) as model:
        tinyspec.unpatch(model)
        tinyspec.patch(model, SMALL, deterministic=True)
        with pytest.raises(NotImplementedError, match=r"beam.*deterministic=True"):
            model.generate(**beams)
        assert model.generate(deterministic=False, **beams).shape == (1, 12)
        plain = GenerationConfig(deterministic=False, pad_token_id=PAD, **beams_config)
        given = beams["inputs"]
        assert model.generate(given, generation_config=plain).shape == (1, 12)
        tinyspec.unpatch(model)
        tinyspec.patch(model, SMALL, seed=5)  # a base for calls that sample by tinyspec
        assert model.generate(**beams).shape == (1, 12)


def test_a_model_that_cannot_be_served_any_more_runs_its_own_generate(caplog):
    asked = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": PAD}
    with patched(tiny()) as model:
        first = rows(model, [PROMPT], **asked)
        attention = model.model.layers[0].self_attn
        handle = attention.register_forward_hook(lambda m, a, out: (out[0] * 0.5, *out[1:]))
        twin = tiny()
        twin.model.layers[0].self_attn.register_forward_hook(
            lambda m, a, out: (out[0] * 0.5, *out[1:])
        )
        given = torch.tensor([PROMPT])
        assert torch.equal(model.generate(given, **asked), twin.generate(given, **asked))
        assert "the model as it is now" in caplog.text and "hook" in caplog.text
        with pytest.raises(NotImplementedError, match=r"hook.*deterministic=True"):
            rows(model, [PROMPT], deterministic=True, **asked)
        handle.remove()
        passes = model.generate.stats().passes.copy()
        assert rows(model, [PROMPT], **asked) == first
        assert model.generate.stats().passes != passes, "served again"
