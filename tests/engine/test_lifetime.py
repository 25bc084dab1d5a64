"""How long an engine has a model: until it is closed, collected, taken over or unpatched. Beside an
open engine a model can be run by itself, saved and copied.
"""

from __future__ import annotations

import copy
import gc
import io
import logging
import pickle
import weakref
from collections import Counter

import pytest
import torch
from transformers import AutoModelForCausalLM

import tinyspec
from tests.support.budget import first
from tests.support.drop_in import PAD, SMALL, portrait
from tests.support.mixes import bits
from tests.support.moe import tiny_moe
from tests.support.tiny import FAMILIES, tiny
from tinyspec import Engine, EngineConfig, SamplingParams

PROMPT = [5, 17, 3]
IDS = torch.tensor([PROMPT])
PARAMS = SamplingParams(max_new_tokens=3, logprobs=True)


def answer(engine):
    return bits(engine.generate([PROMPT], PARAMS)[0])


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


@pytest.fixture
def collect():
    """Collects what the test has made, and does not look at everything else."""
    gc.collect(0)
    gc.freeze()
    yield gc.collect
    gc.unfreeze()


def test_an_engine_that_is_dropped_gives_the_model_back(collect):
    model = tiny()
    before, expected = portrait(model), logits(model)
    engine = Engine(model, config=SMALL)
    answer(engine)
    gone = weakref.ref(engine)
    del engine
    collect()
    assert gone() is None, "nothing that is reached from the model keeps it"
    assert portrait(model) == before
    assert torch.equal(logits(model), expected)


def test_control_an_engine_that_is_kept_keeps_the_model(collect):
    model = tiny()
    before = portrait(model)
    engine = Engine(model, config=SMALL)
    collect()
    assert portrait(model) != before
    engine.close()


def test_a_stream_keeps_its_engine(collect):
    model = tiny()
    with Engine(model, config=SMALL) as engine:
        expected = [event.token_ids for event in engine.stream([PROMPT], PARAMS)]
    stream = Engine(model, config=SMALL).stream([PROMPT], PARAMS)
    collect()
    assert [event.token_ids for event in stream] == expected


@pytest.mark.parametrize("served", first(1, (False, True), 0.3))
def test_a_model_that_is_dropped_is_freed(served, collect):
    """Patched, or with the engine that serves it."""
    model = tiny()
    engine = Engine(model, config=SMALL) if served else tinyspec.patch(model, SMALL)
    gone = weakref.ref(model)
    del model, engine
    collect()
    assert gone() is None


def test_unpatch_restores_whoever_serves_the_model():
    model = tiny()
    before = portrait(model)
    with Engine(model, config=SMALL) as engine:
        request = engine.add_request(PROMPT, PARAMS)
        engine.step()
        tinyspec.unpatch(model)
        assert portrait(model) == before
        for _ in range(2):
            with pytest.raises(ValueError, match="closed: its model was unpatched"):
                engine.generate([PROMPT])
        with pytest.raises(ValueError, match=request):
            engine.abort(request)
    assert portrait(model) == before


def test_another_engine_takes_over(caplog):
    model = tiny()
    before = portrait(model)
    old = Engine(model, config=SMALL)
    expected = answer(old)
    with caplog.at_level(logging.INFO, "tinyspec"), Engine(model, config=SMALL) as new:
        assert [record.message for record in caplog.records] == [
            "another Engine takes over LlamaForCausalLM; the one before is closed"
        ]
        why = "closed: another Engine took over its model"
        with pytest.raises(ValueError, match=why):
            old.generate([PROMPT])
        old.close()
        assert answer(new) == expected
    assert portrait(model) == before


def test_another_engine_that_cannot_be_made(caplog):
    """What cannot be known before the model is free."""
    model = tiny()
    before = portrait(model)
    old = Engine(model, config=SMALL)
    with pytest.raises(ValueError, match="num_pages"):
        Engine(model, config=EngineConfig(num_pages=10**9))
    with pytest.raises(ValueError, match="closed for another Engine, which could not be made"):
        old.generate([PROMPT])
    assert caplog.records[-1].message == "no other Engine could be made: none serves " + (
        "LlamaForCausalLM"
    )
    assert portrait(model) == before
    Engine(model, config=SMALL).close()


