"""Prompts in every form that ``model.generate`` of a patched model takes; assistants and prompt
lookup, at any batch size; and ``custom_generate=tinyspec.generate``."""

import copy
import logging
from unittest.mock import Mock

import pytest
import torch
from transformers.generation import MaxLengthCriteria

import tinyspec
from tests.support import judge
from tests.support.budget import first
from tests.support.hooks import Backwards, Until
from tests.support.judge import BASE, BLOCK, PAD, ROWS, by_row, greedy, joined, listen, one, pair
from tests.support.tiny import VOCAB, tiny
from tinyspec import generate
from tinyspec.drop_in import call
from tinyspec.drop_in.prepare import prepare

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
LEFT, LEFT_MASK = BLOCK, judge.MASK
RIGHT, RIGHT_MASK = judge.padded(ROWS, "right")


def transformers_own():
    """What transformers generates behind ``ROWS``, one by one, in the place of the block."""
    return joined(LEFT, ROWS, by_row(pair()[1], ROWS, lambda: BASE))


FORMS = {
    "inputs": lambda: ((LEFT,), {"attention_mask": LEFT_MASK}),
    "input-ids": lambda: ((), {"input_ids": LEFT, "attention_mask": LEFT_MASK.float()}),
    "no-mask": lambda: ((LEFT,), {}),
    "mask-none": lambda: ((LEFT,), {"attention_mask": None, "position_ids": None}),
    "int32": lambda: ((LEFT.int(),), {"attention_mask": LEFT_MASK.int()}),
    "array": lambda: ((LEFT.numpy(),), {"attention_mask": LEFT_MASK.numpy()}),
    "lists": lambda: ((LEFT.tolist(),), {"attention_mask": LEFT_MASK.tolist()}),
    "ragged": lambda: ((ROWS,), {}),
    "ragged-tensors": lambda: (([torch.tensor(row) for row in ROWS],), {}),
    "ragged-arrays": lambda: (([torch.tensor(row).int().numpy() for row in ROWS],), {}),
    "ragged-mask": lambda: (
        ([[9, *row] for row in ROWS],),
        {"attention_mask": [[0, *[1 for _ in row]] for row in ROWS]},
    ),
    "not-contiguous": lambda: ((LEFT.T.contiguous().T,), {"attention_mask": LEFT_MASK}),
}


def test_every_form_of_a_batch():
    model, _ = pair()
    judged = transformers_own()
    for name, form in FORMS.items():
        given, named = form()
        tokens = model.generate(*given, **named, **BASE)
        assert tokens.dtype == torch.long and torch.equal(tokens, judged), name


@pytest.mark.parametrize("family", judge.FAMILIES)
def test_mask_with_holes(family):
    """Judged by the rows without the holes, and by transformers' own with them."""
    model, own = pair(family)
    ids = torch.randint(2, VOCAB, (4, 14))
    mask = (torch.rand(4, 14) < 0.6).long()
    mask[:, -1] = 1  # transformers takes the last column's logits, padding or not
    rows = [row[keep != 0].tolist() for row, keep in zip(ids, mask, strict=True)]
    tokens = model.generate(ids, attention_mask=mask, **BASE)
    assert torch.equal(tokens, joined(ids, rows, by_row(own, rows, lambda: BASE)))
    assert torch.equal(tokens, own.generate(ids, attention_mask=mask, **BASE))


PADS = [
    ([[9, PAD, 11, 12, PAD, 14]], {}),
    ([[PAD, PAD, 9, 11]], {}),
    ([[PAD, 9, PAD, 11]], {"eos_token_id": PAD}),
    ([[PAD, 9, PAD, 11]], {"eos_token_id": [77, PAD]}),
    ([[PAD, 9, PAD, 11]], {"pad_token_id": None}),
    ([[PAD, 9, PAD, 11], [4, 5, 6, 7]], {}),
]


def test_pads_without_a_mask():
    """transformers takes every pad token for padding, unless it ends sequences as well; a list has
    none."""
    model, own = pair()
    for ids, settings in PADS:
        given = {"inputs": torch.tensor(ids), **BASE, **settings}
        assert torch.equal(model.generate(**given), own.generate(**given)), (ids, settings)
    prompt = [5, PAD, 9, 11, PAD, 33]
    new = lambda ids: model.generate(ids, **BASE, deterministic=True)[0, -judge.NEW :]  # noqa: E731
    for other in ([4], [4, 5, 6, 7, 8, 9]):
        assert torch.equal(new([prompt, other]), new([prompt]))
    assert not torch.equal(new(torch.tensor([prompt])), new([prompt])), "of a tensor it is padding"


