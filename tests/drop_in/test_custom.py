"""Assistants and prompt lookup, at any batch size, and ``custom_generate=tinyspec.generate``."""

import copy

import pytest
import torch

import tinyspec
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
    "random": lambda: {"assistant_model": tiny(seed=3)},
    "twin": lambda: {"assistant_model": tiny()},
    "other-family": lambda: {"assistant_model": tiny("gpt2", seed=4)},
    "lookup": lambda: {"prompt_lookup_num_tokens": 4},
    "lookup-longer": lambda: {"prompt_lookup_num_tokens": 2, "max_matching_ngram_size": 3},
    "eos": lambda: {"assistant_model": tiny(), "eos_token_id": greedy()[0][4]},
    "lookup-eos": lambda: {"prompt_lookup_num_tokens": 4, "eos_token_id": greedy()[1][3]},
    "penalty": lambda: {"assistant_model": tiny(), "repetition_penalty": 2.0},
    "processor": lambda: {"assistant_model": tiny(), "logits_processor": [Backwards()]},
    "criterion": lambda: {"prompt_lookup_num_tokens": 2, "stopping_criteria": [Until(20)]},
    "least": lambda: {
        "prompt_lookup_num_tokens": 4,
        "eos_token_id": greedy()[0][2],
        "min_new_tokens": 5,
    },
    "one-token": lambda: {"assistant_model": tiny(), "max_new_tokens": 1},
    "max-length": lambda: {"assistant_model": tiny(), "max_length": 22, "max_new_tokens": None},
    "steady": lambda: {"assistant_model": tiny(), "num_assistant_tokens": 2},
}


@pytest.mark.parametrize("name", first(6, ASSISTED, 0.4))
def test_assisted_tokens_equal_transformers(name):
    """At batch 1 as transformers has them, and for a batch, which it refuses."""
    model, own = pair()
    settings = lambda: {**BASE, **ASSISTED[name]()}  # noqa: E731
    ours, theirs = (listen(m.generate, one(ROWS[1]), **settings()) for m in (model, own))
    assert ours.complaint == theirs.complaint == (type(None), "None")
    assert torch.equal(ours.result, theirs.result)
    if "assistant_model" not in settings():  # an assistant's own calls have lines of their own
        assert ours.lines == theirs.lines
    with pytest.raises(ValueError, match="batch_size = 1"):
        own.generate(**BATCH, **settings())
    if name != "criterion":  # which is called for all rows at once, with pads
        judged = joined(BLOCK, ROWS, by_row(own, ROWS, settings))
        assert torch.equal(model.generate(**BATCH, **settings()), judged)


def test_the_model_assists_itself():
    """As in transformers' own tests of assisted decoding."""
    model, own = pair()
    settings = {**BASE, **DICT, "eos_token_id": -1}
    given, judged = (m.generate(one(ROWS[1]), **settings, assistant_model=m) for m in (model, own))
    assert torch.equal(given.sequences, judged.sequences)
    assert close(given.scores, judged.scores) and close(given.logits, judged.logits)


def test_an_assistant_serves_its_call_alone():
    """The next call drafts as before."""
    _, own = pair()

    class Counted:
        asked = 0

        def propose(self, sequences, n):
            Counted.asked += 1
            return [[] for _ in sequences]

    other = copy.deepcopy(own)
    tinyspec.patch(other, tinyspec.EngineConfig(drafter=Counted(), verify="always"))
    other.generate(**BATCH, **BASE, deterministic=True)
    first = Counted.asked
    assert first > 0
    other.generate(**BATCH, **BASE, deterministic=True, prompt_lookup_num_tokens=3)
    assert Counted.asked == first
    other.generate(**BATCH, **BASE, deterministic=True)
    assert Counted.asked > first


CUSTOM = {
    "dict": DICT,
    "samples": {"do_sample": True, "top_k": 1, "num_return_sequences": 3},
    "lookup": {"prompt_lookup_num_tokens": 3},
}


@pytest.mark.parametrize("name", CUSTOM)
def test_custom_generate_setting_by_setting(name):
    """A batch of one length, which transformers then serves without pads. Settings that all calls
    have: tests/drop_in/test_drop_in.py."""
    _, own = pair()
    ids = torch.tensor([ROWS[1][:8], ROWS[1][8:16]])
    settings = {**BASE, **CUSTOM[name]}
    given = own.generate(ids, **settings, custom_generate=generate)
    settings.pop("prompt_lookup_num_tokens", None)
    judged = own.generate(ids, **settings)
    if isinstance(judged, torch.Tensor):
        assert torch.equal(given, judged)
    else:
        assert type(given) is type(judged) and torch.equal(given.sequences, judged.sequences)
        assert close(given.scores, judged.scores) and close(given.logits, judged.logits)


UNSERVED = {
    "beams": {"num_beams": 2},
    "allowed": {"prefix_allowed_tokens_fn": lambda row, ids: [3 + row]},
    "positions": {"position_ids": torch.arange(BLOCK.shape[1]).expand(BLOCK.shape)},
}


@pytest.mark.parametrize("patched", [True, False], ids=["patched", "unpatched"])
def test_custom_generate_with_what_only_tinyspec_has(patched):
    model, own = pair()
    served = model if patched else own
    settings = {**BASE, "do_sample": True, "temperature": 1.5, "custom_generate": generate}
    drawn = [served.generate(**BATCH, **settings, seed=[5, 6, 7, 8, 9], deterministic=True)]
    alone = [
        served.generate(one(row), **settings, seed=5 + n, deterministic=True)
        for n, row in enumerate(ROWS)
    ]
    assert torch.equal(drawn[0], joined(BLOCK, ROWS, alone))
    drawn.append(served.generate(**BATCH, **settings, seed=[1, 2, 3, 4, 5], deterministic=True))
    assert not torch.equal(*drawn)
    direct = model.generate(
        **BATCH, **BASE, do_sample=True, temperature=1.5, seed=[5, 6, 7, 8, 9], deterministic=True
    )
    assert torch.equal(drawn[0], direct)
    assert torch.equal(served(BLOCK).logits, own(BLOCK).logits)
    assert "generate" in vars(model) and "generate" not in vars(own)


@pytest.mark.parametrize("patched", [True, False], ids=["patched", "unpatched"])
@pytest.mark.parametrize("unserved", UNSERVED.values(), ids=UNSERVED)
def test_custom_generate_of_what_is_not_served(patched, unserved):
    """transformers' own result, or refused; it has written every prompt down twice by then."""
    model, own = pair()
    served = model if patched else own
    asked = {**BATCH, **BASE, **unserved}
    assert torch.equal(served.generate(**asked, custom_generate=generate), own.generate(**asked))
    if "num_beams" in unserved or "position_ids" in unserved:
        with pytest.raises(NotImplementedError, match=r"num_beams|position_ids"):
            served.generate(**asked, custom_generate=generate, seed=3)