def test_an_engine_with_unfinished_requests_is_not_taken_over():
    model = tiny()
    with Engine(model, config=SMALL) as engine:
        expected = answer(engine)
        request = engine.add_request(PROMPT, PARAMS)
        engine.step()
        with pytest.raises(ValueError, match=r"1 unfinished requests.*tinyspec\.unpatch\(model\)"):
            Engine(model)
        outputs = []
        while engine.has_unfinished():
            outputs += engine.step()
        assert [output.request_id for output in outputs] == [request]
        assert bits(outputs[0]) == expected


CLOSED = {
    "suspend": lambda engine: engine.suspend(),
    "resume": lambda engine: engine.resume(),
    "step": lambda engine: engine.step(),
    "release": lambda engine: engine.release(),
    "reserve": lambda engine: engine.reserve(1),
    "fingerprint": lambda engine: engine.fingerprint,
    "generate": lambda engine: engine.generate([PROMPT]),
    "add_request": lambda engine: engine.add_request(PROMPT),
}


@pytest.fixture(scope="module")
def closed():
    engine = Engine(tiny(), config=SMALL)
    engine.close()
    return engine


@pytest.mark.parametrize("call", CLOSED.values(), ids=CLOSED)
def test_a_closed_engine_says_so(call, closed):
    with pytest.raises(ValueError, match="engine='closed'"):
        call(closed)


def test_a_suspended_engine_runs_nothing():
    model = tiny()
    before = portrait(model)
    with Engine(model, config=SMALL) as engine:
        expected = answer(engine)
        engine.suspend()
        lent = {k: v for k, v in portrait(model).items() if k != "._tinyspec"}
        for call in (answer, lambda e: e.add_request(PROMPT), lambda e: e.fingerprint):
            with pytest.raises(ValueError, match="suspended"):
                call(engine)
        assert lent == before and not engine.has_unfinished()
        assert engine.resume() and answer(engine) == expected


@pytest.mark.parametrize("end", [Engine.suspend, Engine.close])
def test_requests_that_were_prepared_before_an_engine_stopped(end):
    """As another thread may stop it at any moment of a call."""
    with Engine(tiny(), config=SMALL) as engine:
        requests = engine.prepare([PROMPT], PARAMS)
        end(engine)
        for begin in (engine.run, engine.follow):
            with pytest.raises(ValueError, match=r"suspended|closed"):
                begin(requests)
        assert not engine.has_unfinished()


@pytest.mark.parametrize("close", [Engine.close, lambda engine: tinyspec.unpatch(engine.model)])
def test_a_processor_that_closes_the_engine(close):
    def closes(ids, scores):
        close(engine)
        return scores

    with Engine(tiny(), config=SMALL) as engine:
        expected = answer(engine)
        params = SamplingParams(max_new_tokens=3, logits_processors=[closes])
        completion = engine.generate([PROMPT], params)[0].completions[0]
        assert (
            completion.finish_reason == "abort"
            and "was called from within a step" in completion.error
        )
        assert answer(engine) == expected


@pytest.mark.parametrize("family", first(1, FAMILIES, 0.5))
def test_a_forward_beside_an_open_engine(family):
    """Of the model and of the one inside of it, with gradients, between steps."""
    model, other = tiny(family), tiny(family)
    with Engine(model, config=SMALL) as engine:
        expected = answer(engine)
        for _ in range(2):
            engine.add_request(PROMPT, PARAMS)
            engine.step()
            assert torch.equal(logits(model), logits(other))
            found = model.base_model(IDS).last_hidden_state
            assert torch.equal(found, other.base_model(IDS).last_hidden_state)
            model(IDS, labels=IDS).loss.backward()
            while not (outputs := engine.step()):
                assert torch.equal(logits(model), logits(other))
            assert bits(outputs[0]) == expected
        grown = model.generate(IDS, max_new_tokens=3, do_sample=False, pad_token_id=PAD)
        assert grown[0, 3:].tolist() == list(expected[0][0])
        assert answer(engine) == expected


def test_a_model_that_changes_while_it_is_lent():
    """What stand-ins do not fit is refused, and works again when it is changed back."""
    model = tiny()
    with Engine(model, config=SMALL) as engine:
        expected = answer(engine)
        logits(model)
        handle = model.model.layers[0].mlp.register_forward_hook(lambda *_: None)
        for _ in range(2):
            with pytest.raises(ValueError, match="changed in modules, hooks or settings"):
                answer(engine)
        handle.remove()
        assert answer(engine) == expected