LENGTHS = len({len(row) for row in ROWS})
# How often ``ROWS`` are prepared with these settings.
PREPARED = {
    "new-tokens": ({}, 1),
    "least-new-tokens": ({"min_new_tokens": 3, "min_length": 9, "eos_token_id": 5}, 1),
    "sampled": ({"do_sample": True, "temperature": 0.8, "top_k": 9, "top_p": 0.9, "seed": 1}, 1),
    "max-length": ({"max_new_tokens": None, "max_length": 40}, LENGTHS),
    "min-length": ({"min_length": 9, "eos_token_id": 5}, LENGTHS),
    "criterion": ({"stopping_criteria": [MaxLengthCriteria(judge.NEW + len(ROWS[0]))]}, LENGTHS),
    "processor": ({"suppress_tokens": [4]}, LENGTHS),
}


@pytest.mark.parametrize("name", PREPARED)
def test_prompts_of_other_lengths_are_prepared_together(name, monkeypatch):
    """Where transformers makes the same of each; what it makes: tests/drop_in/test_random.py."""
    (settings, times), counted = PREPARED[name], Mock(side_effect=prepare)
    monkeypatch.setattr(call.prepare, "prepare", counted)
    pair()[0].generate(ROWS, **BASE | settings)
    assert counted.call_count == times


def test_a_row_of_one_token_and_a_flat_tensor():
    model, own = pair()
    for row in (ROWS[2], ROWS[0]):
        judged = own.generate(one(row), **BASE)
        for form in (torch.tensor(row), row, [row], one(row)):
            assert torch.equal(model.generate(form, **BASE), judged)


EMBEDS = {
    "with-mask": lambda e: {"attention_mask": torch.ones(e.shape[:2])},
    "max-length": lambda e: {"max_length": 20, "max_new_tokens": None},
    "default-length": lambda e: {"max_new_tokens": None},
    "least": lambda e: {"eos_token_id": [3, 4, 5], "min_length": 9},
    "encoder": lambda e: {"encoder_repetition_penalty": 3.0},
    "begin": lambda e: {"begin_suppress_tokens": [3, 5]},
}


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_embeddings(family):
    """One row, and two of a length, which transformers' batch then holds without pads."""
    model, own = pair(family)
    for ids in (one(ROWS[0]), torch.tensor([ROWS[0], ROWS[1][:5]])):
        embeds = model.get_input_embeddings()(ids).detach().flip(1) * 1.1
        for name, case in EMBEDS.items():
            asked = {**BASE, "inputs_embeds": embeds, **case(embeds)}
            ours, theirs = (listen(m.generate, **asked) for m in (model, own))
            assert ours.error is None and theirs.error is None, name
            assert torch.equal(ours.result, theirs.result), name
            assert len(ids) > 1 or ours.lines == theirs.lines, name


def test_embeddings_of_tokens_are_the_tokens():
    model, _ = pair()
    embeds = model.get_input_embeddings()(LEFT).detach()
    settings = {**BASE, "inputs_embeds": embeds, "attention_mask": LEFT_MASK}
    new = transformers_own()[:, LEFT.shape[1] :]
    assert torch.equal(model.generate(**settings), new)
    off = model.generate(**settings | {"inputs_embeds": embeds.flip(-1)})
    assert not torch.equal(off, new), "control"


PADS_BEHIND = {
    "mask": lambda: {"input_ids": RIGHT, "attention_mask": RIGHT_MASK},
    "no-mask": lambda: {"inputs": RIGHT},
    "embeddings": lambda: {
        "inputs_embeds": pair()[1].get_input_embeddings()(RIGHT).detach(),
        "attention_mask": RIGHT_MASK,
    },
}


@pytest.mark.parametrize("given", PADS_BEHIND.values(), ids=PADS_BEHIND)
def test_rows_that_end_in_pads_are_transformers_affair(given, caplog):
    """It goes on behind the pads, with its warning; a line in the log says what to do instead."""
    own = pair()[1]
    model = copy.deepcopy(own)
    tinyspec.patch(model)
    with caplog.at_level(logging.INFO, logger="tinyspec"):
        ours, again, theirs = (listen(m.generate, **given(), **BASE) for m in (model, model, own))
    assert torch.equal(ours.result, theirs.result) and torch.equal(again.result, theirs.result)
    assert ours.lines == theirs.lines
    lines = [r.getMessage() for r in caplog.records if r.name == "tinyspec"]
    assert len(lines) == 1 and "rows that end in pads (pad on the left" in lines[0]
    for more in ({"deterministic": True}, {"seed": 3}, {"max_new_tokens": [3] * len(RIGHT)}):
        with pytest.raises(NotImplementedError, match=r"rows that end in pads \(pad on the left"):
            model.generate(**given() | BASE | more)


