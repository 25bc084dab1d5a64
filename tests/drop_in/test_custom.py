"""Assistants and prompt lookup, at any batch size, and ``custom_generate=tinyspec.generate``."""

import pytest
import torch

from tests.support.budget import first
from tests.support.hooks import Backwards, Until
from tests.support.judge import (
    BASE,
    BLOCK,
    MASK,
    ROWS,
    by_row,
    close,
    greedy,
    joined,
    listen,
    one,
    pair,
)
from tests.support.tiny import tiny
from tinyspec import generate

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
BATCH = {"input_ids": BLOCK, "attention_mask": MASK}
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
    assert close(given.scores, judged.scores) and close(given.logits, judged.logits)


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
