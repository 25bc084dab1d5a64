"""Prompts in every form that ``model.generate`` of a patched model takes."""

import copy
import logging

import pytest
import torch

import tinyspec
from tests.support.judge import (
    BASE,
    BLOCK,
    FAMILIES,
    MASK,
    NEW,
    PAD,
    ROWS,
    by_row,
    joined,
    listen,
    one,
    padded,
    pair,
)
from tests.support.tiny import VOCAB

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
LEFT, LEFT_MASK = BLOCK, MASK
RIGHT, RIGHT_MASK = padded(ROWS, "right")


def judge():
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
    judged = judge()
    for name, form in FORMS.items():
        given, named = form()
        tokens = model.generate(*given, **named, **BASE)
        assert tokens.dtype == torch.long and torch.equal(tokens, judged), name


@pytest.mark.parametrize("family", FAMILIES)
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
    new = lambda ids: model.generate(ids, **BASE, deterministic=True)[0, -NEW:]  # noqa: E731
    for other in ([4], [4, 5, 6, 7, 8, 9]):
        assert torch.equal(new([prompt, other]), new([prompt]))
    assert not torch.equal(new(torch.tensor([prompt])), new([prompt])), "of a tensor it is padding"


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
    new = judge()[:, LEFT.shape[1] :]
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