BATCH = {"input_ids": BLOCK, "attention_mask": judge.MASK}
DICT = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
ASSISTED = {
    "random": lambda m: {"assistant_model": tiny(seed=3)},
    "other-family": lambda m: {"assistant_model": tiny("gpt2", seed=4)},
    "lookup-longer": lambda m: {"prompt_lookup_num_tokens": 2, "max_matching_ngram_size": 3},
    "lookup-eos": lambda m: {"prompt_lookup_num_tokens": 4, "eos_token_id": greedy()[1][3]},
    "criterion": lambda m: {"prompt_lookup_num_tokens": 2, "stopping_criteria": [Until(20)]},
    "itself": lambda m: {"assistant_model": m, "eos_token_id": -1},
    "eos": lambda m: {"assistant_model": tiny(), "eos_token_id": greedy()[0][4]},
    "penalty": lambda m: {"assistant_model": tiny(), "repetition_penalty": 2.0},
    "processor": lambda m: {"assistant_model": tiny(), "logits_processor": [Backwards()]},
    "least": lambda m: {
        "prompt_lookup_num_tokens": 4,
        "eos_token_id": greedy()[0][2],
        "min_new_tokens": 5,
    },
    "max-length": lambda m: {"assistant_model": tiny(), "max_length": 22, "max_new_tokens": None},
    "steady": lambda m: {"assistant_model": tiny(), "num_assistant_tokens": 2},
}


@pytest.mark.parametrize("name", first(6, ASSISTED, 0.4))
def test_assisted_tokens_equal_transformers(name):
    """At batch 1 as transformers has them, and for a batch, which it refuses."""
    model, own = pair()
    settings = lambda: {**BASE, **ASSISTED[name](model)}  # noqa: E731
    ours, theirs = (listen(m.generate, one(ROWS[1]), **settings()) for m in (model, own))
    assert ours.complaint == theirs.complaint == (type(None), "None")
    assert torch.equal(ours.result, theirs.result)
    if "assistant_model" not in settings():  # an assistant's own calls have lines of their own
        assert ours.lines == theirs.lines
    if name != "criterion":  # which is called for all rows at once, with pads
        judged = joined(BLOCK, ROWS, by_row(own, ROWS, settings))
        assert torch.equal(model.generate(**BATCH, **settings()), judged)


def test_custom_generate_returns_dicts():
    """A batch of one length, which transformers then serves without pads. Settings: as those of all
    calls in tests/drop_in/test_drop_in.py."""
    _, own = pair()
    ids = torch.tensor([ROWS[1][:8], ROWS[1][8:16]])
    given = own.generate(ids, **BASE, **DICT, custom_generate=generate)
    judged = own.generate(ids, **BASE, **DICT)
    assert type(given) is type(judged) and torch.equal(given.sequences, judged.sequences)
    assert judge.close(given.scores, judged.scores) and judge.close(given.logits, judged.logits)


SAMPLED = {**BASE, "do_sample": True, "temperature": 1.5, "deterministic": True}
UNSERVED = {
    "num_beams": {"num_beams": 2},
    "position_ids": {"position_ids": torch.arange(BLOCK.shape[1]).expand(BLOCK.shape)},
}


@pytest.mark.parametrize("patched", [True, False], ids=["patched", "unpatched"])
def test_custom_generate_with_what_only_tinyspec_has(patched):
    """And what is not served: transformers' own result, or refused; it has written every prompt
    down twice by then."""
    model, own = pair()
    served = model if patched else own
    seeds = [5, 6, 7, 8, 9]
    custom = {**SAMPLED, "custom_generate": generate}
    drawn = served.generate(**BATCH, **custom, seed=seeds)
    alone = [
        served.generate(one(row), **custom, seed=seed)
        for row, seed in zip(ROWS, seeds, strict=True)
    ]
    assert torch.equal(drawn, joined(BLOCK, ROWS, alone))
    assert not torch.equal(drawn, served.generate(**BATCH, **custom, seed=[1, 2, 3, 4, 5]))
    assert torch.equal(drawn, model.generate(**BATCH, **SAMPLED, seed=seeds))
    assert torch.equal(served(BLOCK).logits, own(BLOCK).logits)
    for name, unserved in UNSERVED.items():
        asked = {**BATCH, **BASE, **unserved, "custom_generate": generate}
        judged = own.generate(**BATCH, **BASE, **unserved)
        assert torch.equal(served.generate(**asked), judged)
        with pytest.raises(NotImplementedError, match=name):
            served.generate(**asked, seed=3)
    assert "generate" in vars(model) and "generate" not in vars(own)
