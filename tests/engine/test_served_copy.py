"""The model that an engine is made of is never touched: it can be run, trained, changed, hooked,
saved and copied at any moment by any thread, and every call follows what changed of it.
"""

import copy
import gc
import io
import pickle
import threading
import weakref
from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import tinyspec
from tests.support.budget import first
from tests.support.cases import drain, engine_of, greedy, model_of, text
from tests.support.drop_in import SMALL, portrait
from tests.support.mixes import bits
from tests.support.pages import check_residents
from tests.support.tiny import FAMILIES, tiny
from tests.support.zoo import tiny as of_zoo
from tinyspec import Engine, EngineConfig, SamplingParams

PROMPT = text(20, seed=2)
FEW = replace(SMALL, max_rows=16)  # whose proof is short
IDS = torch.tensor([PROMPT])
PARAMS = SamplingParams(max_new_tokens=6, logprobs=True)
KEPT = SamplingParams(max_new_tokens=6, logprobs=True, deterministic=True)
MODELS = {family: tiny for family in FAMILIES} | dict.fromkeys(("qwen3_moe", "mixtral"), of_zoo)


def answer(engine, params=KEPT):
    return bits(engine.generate([PROMPT], params)[0])


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


def state(model):
    """All that can be seen of a model: its modules, what they hold, and its config."""
    held = {
        name: (id(module), module.training, {key: id(x) for key, x in vars(module).items()})
        for name, module in model.named_modules()
    }
    tables = [list(map(id, t.values())) for m in model.modules() for t in (m._modules, m._buffers)]
    return held, tables, vars(model.config).copy(), [p._version for p in model.parameters()]


@pytest.mark.parametrize("family", first(1, MODELS, 0.6))
def test_nothing_of_the_model_is_touched(family, no_results_on_disk):
    model = MODELS[family](family).train()
    before, own = state(model), portrait(model)
    with Engine(model, config=FEW) as engine:
        for event in engine.stream([PROMPT, PROMPT[:7]], [KEPT, PARAMS]):
            assert event is not None and state(model) == before
        tinyspec.doctor(engine)
        assert state(model) == before
        model.eval()  # control: it shows
        assert state(model) != before
    assert portrait(model.train()) == own


def test_the_model_runs_and_trains_in_another_thread(no_results_on_disk):
    """While the engine proves and generates: no scratch weight, no stand-in is ever seen."""
    model, ended, found = tiny(), threading.Event(), []
    expected, wanted = logits(model), [p.clone() for p in model.parameters()]

    def use():
        while not ended.is_set():
            found.append(torch.equal(logits(model), expected))
            found.append(all(map(torch.equal, model.parameters(), wanted)))
            model(IDS, labels=IDS).loss.backward()

    with Engine(tiny(), config=FEW) as engine:
        alone = answer(engine)
    thread = threading.Thread(target=use)
    thread.start()
    try:
        with Engine(model, config=FEW) as engine:
            assert answer(engine) == alone
    finally:
        ended.set()
        thread.join()
    assert len(found) > 4 and all(found)


def test_two_engines_and_a_patched_generate_on_one_model():
    model = tiny()
    expected = logits(model)
    with Engine(model, config=FEW) as one, Engine(model, config=FEW) as two:
        tinyspec.patch(model, FEW)
        first_, second = one.stream([PROMPT], KEPT), two.stream([PROMPT], KEPT)
        events = [(a.token_ids, b.token_ids) for a, b in zip(first_, second, strict=True)]
        assert len(events) > 1 and all(a == b for a, b in events)
        tokens = model.generate(IDS, max_new_tokens=6, deterministic=True)[0, len(PROMPT) :]
        assert tokens.tolist() == [token for a, _ in events for token in a]
        tinyspec.unpatch(model)
        assert answer(one) == answer(two)
    assert torch.equal(logits(model), expected)


# What changes between calls


def halve(model):
    model.to(torch.bfloat16)


def resize(model):
    """And load other weights in the place of its own."""
    model.resize_token_embeddings(140)
    model.load_state_dict({n: x * 1.5 for n, x in model.state_dict().items()}, assign=True)


@pytest.mark.parametrize("change", [halve, resize])
def test_requests_that_run_when_it_changes(change):
    """Plain ones start again; deterministic ones that have tokens are aborted, by name; who comes
    later has the bits and the fingerprint of an engine that is made then."""
    torch.manual_seed(0)
    model = tiny()
    with Engine(model, config=SMALL) as engine:
        before, name = answer(engine), engine.fingerprint
        engine.admission.forget_pages()
        ids = [engine.add_request(PROMPT, params) for params in (PARAMS, KEPT)]
        engine.step()
        change(model)
        late = engine.add_request(PROMPT, KEPT)
        outputs = drain(engine)
        plain, kept, last = (outputs[i].completions[0] for i in (*ids, late))
        assert plain.finish_reason == last.finish_reason == "length"
        assert kept.finish_reason == "abort" and "changed while it was running" in kept.error
        with Engine(model, config=SMALL) as other:
            assert bits(outputs[late]) == answer(other) != before
            assert outputs[late].fingerprint == other.fingerprint != name


