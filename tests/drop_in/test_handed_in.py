"""Caches handed in as ``past_key_values``: a conversation goes on as without one.

Controls: a cache that was written to, and one whose start is another prompt's, are not taken for
what was returned; transformers' own ``generate`` shows what they change.
"""

import copy
import logging

import pytest
import torch
from transformers import DynamicCache, StaticCache

from tests.drop_in.test_returned_cache import NEW, ROWS, differences, generate, mask_of, padded
from tests.support import zoo
from tests.support.drop_in import patched
from tinyspec.model.private_names import CACHE, OLD_CACHE_NAMES

MORE = torch.tensor([[7, 8, 9], [5, 6, 4], [9, 9, 3]])


@pytest.fixture
def model():
    with patched(zoo.tiny("llama")) as model:
        yield model


def served(model):
    """How many tokens the engine has committed."""
    return model.generate.stats().committed


def turn(model, sequences, **settings):
    """The next turn of every row's conversation."""
    given = {"input_ids": torch.cat([sequences, MORE], 1)}
    mask = torch.nn.functional.pad(padded()["attention_mask"], (0, NEW + 3), value=1)
    return generate(model, given | {"attention_mask": mask}, **settings)


@pytest.mark.parametrize("name", [CACHE, *OLD_CACHE_NAMES])
@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_a_conversation_goes_on(kind, name):
    """As transformers' own, in the same cache object; deterministic bits as without a cache."""
    own = zoo.tiny(kind)
    theirs = [generate(own, padded())]
    theirs.append(turn(own, theirs[0].sequences, past_key_values=theirs[0].past_key_values))
    with patched(copy.deepcopy(own)) as model:
        first = generate(model, padded())
        cache, before = first.past_key_values, served(model)
        second = turn(model, first.sequences, output_scores=True, **{name: cache})
        assert served(model) - before == NEW * len(ROWS)
        assert second.past_key_values is cache
        assert torch.equal(second.sequences, theirs[1].sequences)
        mask = mask_of(padded(), 2 * NEW + 2)
        assert differences(cache, theirs[1].past_key_values, mask) < 1e-4
        asked = {"deterministic": True, "output_scores": True}
        again = generate(model, padded(), **asked)
        with_cache = turn(model, again.sequences, past_key_values=again.past_key_values, **asked)
        without = turn(model, again.sequences, **asked)
        pairs = list(zip(with_cache.scores, without.scores, strict=True))
        assert all(torch.equal(*pair) for pair in pairs)
        # The control: bits of plain rows differ somewhere.
        assert not all(map(torch.equal, second.scores, without.scores))


@pytest.mark.parametrize("configured", [False, True])
def test_an_empty_cache_is_filled(model, configured):
    cache = DynamicCache(config=model.config) if configured else DynamicCache()
    before = served(model)
    ids = generate(model, padded(), past_key_values=cache, return_dict_in_generate=False)
    assert served(model) - before == NEW * len(ROWS)
    own = DynamicCache(config=model.config) if configured else DynamicCache()
    generate(zoo.tiny("llama"), padded(), past_key_values=own)
    assert differences(cache, own, mask_of(padded(), NEW - 1)) < 1e-4
    turn(model, ids, past_key_values=cache)
    assert served(model) - before == 2 * NEW * len(ROWS)


def scaled(model, out):
    out.past_key_values.layers[0].keys.mul_(3)


def replaced(model, out):
    layer = out.past_key_values.layers[1]
    layer.values = layer.values * 3


def another_prompt(model, out):
    out.sequences[1, -4] = 11


def trained(model, out):
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(1.5)


# transformers renames the older one.
@pytest.mark.parametrize("name", [CACHE, *OLD_CACHE_NAMES])
@pytest.mark.parametrize("change", [scaled, replaced, another_prompt, trained])
def test_what_is_not_as_it_was_returned_is_transformers_affair(model, change, name, caplog):
    """It reads the cache as it is, which shows in the tokens' scores."""
    own = copy.deepcopy(model)
    out = generate(model, padded())
    mine = generate(own, padded())
    change(model, out)
    change(own, mine)
    before = served(model)
    with caplog.at_level(logging.WARNING, logger="tinyspec"):
        asked = {"output_scores": True, name: out.past_key_values}
        with pytest.raises(NotImplementedError, match=name):
            turn(model, out.sequences, **asked, deterministic=True)
        found = turn(model, out.sequences, **asked)
    assert name in caplog.text and served(model) == before
    theirs = turn(own, mine.sequences, past_key_values=mine.past_key_values, output_scores=True)
    assert torch.equal(found.sequences, theirs.sequences)
    assert torch.allclose(found.scores[0], theirs.scores[0], atol=1e-4)


def test_others_are_transformers_affair(model):
    """Copies, static ones, other numbers of rows; what cannot be served leaves them alone."""
    out = generate(model, padded())
    cache, before = out.past_key_values, served(model)
    static = StaticCache(config=model.config, max_cache_len=64)
    for given in (copy.deepcopy(cache), static):
        with pytest.raises(NotImplementedError, match="past_key_values"):
            turn(model, out.sequences, past_key_values=given, deterministic=True)
    length = cache.get_seq_length()
    for asked in ({"num_return_sequences": 2, "do_sample": True}, {"num_beams": 2}):
        with pytest.raises(NotImplementedError):
            turn(model, out.sequences, past_key_values=cache, deterministic=True, **asked)
    assert served(model) == before and cache.get_seq_length() == length
    model.generate.weights_changed()
    with pytest.raises(NotImplementedError, match="past_key_values"):
        turn(model, out.sequences, past_key_values=cache, deterministic=True)


def test_a_cache_of_another_form_is_transformers_affair():
    own = zoo.tiny("diffllama")
    theirs = DynamicCache(config=own.config)
    expected = generate(own, padded(ROWS[1:2]), past_key_values=theirs)
    with patched(copy.deepcopy(own)) as model:
        for _ in range(2):
            cache = DynamicCache(config=model.config)
            out = generate(model, padded(ROWS[1:2]), past_key_values=cache)
            assert torch.equal(out.sequences, expected.sequences)
            assert cache.get_seq_length() == theirs.get_seq_length()
