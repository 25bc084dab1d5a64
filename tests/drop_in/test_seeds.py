"""Seeds, and torch's global generator, which belongs to the caller."""

from __future__ import annotations

import pytest
import torch
import transformers

import tinyspec
from tests.support.drop_in import PAD, SMALL, AfterEven, patched, random_ids
from tests.support.tiny import tiny

PROMPTS = [random_ids(9), random_ids(14, 1), random_ids(5, 2), random_ids(20, 3)]
# Nearly uniform, so that two samples of ten tokens are never the same by chance.
SAMPLED = {"do_sample": True, "temperature": 3.0, "top_k": 0, "max_new_tokens": 10}


@pytest.fixture(scope="module")
def model():
    with patched(tiny()) as model:
        yield model


def new_tokens(model, prompts=None, **arguments) -> list[list[int]]:
    prompts = prompts or PROMPTS
    out = model.generate(prompts, **{"pad_token_id": PAD, **SAMPLED, **arguments})
    return out[:, max(map(len, prompts)) :].tolist()


def test_scripts_that_set_a_seed_repeat(model):
    transformers.set_seed(5)
    first = [new_tokens(model), new_tokens(model)]
    transformers.set_seed(5)
    second = [new_tokens(model), new_tokens(model)]
    assert first == second
    assert first[0] != first[1]
    transformers.set_seed(6)
    assert new_tokens(model) != first[0]


def test_without_a_seed_every_row_and_every_call_has_a_sample_of_its_own(model):
    rows = [tokens for _ in range(3) for tokens in new_tokens(model, [PROMPTS[0]] * 4)]
    assert len({tuple(tokens) for tokens in rows}) == 12
    samples = new_tokens(model, [PROMPTS[0]], num_return_sequences=5)
    assert len({tuple(tokens) for tokens in samples}) == 5


def test_a_new_process_or_model_repeats(model):
    transformers.set_seed(5)
    first = new_tokens(model)
    with patched(tiny()) as other:
        transformers.set_seed(5)
        assert new_tokens(other) == first


@pytest.mark.parametrize(
    "arguments",
    [
        {"do_sample": False},
        {"do_sample": False, "deterministic": True},
        {"do_sample": [False] * 4, "seed": [1, None, 2, None]},
        {"do_sample": False, "prompt_lookup_num_tokens": 3},
        {"seed": 3},
        {"seed": [1, 2, 3, 4], "deterministic": [True, False, True, False]},
        {"do_sample": [True, False, True, False], "seed": [1, None, 2, None]},
        {"seed": 3, "num_return_sequences": 3},
    ],
    ids=str,
)
def test_the_global_generator_is_left_alone(arguments):
    """Also by patching, by the first call's probes and by unpatching."""
    before = torch.get_rng_state()
    with patched(tiny()) as model:
        new_tokens(model, **arguments)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("asked", [{}, {"seed": [1, None, 2, 3]}], ids=["no seeds", "one without"])
def test_control_without_a_seed_one_number_is_drawn(model, asked):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    new_tokens(model, **asked)
    after = torch.get_rng_state()
    assert not torch.equal(after, before)
    torch.manual_seed(1)
    torch.randint(2**62, (1,))
    assert torch.equal(after, torch.get_rng_state())


def test_a_refused_call_draws_nothing(model):
    before = torch.get_rng_state()
    for wrong in ({"temperature": -1.0}, {"seed": "x"}, {"max_new_tokens": [1, 2]}, {"what": 1}):
        with pytest.raises((ValueError, TypeError)):
            new_tokens(model, **wrong)
    assert torch.equal(torch.get_rng_state(), before)


OTHERS = (
    {"do_sample": [True, False, True, False]},
    {"seed": [None, 1, None, 3]},
    {"temperature": [3.0, 0.5, 3.0, 2.0], "top_p": [1.0, 0.5, 1.0, 0.9]},
    {"num_return_sequences": [1, 3, 1, 2]},
    {"max_new_tokens": [10, 1, 10, 30]},
    {"deterministic": [False, True, False, True]},
    {"eos_token_id": [[127], list(range(100)), [127], [1, 2, 3]]},
    {"logits_processor": [[], [AfterEven()], [], [AfterEven()]]},
    {"repetition_penalty": [1.0, 1.3, 1.0, 0.7]},
)


@pytest.mark.parametrize("others", OTHERS, ids=lambda o: next(iter(o)))
def test_a_rows_seed_does_not_depend_on_other_rows(model, others):
    """Rows 0 and 2 bring no seed and ask the same every time."""
    transformers.set_seed(9)
    alike = {"eos_token_id": [127]}
    expected = new_tokens(model, **alike)
    transformers.set_seed(9)
    found = new_tokens(model, **{**alike, **others})
    copies = others.get("num_return_sequences", [1] * 4)
    for row in (0, 2):
        assert found[sum(copies[:row])][:10] == expected[row]


@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS[:3], [PROMPTS[0], *PROMPTS]])
def test_nor_on_how_many_there_are_behind_it(model, prompts):
    transformers.set_seed(9)
    expected = new_tokens(model)[0]
    transformers.set_seed(9)
    assert new_tokens(model, prompts)[0] == expected


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_seed_is_all_that_a_sample_depends_on(model, deterministic):
    """The same seed gives the same tokens at every place; another seed gives others."""
    asked = {"deterministic": deterministic}
    first = new_tokens(model, [PROMPTS[0]], seed=7, **asked)[0]
    found = new_tokens(model, [PROMPTS[0]] * 4, seed=[1, 7, 7, 8], **asked)
    assert found[1] == found[2] == first
    assert found[0] != first and found[3] != first
    with patched(tiny()) as other:
        assert new_tokens(other, [PROMPTS[0]], seed=7, **asked)[0] == first


def test_completions_do_not_depend_on_how_many_are_asked_for(model):
    two = new_tokens(model, [PROMPTS[1]], seed=7, num_return_sequences=2)
    five = new_tokens(model, [PROMPTS[1]], seed=7, num_return_sequences=5)
    assert five[:2] == two
    assert new_tokens(model, [PROMPTS[1]], seed=7)[0] == two[0]


def test_control_on_torchs_own_sampling_a_row_does_depend_on_others():
    """What per-request seeds are for: transformers draws for the batch as it is."""
    model = tiny()
    ids = torch.tensor([PROMPTS[0], PROMPTS[0]])
    transformers.set_seed(9)
    both = model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=PAD, **SAMPLED)
    transformers.set_seed(9)
    one = model.generate(
        ids[1:], attention_mask=torch.ones_like(ids[1:]), pad_token_id=PAD, **SAMPLED
    )
    assert not torch.equal(both[1], one[0])
    tinyspec.patch(model, SMALL)
    transformers.set_seed(9)
    both = model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=PAD, **SAMPLED)
    transformers.set_seed(9)
    first = model.generate(
        ids[:1], attention_mask=torch.ones_like(ids[:1]), pad_token_id=PAD, **SAMPLED
    )
    assert torch.equal(both[0], first[0])


def test_a_call_that_transformers_serves_draws_as_without_tinyspec(model):
    ids = torch.tensor([[5, 17, 3]])
    asked = {"do_sample": True, "max_new_tokens": 511, "pad_token_id": PAD}  # beyond the positions
    drawn = []
    for each in (model, tiny()):
        torch.manual_seed(0)
        drawn.append(each.generate(ids, **asked))
    assert torch.equal(*drawn)