def watched(model, kind):
    """Calls of the hooks of a kind that are registered on every module from now on, by name."""
    calls = Counter()

    def counts(name):
        return lambda *_: calls.update([name])

    for name, module in model.named_modules():
        getattr(module, f"register_{kind}_hook")(counts(name))
    return calls


@pytest.mark.parametrize("family", first(1, FAMILIES, 0.5))
@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward"])
@pytest.mark.filterwarnings("ignore:.*ackward hook")
def test_hooks_that_are_registered_beside_an_open_engine_stay(family, kind):
    """They run in forwards of the model by itself, and after the engine is closed."""
    model, other = tiny(family), tiny(family)
    expected = watched(other, kind)
    with Engine(model, config=SMALL) as engine:
        answer(engine)
        calls = watched(model, kind)
        for served in (True, False):
            for m in (model, other):
                m(IDS, labels=IDS).loss.backward()
            assert calls == expected and len(calls) > 10
            if served:
                engine.close()


class Doubled(torch.nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        out = self.module(*args, **kwargs)
        return (2 * out[0], *out[1:]) if isinstance(out, tuple) else 2 * out


@pytest.mark.parametrize("name", ["self_attn.v_proj", "self_attn.k_norm", "self_attn", "mlp"])
def test_modules_that_are_put_in_beside_an_open_engine_stay(name):
    """As libraries put in adapters, around the module that they find; nothing of the engine's stays
    in them."""
    model, other = tiny("qwen3"), tiny("qwen3")
    kinds = {type(module) for module in (*model.modules(), Doubled(None))}
    with Engine(model, config=SMALL) as engine:
        answer(engine)
        for m in (model, other):
            m.model.layers[0].set_submodule(name, Doubled(m.model.layers[0].get_submodule(name)))
        assert torch.equal(logits(model), logits(other))
    assert torch.equal(logits(model), logits(other))
    assert {type(module) for module in model.modules()} == kinds
    assert not torch.equal(logits(model), logits(tiny("qwen3"))), "the comparison can fail"


def by_pickle(model):
    return pickle.loads(pickle.dumps(model))


def by_torch(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


MODELS = {family: tiny for family in FAMILIES} | {"qwen3_moe": tiny_moe, "mixtral": tiny_moe}


@pytest.mark.parametrize("family", first(1, MODELS, 0.5))
@pytest.mark.parametrize("make", first(2, (copy.deepcopy, by_pickle, by_torch), 0.5))
def test_a_copy_is_a_plain_model(family, make):
    """While the engine is open, and after it is closed."""
    model, other = MODELS[family](family), MODELS[family](family)
    with Engine(model, config=SMALL) as engine:
        answer(engine)
        copied = make(model)
        assert torch.equal(logits(copied), logits(other))
        answer(engine)
    assert torch.equal(logits(copied), logits(other))
    attributes = {name: set(vars(module)) for name, module in other.named_modules()}
    attributes[""] |= {"_tinyspec"} & set(vars(copied))
    assert {name: set(vars(module)) for name, module in copied.named_modules()} == attributes
    kinds = [type(module) for module in other.modules()]
    assert [type(module) for module in copied.modules()] == kinds
    assert type(copied.config) is type(other.config)
    with Engine(copied, config=SMALL) as engine:  # it can be served in its turn
        answer(engine)


@pytest.mark.parametrize("family", first(1, ("qwen3", "qwen3_moe", "llama", "gpt2"), 0.5))
def test_weights_beside_an_open_engine_are_the_plain_models(family, tmp_path):
    model, other = MODELS[family](family), MODELS[family](family)
    with Engine(model, config=EngineConfig(reference_rows=16, linear="always")) as engine:
        expected = answer(engine)
        for of in (lambda m: m.state_dict().items(), lambda m: m.named_parameters()):
            found, wanted = list(of(model)), list(of(other))
            assert [name for name, _ in found] == [name for name, _ in wanted]
            assert all(torch.equal(a, b) for (_, a), (_, b) in zip(found, wanted, strict=True))
        model.save_pretrained(tmp_path)
        saved = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
        assert answer(engine) == expected
    assert torch.equal(logits(saved), logits(other))
    assert saved.config._attn_implementation == other.config._attn_implementation
