"""Token types that are all zero, as tokenizers give them."""

import copy
import inspect

import pytest
import torch

from tests.support import zoo
from tests.support.drop_in import patched
from tinyspec.drop_in.served import TOKEN_TYPES, default_token_types
from tinyspec.model.supported import SERVED

IDS = torch.tensor([[5, 9, 4, 7], [8, 3, 6, 2]])
ASKED = {"max_new_tokens": 4, "pad_token_id": 0, "do_sample": False, "output_logits": True}
ASKED["return_dict_in_generate"] = True


@pytest.mark.parametrize("kind, name", [("gemma3", "token_type_ids"), ("bert", "token_type_ids")])
def test_zeros_that_change_nothing_are_served(kind, name):
    own = zoo.tiny(kind)
    given = {"input_ids": IDS, name: torch.zeros_like(IDS)}
    expected = own.generate(**given, **ASKED)
    with patched(copy.deepcopy(own)) as model:
        found = model.generate(**given, **ASKED, deterministic=True)
        assert model.generate.stats().committed == 8
        ones = {"input_ids": IDS, name: torch.ones_like(IDS)}
        with pytest.raises(NotImplementedError, match=name):
            model.generate(**ones, **ASKED, deterministic=True)
    assert torch.equal(found.sequences, expected.sequences)
    assert all(map(torch.allclose, found.logits, expected.logits, [1e-4] * 4, [1e-4] * 4))


def test_zeros_that_change_something_are_transformers_affair():
    own = zoo.tiny("gpt2")
    given = {"input_ids": IDS, "token_type_ids": torch.zeros_like(IDS)}
    expected = own.generate(**given, **ASKED)
    # The control: without them the model says something else.
    assert not torch.allclose(own.generate(IDS, **ASKED).logits[0], expected.logits[0], atol=1e-3)
    with patched(copy.deepcopy(own)) as model:
        found = model.generate(**given, **ASKED)
        assert model.generate.stats().committed == 0
        with pytest.raises(NotImplementedError, match="token_type_ids"):
            model.generate(**given, **ASKED, seed=1)
    assert all(map(torch.equal, found.logits, expected.logits))


def test_zeros_of_every_family_are_told_apart():
    """Where they are left out, the model's own forward computes the same without them."""
    found = {True: set(), False: set()}
    for kind in sorted(SERVED & set(zoo.BUILT)):
        model = zoo.tiny(kind)
        for name in set(TOKEN_TYPES) & inspect.signature(model.forward).parameters.keys():
            with torch.no_grad():
                both = model(IDS, **{name: torch.zeros_like(IDS)}).logits, model(IDS).logits
            left_out = default_token_types(model, {name: torch.zeros_like(IDS)}) == [name]
            assert left_out == torch.equal(*both), (kind, name)
            found[left_out].add(kind)
    assert {"bert", "gemma3", "gemma4"} <= found[True] and {"gpt2", "ctrl"} <= found[False]