def test_a_model_that_cannot_be_served_any_more():
    """Is refused until it can be served again; what runs meanwhile says why it ended."""
    model = tiny()
    with Engine(model, config=FEW) as engine:
        expected = answer(engine)
        running = engine.add_request(PROMPT, PARAMS)
        engine.step()
        kind = type(model.model.rotary_emb)
        model.model.rotary_emb.register_forward_hook(lambda *_: None)
        with pytest.raises(tinyspec.UnsupportedModelError, match="rotary_emb"):
            engine.generate([PROMPT], PARAMS)
        (output,) = engine.step()
        assert output.request_id == running and "rotary_emb" in output.completions[0].error
        model.model.rotary_emb = kind(model.config)
        assert answer(engine) == expected


def test_what_callers_change_between_calls_is_no_change():
    """The copy stays, and what is cached."""
    model = tiny()
    with Engine(model, config=FEW) as engine:
        name, served = engine.fingerprint, engine.runner.model
        answer(engine)
        model.train()
        model.config.use_cache, model.config.pad_token_id = False, 3
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
        model.generation_config.temperature = 0.3
        output = engine.generate([PROMPT], KEPT)[0]
        assert engine.runner.model is served and engine.fingerprint == name
        assert output.completions[0].stats.cached_prompt_tokens > 0


# What is put into the model's tables


def test_what_is_put_in_for_a_moment_reaches_no_pass():
    """As another thread may, hooks put another weight in and take it out within every pass."""
    model = tiny()
    table, on, seen = model.lm_head._parameters, [], []
    own, other = table["weight"], nn.Parameter(table["weight"].detach() * -1)

    def put_in(*_):
        if on:
            table["weight"] = other

    def take_out(module, args, output):
        seen.append(table["weight"] is other)
        table["weight"] = own

    model.model.norm.register_forward_pre_hook(put_in)
    model.lm_head.register_forward_hook(take_out)
    with Engine(model, config=FEW) as engine:
        alone, expected = answer(engine), logits(model)
        engine.admission.forget_pages()
        on.append(True)
        seen.clear()
        assert answer(engine) == alone and seen.count(True) >= 6
        assert torch.equal(logits(model), -expected), "control: the model itself has it"


def test_functional_call_in_another_thread():
    """Its weights may end a request, which never has bits of others than its fingerprint says."""
    model, ended = tiny(), threading.Event()
    others = {name: p.detach() * 1.5 for name, p in model.named_parameters()}

    def use():
        while not ended.is_set():
            with torch.no_grad():
                torch.func.functional_call(model, others, (IDS,))

    with Engine(model, config=FEW) as engine:
        known = {engine.fingerprint: answer(engine)}
        with Engine(tiny(), config=FEW) as other:
            other.model.load_state_dict(others)
            known[other.fingerprint] = answer(other)
        thread = threading.Thread(target=use)
        thread.start()
        try:
            outputs = [engine.generate([PROMPT], KEPT)[0] for _ in range(20)]
        finally:
            ended.set()
            thread.join()
        found = [o for o in outputs if o.completions[0].finish_reason == "length"]
        assert all(bits(o) == known[o.fingerprint] for o in found if o.fingerprint in known)
        output = engine.generate([PROMPT], KEPT)[0]
        assert bits(output) == known[output.fingerprint] == next(iter(known.values()))


def assigned(model):
    model.load_state_dict({n: x * 1.5 for n, x in model.state_dict().items()}, assign=True)


def untied(model):
    assert model.lm_head.weight is model.transformer.wte.weight
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() * 1.5)


def tied_again(model):
    model.lm_head.weight = model.transformer.wte.weight


def buffer_put_in(model):
    for layer in model.transformer.h:
        layer.ln_1._buffers["extra"] = torch.ones(1)


@pytest.mark.parametrize(
    "changes", [(assigned,), (untied,), (untied, tied_again), (buffer_put_in,)]
)
def test_other_tensors_in_the_tables(changes):
    """Weights of the same form keep the copy; passes and fingerprint are a fresh engine's."""
    model = tiny("gpt2")
    with Engine(model, config=FEW) as engine:
        before, name, served = answer(engine), engine.fingerprint, engine.runner.model
        for change in changes:
            change(model)
            engine.fingerprint  # noqa: B018  a look
        again = answer(engine)
        assert (engine.runner.model is served) is (changes[0] is not buffer_put_in)
        with Engine(model, config=FEW) as fresh:
            assert (again, engine.fingerprint) == (answer(fresh), fresh.fingerprint)
        assert (engine.fingerprint == name) is (changes[-1] is tied_again)
        assert (again == before) is (changes[-1] in (tied_again, buffer_put_in))


