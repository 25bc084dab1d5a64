"""An engine that lends its model out, and a pool that grows: nothing cached is lost or changed."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.support.budget import first
from tests.support.cases import engine_of, greedy, model_of, text, whole
from tests.support.mixes import bits
from tests.support.pages import check_residents, indexed_kv
from tests.support.tiny import FAMILIES, tiny
from tinyspec import Engine, EngineConfig

PROMPT = text(40, seed=2)
CONFIG = EngineConfig(reference_rows=16, page_size=8)


def state(model):
    """Everything of a model that a caller could look at."""
    return {
        name: (id(module), set(vars(module)), module.training, list(module._parameters))
        for name, module in model.named_modules()
    }, model.config._attn_implementation


@pytest.mark.parametrize("family", first(3, FAMILIES, 0.6))
def test_a_suspended_model_is_its_own_self(family):
    model = tiny(family)
    ids = torch.tensor([PROMPT])
    before = state(model)
    expected = model(ids).logits
    with Engine(model, config=CONFIG) as engine:
        first = bits(engine.generate([PROMPT], greedy())[0])
        assert state(model) != before  # control: an engine at work shows
        for _ in range(2):
            engine.suspend()
            lent, implementation = state(model)
            lent[""][1].discard("_tinyspec")
            assert (lent, implementation) == before
            logits = model(ids).logits
            logits.sum().backward()
            assert torch.equal(logits, expected)
            assert engine.resume()
            output = engine.generate([PROMPT], greedy())[0]
            assert bits(output) == first
        assert output.completions[0].stats.cached_prompt_tokens == 39
    assert state(model) == before


def test_suspend_while_something_runs():
    with engine_of(model_of("as is")) as engine:
        engine.add_request(PROMPT, greedy())
        for call in (engine.suspend, lambda: engine.reserve(10_000)):
            with pytest.raises(ValueError, match="1 unfinished requests"):
                call()


def halve(model):
    model.to(torch.bfloat16)


def replace_mlp(model):
    model.model.layers[0].mlp.up_proj = nn.Linear(64, 192, bias=False)


def hook(model):
    model.model.layers[0].mlp.down_proj.register_forward_hook(lambda *_: None)


def eager(model):
    model.set_attn_implementation("eager")


@pytest.mark.parametrize("change", [halve, replace_mlp, hook, eager])
def test_a_model_that_changed_takes_another_engine(change):
    model = tiny()
    with Engine(model, config=CONFIG) as engine:
        engine.suspend()
        change(model)
        before = state(model)
        assert not engine.resume()
        assert state(model) == before
    with Engine(model, config=CONFIG) as engine:
        assert engine.generate([PROMPT], greedy())[0].completions[0].finish_reason == "length"


@pytest.mark.parametrize("lent", [True, False])
def test_weights_that_are_replaced_while_an_engine_is_open_stay(lent):
    """``load_state_dict(assign=True)`` puts new parameters where stand-ins share the old ones."""
    model, other = tiny(), tiny(seed=1)
    with Engine(other, config=CONFIG) as engine:
        expected = bits(engine.generate([PROMPT], greedy())[0])
    state_dict = {name: value.clone() for name, value in other.state_dict().items()}
    with Engine(model, config=CONFIG) as engine:
        assert bits(engine.generate([PROMPT], greedy())[0]) != expected
        if lent:
            engine.suspend()
        model.load_state_dict(state_dict, assign=True)
        if lent:
            assert engine.resume()
        assert bits(engine.generate([PROMPT], greedy())[0]) == expected
    ids = torch.tensor([PROMPT])
    assert torch.equal(model(ids).logits, other(ids).logits)


def test_a_pool_that_grows_keeps_what_it_holds():
    with Engine(tiny(), config=CONFIG, grows=True) as engine:
        with pytest.raises(ValueError, match="pages of 8 tokens, and there are 1"):
            engine.generate([PROMPT], greedy(9))
        engine.reserve(7)
        first = bits(engine.generate([PROMPT], greedy(9))[0])
        kept = indexed_kv(engine)
        assert len(kept) == 6
        engine.reserve(20)
        assert indexed_kv(engine) == kept and engine.pool.num_free == 20
        check_residents(engine)
        output = engine.generate([PROMPT, text(60, seed=4)], greedy(9))[0]
        assert output.completions[0].stats.cached_prompt_tokens == 39
        assert bits(output) == first
        engine.reserve(3)  # never shrinks
        assert engine.pool.num_pages == 20 and whole(engine)
        engine.release()
        engine.reserve(24)
        assert bits(engine.generate([PROMPT], greedy(9))[0]) == first


def test_a_pool_of_a_given_size_does_not_grow():
    with Engine(tiny(), config=replace(CONFIG, num_pages=7), grows=True) as engine:
        engine.reserve(100)
        assert engine.pool.num_pages == 7


@pytest.mark.crossed(1)
@pytest.mark.parametrize("kind", ["as is", "shape-sensitive"])
@pytest.mark.parametrize("chunk", [16, 24, 512])
def test_a_prompt_of_embeddings_has_the_bits_of_its_tokens(kind, chunk):
    """Alone, in a crowd, in any chunks; nothing of it is cached for, or taken from, others."""
    model = model_of(kind)
    crowd = [text(n, seed=n) for n in (5, 31, 18)]
    params = greedy(12, temperature=0.8, seed=4)
    with engine_of(model, page_size=8, max_rows=chunk) as engine:
        expected = bits(engine.generate([PROMPT], params)[0])
        with torch.no_grad():
            embeds = model.get_input_embeddings()(torch.tensor(PROMPT))
        for others in ([], crowd):
            requests = engine.prepare([[0] * 40, *others], params)
            requests[0].embeds, requests[0].num_hidden = embeds, 40
            for _ in engine.follow(requests):
                pass
            sequence = requests[0].sequences[0]
            found = sequence.tokens[40:], sequence.logprobs, sequence.finish_reason
            assert [found] == expected
            assert sequence.stats.cached_prompt_tokens == 0
            assert sequence.history == sequence.tokens[40:]
        other = engine.generate([[0] * 40], params)[0]  # control: stand-ins are no prompt
        assert bits(other) != expected and other.completions[0].stats.cached_prompt_tokens == 0
        check_residents(engine)