# Copies and lifetime


def by_pickle(model):
    return pickle.loads(pickle.dumps(model))


def by_torch(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("family", first(1, MODELS, 0.5))
@pytest.mark.parametrize("make", first(1, (copy.deepcopy, by_pickle, by_torch), 0.5))
def test_a_copy_is_a_plain_model(family, make, tmp_path):
    """Also of a model whose ``generate`` is patched; saved it is what it was."""
    model, other = MODELS[family](family), MODELS[family](family)
    with Engine(model, config=FEW) as engine:
        expected = answer(engine)
        tinyspec.patch(model, FEW)
        copied = make(model)
        assert copied.generate.__func__ is type(copied).generate
        model.save_pretrained(tmp_path)
        tinyspec.unpatch(model)
    how = other.config._attn_implementation
    saved = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=how).eval()
    for one in (copied, saved):
        assert torch.equal(logits(one), logits(other))
        assert one.config._attn_implementation == other.config._attn_implementation
        with Engine(one, config=FEW) as engine:  # it can be served in its turn
            assert answer(engine) == expected


@pytest.mark.parametrize("served", [False, True])
def test_what_is_dropped_is_freed(served):
    """Model and engine, closed or not."""
    model = tiny()
    engine = Engine(model, config=FEW) if served else tinyspec.patch(model, FEW)
    if served:
        answer(engine)
    gone = weakref.ref(model)
    del model, engine
    gc.collect()
    assert gone() is None


# Pages and embeddings

CONFIG = EngineConfig(reference_rows=16, page_size=8)
LONG = text(40, seed=2)


def test_a_pool_that_grows():
    """To what is reserved, also while a request runs, and never shrinks."""
    with Engine(tiny(), config=CONFIG, grows=True) as engine:
        with pytest.raises(ValueError, match="pages of 8 tokens, and there are 1"):
            engine.generate([LONG], greedy(9))
        engine.reserve(7)
        begun = bits(engine.generate([LONG], greedy(9))[0])
        for asked, pages in ((20, 20), (3, 20), (21, 25)):
            engine.reserve(asked)
            assert engine.pool.num_pages == pages
            assert bits(engine.generate([LONG, text(60, seed=4)], greedy(9))[0]) == begun
        engine.release()
        engine.reserve(24)
        assert bits(engine.generate([LONG], greedy(9))[0]) == begun
        running = engine.add_request(LONG, greedy(9))
        engine.step()
        engine.reserve(30)
        assert bits(drain(engine)[running]) == begun and engine.pool.num_pages == 30
    with Engine(tiny(), config=replace(CONFIG, num_pages=7), grows=True) as engine:
        engine.reserve(100)
        assert engine.pool.num_pages == 7


@pytest.mark.crossed(1)
@pytest.mark.parametrize("kind", ["as is", "shape-sensitive"])
@pytest.mark.parametrize("chunk", [24, 2048])
def test_a_prompt_of_embeddings_has_the_bits_of_its_tokens(kind, chunk):
    """Alone, in a crowd, in any chunks; nothing of it is cached for, or taken from, others."""
    model = model_of(kind)
    crowd = [text(n, seed=n) for n in (5, 31, 18)]
    params = greedy(12, temperature=0.8, seed=4)
    with engine_of(model, page_size=8, max_rows=chunk) as engine:
        expected = bits(engine.generate([LONG], params)[0])
        embeds = model.get_input_embeddings()(torch.tensor(LONG)).detach()
        for others in ([], crowd):
            requests = engine.ready().requests([[0] * 40, *others], params)
            requests[0].embeds, requests[0].num_hidden = embeds, 40
            engine.tracker.submit(requests)
            engine.tracker.run(requests, bool)
            (sequence,) = requests[0].sequences
            assert [(sequence.tokens[40:], sequence.logprobs, sequence.finish_reason)] == expected
            assert sequence.stats.cached_prompt_tokens == 0
        other = engine.generate([[0] * 40], params)[0]  # control: stand-ins are no prompt
        assert bits(other) != expected and other.completions[0].stats.cached_prompt_tokens == 0
        check_residents(engine)


def test_a_proof_after_weights_that_moved(no_results_on_disk):
    """Tables of positions are computed anew in the first pass of the proof alone."""
    model = tiny()
    with Engine(model, config=FEW) as engine:
        expected = answer(engine)
        weight = model.model.norm.weight
        weight.data = torch.empty(65)[1:].copy_(weight.data)  # elsewhere within a cache line
        assert engine.contract.refresh() == "the weights"
        assert answer(engine) == expected
