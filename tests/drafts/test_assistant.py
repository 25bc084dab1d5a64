"""An assistant that the engine serves on the target's pages: drafts with the target's noise, and no
bit of an output, whatever it does."""

import copy
import gc
import logging
import random
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support import cases
from tests.support.cases import bits_of, drain, engine_of, model_of, one_by_one, run, text, whole
from tests.support.drop_in import patched
from tests.support.heads import with_head
from tests.support.mixes import bits, crowd, needles
from tests.support.pages import check_residents
from tests.support.recorded import as_on_a_gpu
from tests.support.tiny import VOCAB, config_of, tiny
from tests.support.zoo import tiny as of_zoo
from tinyspec import Engine, EngineConfig, SamplingParams
from tinyspec.drafts import assistant
from tinyspec.runner.kv_cache import KVCache
from tinyspec.scheduler.admission import Admission
from tinyspec.scheduler.buckets import Buckets
from tinyspec.scheduler.page_pool import PagePool
from tinyspec.scheduler.scheduler import Scheduler
from tinyspec.tools.demo import BUNDLED

LENGTHS = (3, 9, 17, 30, 70)
ALWAYS = {"verify": "always", "draft_window": 4, "page_size": 8}
SAMPLED = {"temperature": 1.0, "seed": 5}
STYLES = {
    "greedy": {},
    "cool": {**SAMPLED, "temperature": 0.6},
    "sampled": SAMPLED,
    "filtered": {**SAMPLED, "top_k": 20, "top_p": 0.9},
    "least probability": {**SAMPLED, "min_p": 0.05},
    "penalised": {**SAMPLED, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    "biased": {**SAMPLED, "logit_bias": {3: 4.0, 5: -100.0}, "bad_words_ids": ((7, 9), (11,))},
    "three of a prompt": {**SAMPLED, "top_k": 30, "num_return_sequences": 3},
    "stops": {**SAMPLED, "stop_token_ids": tuple(range(0, 128, 9)), "min_new_tokens": 3},
}


def perturbed(model, part, seed=0):
    """A copy whose weights are off by this part of their spread."""
    other, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in other.parameters():
            if weight.dim() > 1:
                noise = torch.randn(weight.shape, generator=generator)
                weight += (part * weight.float().std() * noise).to(weight.dtype)
    return other


def requests(**changes):
    settings = {"max_new_tokens": 24, "logprobs": True, "deterministic": True, **changes}
    return [(text(n, seed=n), SamplingParams(**settings)) for n in LENGTHS]


class Rows:
    """Rows of a model's passes, as it is served from now on; what ``then`` does in each."""

    def __init__(self, model, then=lambda: None):
        self.counts, self.then = [], then
        model.register_forward_pre_hook(self.note, with_kwargs=True)

    def note(self, module, args, kwargs):
        self.counts.append(kwargs["input_ids"].shape[-1] if "input_ids" in kwargs else 0)
        self.then()

    def take(self):
        """Of the passes since the last call."""
        counts, self.counts = self.counts, []
        return counts


def drafted(model, asked, drafter, judge=None, **settings):
    """Outputs and statistics with a drafter. No page is lost, deterministic outputs have the bits
    and the fingerprint that an engine without one gives them. judge: its settings."""
    exact = [pair for pair in asked if pair[1].deterministic]
    with engine_of(model, **(judge or {"page_size": 8})) as engine:
        expected = run(engine, exact)
    with engine_of(model, drafter=drafter, **(settings or ALWAYS)) as engine:
        outputs, stats = run(engine, asked), engine.stats()
        found = [output for output in outputs if output.params.deterministic]
        assert bits_of(found) == bits_of(expected) and whole(engine)
    assert [o.fingerprint for o in found] == [o.fingerprint for o in expected]
    return outputs, stats


@pytest.mark.parametrize("style", STYLES)
def test_a_copy_of_the_target_is_always_right(style):
    """And the bits are those without it."""
    model = model_of("as is")
    outputs, stats = drafted(model, requests(**STYLES[style]), copy.deepcopy(model))
    assert stats.drafted == stats.accepted > 0.7 * stats.committed * 4 / 5 and not stats.rollbacks
    assert stats.rows["draft"] == 0, "drafts of the fast path"
    each = [completion.stats for output in outputs for completion in output.completions]
    assert sum(one.drafted for one in each) == sum(one.accepted for one in each) == stats.accepted


@pytest.mark.parametrize("verify", ["auto", "direct", "padded", "always"])
@pytest.mark.parametrize("style", ["sampled", "three of a prompt"])
def test_bits_are_those_without(style, verify, monkeypatch):
    """In every way of computing them, by an assistant that is wrong now and then, whose drafts are
    taken to pay."""
    model = model_of("shape-sensitive" if verify == "always" else "as is")
    monkeypatch.setattr(Scheduler, "how_many", lambda *given: 3)
    settings = {"verify": verify, "page_size": 8, "max_rows": 64}
    _, stats = drafted(model, requests(**STYLES[style]), perturbed(model, 0.1), **settings)
    assert 0 < stats.accepted < stats.drafted and stats.rollbacks > 0


@pytest.mark.parametrize("kind", ["copy", "qwen3_5_text", "glm4_moe"])
def test_in_a_crowd_in_a_small_pool(kind, tmp_path):
    """Preemptions, prefix hits, aborts and forks: every deterministic output has its bits, no page
    is in two places, and a copy of the target, which has read what is there, is always right. Of
    other kinds the head knows nothing."""
    torch.manual_seed(0)
    model, rng = model_of("as is"), random.Random(3)
    drafter = copy.deepcopy(model)
    if kind != "copy":
        model, drafter = with_head(of_zoo(kind), tmp_path), "mtp"
    asked = [*needles(), *crowd(rng, 20)]
    exact = [(prompt, params) for prompt, params in asked if params.deterministic]
    with engine_of(model, page_size=8, max_model_len=256) as engine:
        expected = one_by_one(engine, exact)
    settings = {**ALWAYS, "num_pages": 44, "max_model_len": 256}
    with engine_of(model, drafter=drafter, **settings) as engine:
        asked = [*exact, *(pair for pair in asked if not pair[1].deterministic)]
        ids = [engine.add_request(*pair) for pair in asked]
        done = {}
        for number in range(5000):
            if not engine.has_unfinished():
                break
            done |= {output.request_id: output for output in engine.step()}
            check_residents(engine)
            if number in (4, 20):  # whether they are for want of pages hangs on how many drafts pay
                engine.admission.preempt_all()
            if number == 6:
                for request_id in ids[len(exact) : len(exact) + 3]:
                    if request_id not in done:
                        engine.abort(request_id)
        assert [bits(done[i]) for i in ids[: len(exact)]] == expected
        stats = engine.stats()
        assert whole(engine) and stats.preemptions > 0 < stats.drafted
        assert kind != "copy" or stats.rollbacks == 0 < stats.accepted


def test_a_full_pool_ends_the_same_requests(monkeypatch, caplog):
    """Drafts take pages that nobody else needs: nobody is preempted while any are held for them."""
    preempt, held = Admission.preempt, []

    def noted(self, sequence):
        ends = [(one, self.pool.pages_for(one.length + 1)) for one in self.running]
        held.append(sum(max(0, len(one.pages) - end) for one, end in ends))
        preempt(self, sequence)

    monkeypatch.setattr(Admission, "preempt", noted)
    model, rng = model_of("as is"), random.Random(5)
    asked = [
        (text(rng.randrange(1, 60), n), SamplingParams(max_new_tokens=rng.randrange(1, 60), seed=n))
        for n in range(24)
    ]

    def found(**settings):
        with engine_of(model, num_pages=20, page_size=8, verify="always", **settings) as engine:
            ids = [engine.add_request(*pair) for pair in asked]
            done = drain(engine)
            ended = [
                (o.completions[0].finish_reason, o.completions[0].token_ids)
                for o in (done[i] for i in ids)
            ]
            assert whole(engine)
            return ended, engine.stats()

    without, before = found()
    ended, stats = found(drafter=copy.deepcopy(model), draft_window=6)
    assert ended == without and stats.accepted > 0
    assert stats.preemptions > 0 < before.preemptions and not any(held) and not caplog.records
    assert stats.rollbacks == 0


def test_a_rollback_cuts_what_was_read(monkeypatch):
    """Behind each third token, which it draws at random, a copy of the target is right again."""
    samples, model = assistant.samples, model_of("as is")

    def changed(step):
        batch = samples(step)
        batch.temperature = np.where(batch.position % 3, 0.0, 1e4)
        return batch

    monkeypatch.setattr(assistant, "samples", changed)
    with engine_of(model, drafter=copy.deepcopy(model), **ALWAYS) as engine:
        outputs, stats = run(engine, requests()), engine.stats()
    spans = [
        (n, n + len(o.completions[0].token_ids)) for n, o in zip(LENGTHS, outputs, strict=True)
    ]
    most = sum(position % 3 == 0 for span in spans for position in range(*span))
    assert most / 2 < stats.rollbacks <= most
    assert stats.accepted > stats.committed / 2 and stats.rows["draft"] == 0


def test_what_was_read_is_not_read_again():
    """Prefix hits, forks and the next turn of a chat start where the assistant has been; without
    the pages' flags it would read all of it again."""
    model = model_of("as is")
    other = copy.deepcopy(model)
    rows = Rows(other)
    greedy = SamplingParams(max_new_tokens=12, deterministic=True)
    prompt = text(150, 1)
    with engine_of(model, drafter=other, **ALWAYS) as engine:
        rows.take()
        (first,) = engine.generate([prompt], greedy)
        whole_prompt = sum(rows.take())
        turn = prompt + first.completions[0].token_ids + text(5, 2)
        (second,) = engine.generate([turn], greedy)
        again = sum(rows.take())
        engine.generate(
            [[*prompt, 1, 2]],
            SamplingParams(max_new_tokens=12, num_return_sequences=3, seed=1, temperature=1.0),
        )
        forks = sum(rows.take())
        engine.pool.seen[:] = False
        engine.generate([[*prompt, 3, 4]], greedy)
        assert sum(rows.take()) > 150, "control"
        assert engine.stats().rollbacks == 0
    assert whole_prompt > 150 and again < 70 and forks < 110
    with engine_of(model, page_size=8) as engine:
        assert bits(second) == bits(engine.generate([turn], greedy)[0])


@pytest.mark.parametrize("copied", [True, False], ids=["copied", "control"])
def test_forks_of_a_prompt_that_was_read_in_part(copied, monkeypatch):
    """While another request drafts, the assistant reads what is computed of a long prompt; its
    completions start from copies of a page that it has read in part."""
    if not copied:
        monkeypatch.setattr(
            KVCache,
            "copy_pages",
            lambda self, copies: [
                pool[target].copy_(pool[source]) for source, target in copies for pool in self.pools
            ],
        )
    model = model_of("as is")
    params = SamplingParams(max_new_tokens=24, deterministic=True, **SAMPLED)
    settings = {"verify": "always", "draft_window": 4, "max_rows": 32, "page_size": 128}
    with engine_of(model, drafter=copy.deepcopy(model), **settings) as engine:
        engine.add_request(text(5, 1), params)
        for _ in range(2):
            engine.step()
        engine.add_request(text(110, 2), replace(params, num_return_sequences=3))
        drain(engine)
        assert engine.stats().accepted > 40
        assert (engine.stats().rollbacks == 0) == copied


def test_nobody_waits_for_who_is_behind(monkeypatch):
    """A long prompt is read in parts, a bounded number of rows before a pass; others draft."""
    monkeypatch.setattr(assistant, "CATCH_UP", 16)
    model = model_of("as is")
    other = copy.deepcopy(model)
    rows = Rows(other)
    asked = [(text(300, 1), SamplingParams(max_new_tokens=60, deterministic=True)), *requests()]
    with engine_of(model, page_size=8) as engine:
        expected = bits_of(run(engine, asked))
    with engine_of(model, drafter=other, **ALWAYS) as engine:
        rows.take()
        outputs = run(engine, asked)
        assert bits_of(outputs) == expected
    assert max(rows.take()) <= 24
    drafted = [output.completions[0].stats.drafted for output in outputs]
    assert 0 < drafted[0] < 45 and min(drafted[1:]) > 15


def raises():
    raise LookupError("no idea")


@pytest.mark.parametrize("fault", ["lies", "raises", "not served", "not finite", "no page"])
def test_one_that_fails_ends_no_request(fault, caplog):
    """It is told once; drafts are fewer, or wrong."""
    model = model_of("as is")
    other = tiny(seed=3) if fault == "lies" else copy.deepcopy(model)
    rows, settings = Rows(other), dict(ALWAYS)
    asked = requests(max_new_tokens=40, **SAMPLED)
    with engine_of(model, page_size=8) as engine:
        expected = bits_of(run(engine, asked))
    if fault == "no page":  # but those of one request
        settings |= {"num_pages": 14}
        asked, expected = asked[-1:], expected[-1:]
        settings["draft_window"] = 16
    with (
        caplog.at_level(logging.WARNING, "tinyspec"),
        engine_of(model, drafter=other, **settings) as engine,
    ):
        if fault in ("raises", "not served"):
            rows.then = raises
        if fault in ("not finite", "not served"):  # another copy is made of it
            with torch.no_grad():
                other.lm_head.weight.mul_(torch.nan if fault == "not finite" else 1.0)
        outputs = [*run(engine, asked), *run(engine, asked)]
        assert bits_of(outputs) == expected * 2 and whole(engine)
        stats = engine.stats()
    told = [record.getMessage() for record in caplog.records if "assistant" in record.getMessage()]
    words = {"raises": "raised LookupError: no idea", "not finite": "logits are not finite"}
    words["not served"] = "raised UnsupportedModelError"
    assert len(told) == (fault in words) and all(words[fault] in line for line in told)
    assert not any(c.error for o in outputs for c in o.completions)
    if fault == "lies":
        assert stats.drafted > 10 * stats.accepted
    elif fault in words:
        assert len(rows.counts) > 0 and stats.rollbacks == 0
    else:
        assert stats.accepted > 0


def test_weights_that_change_between_calls():
    """Those of the target and of the assistant, in place and replaced: bits are those of a new
    engine, and what the assistant drafts follows its weights."""
    model = model_of("as is")
    other = copy.deepcopy(model)
    asked = requests(**SAMPLED)

    def judged():
        with engine_of(model, page_size=8) as engine:
            return bits_of(run(engine, asked))

    with engine_of(model, drafter=other, **ALWAYS) as engine:

        def share():
            before = copy.copy(engine.stats())
            assert bits_of(run(engine, asked)) == judged()
            return (engine.stats().accepted - before.accepted) / (
                engine.stats().drafted - before.drafted
            )

        assert share() == 1
        with torch.no_grad():
            model.lm_head.weight.mul_(1.7).roll(3, 0)
            model.model.layers[0].mlp.down_proj.weight.neg_()
        assert share() < 0.9
        other.load_state_dict(model.state_dict())
        assert share() == 1
        wrong = tiny(seed=9).lm_head.weight
        other.lm_head.weight = torch.nn.Parameter(wrong.detach().clone())
        assert share() < 0.9


def test_two_in_one_engine():
    """One at a time: the other's requests get drafts once no request of the first one's runs."""
    model = model_of("as is")
    others = [copy.deepcopy(model), copy.deepcopy(model)]
    params = [SamplingParams(max_new_tokens=n, deterministic=True) for n in (12, 40)]
    prompts = [text(9, 1), text(17, 2)]
    with engine_of(model, page_size=8) as engine:
        expected = bits_of(engine.generate(prompts, params))
    with engine_of(model, **ALWAYS) as engine:
        made = engine.ready().requests(prompts, params)
        for request, other in zip(made, others, strict=True):
            request.drafter = other
        outputs = engine.outputs("test", lambda _: made)
        assert bits_of(outputs) == expected
        first, second = (output.completions[0].stats for output in outputs)
        assert first.drafted == first.accepted > 0 < second.drafted == second.accepted < 30
        # Held by nobody else, it is gone with its weights.
        weight = weakref.ref(others[1].lm_head.weight)
        others.clear()
        del request, other
        made.clear()
        for _ in range(2):  # the model, then its copy
            gc.collect()
        assert weight() is None and engine.runner.beside is None
        assert bits_of(engine.generate(prompts, params)) == expected


def test_grammars_and_processors():
    """Drafts keep to what may follow; a processor is called for drafts only if it has no state."""
    pytest.importorskip("llguidance")
    model = AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32).eval()

    def calm(ids, scores):
        return scores.masked_fill(torch.arange(scores.shape[-1]) % 3 == 0, -torch.inf)

    calm.stateless = True
    common = {"max_new_tokens": 24, "deterministic": True, "logprobs": True, **SAMPLED}
    schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    params = [
        SamplingParams(**common, json_schema=schema),
        SamplingParams(**common, regex="(yes|no|perhaps)( (yes|no))*"),
        SamplingParams(**common, logits_processors=[calm]),
        SamplingParams(**common, logits_processors=[lambda ids, scores: scores / 2]),
        SamplingParams(**common),
    ]
    prompts, config = ["Once upon a time"] * 5, {"page_size": 16, "verify": "always"}
    outputs = []
    for drafter in (None, copy.deepcopy(model)):
        engine = Engine.from_pretrained(
            BUNDLED, dtype="float32", config=EngineConfig(drafter=drafter, **config)
        )
        with engine:
            outputs.append(engine.generate(prompts, params))
    assert bits_of(outputs[0]) == bits_of(outputs[1])
    stats = [output.completions[0].stats for output in outputs[1]]
    assert all(one.accepted == one.drafted > 3 for one in (*stats[:3], stats[4]))
    assert stats[3].rolled_back == 0


def test_what_cannot_assist_is_refused_by_name():
    model = model_of("as is")
    config = config_of("llama")
    smaller, larger = (copy.deepcopy(config), copy.deepcopy(config))
    smaller.vocab_size, larger.vocab_size = VOCAB // 2, VOCAB + 64
    refused = {
        "a vocabulary of 64 tokens": AutoModelForCausalLM.from_config(smaller),
        "recurrent layers": of_zoo("bamba"),
        "another model than the one served": model,
    }
    for why, other in refused.items():
        with pytest.raises(ValueError, match=f"drafter.*{why}"):
            engine_of(model, drafter=other)
    other = AutoModelForCausalLM.from_config(larger).eval()
    with torch.no_grad():
        for name, weight in other.named_parameters():
            own = model.get_parameter(name)
            weight.copy_(own) if own.shape == weight.shape else weight[:VOCAB].copy_(own)
        other.lm_head.weight[VOCAB:] = other.lm_head.weight[:64] * 3
    _, stats = drafted(model, requests(**SAMPLED), other)
    assert stats.accepted == stats.drafted > 0


@pytest.mark.parametrize("sampled", [False, True])
def test_assistant_model_of_a_call(sampled):
    """At batch 1 and 4, the tokens without it; for that call alone."""
    settings = {"max_new_tokens": 20, "pad_token_id": 0, "do_sample": sampled}
    settings |= {"seed": [1, 2, 3, 4]} if sampled else {}
    ids = torch.tensor([text(9, seed=n) for n in range(4)])
    config = EngineConfig(verify="always", draft_window=4)
    with patched(tiny(), config=config) as model:
        other = copy.deepcopy(tiny())
        for exact in (False, True):
            for batch in (ids[:1], ids):
                given = settings | {"deterministic": exact}
                if sampled:
                    given["seed"] = settings["seed"][: len(batch)]
                expected = model.generate(batch, **given)
                drafted = model.generate.stats().drafted
                assert torch.equal(model.generate(batch, **given, assistant_model=other), expected)
                stats = model.generate.stats()
                assert stats.drafted > drafted + 8 * len(batch)
                before = stats.rows["verify"] if not exact else stats.accepted
                model.generate(batch, **given)
                after = model.generate.stats()
                assert exact or after.rows["verify"] == before


@pytest.mark.parametrize("kind", ["convolutions", "delta rule"])
def test_hybrid_targets(kind):
    """Whose own states are rolled back; the assistant has none."""
    model, config = model_of(kind), config_of("llama")
    config.vocab_size = model.config.vocab_size
    other = AutoModelForCausalLM.from_config(config).eval()
    assert drafted(model, requests(max_new_tokens=12), other)[1].rolled_back > 0


@pytest.mark.parametrize("verify", ["always", "padded"])
def test_as_on_a_gpu(verify, monkeypatch):
    """Where passes have few shapes, and are launched ahead of results."""
    as_on_a_gpu(monkeypatch)
    monkeypatch.setattr(Scheduler, "how_many", lambda *given: 3)
    model = model_of("shape-sensitive")
    judge = {"backend": "triton", "page_size": 8, "max_rows": 64}
    asked = [*requests(**SAMPLED), *requests(), *requests(deterministic=False)]
    settings = {**judge, "verify": verify, "overlap": True}
    _, stats = drafted(model, asked, copy.deepcopy(model), judge, **settings)
    assert stats.accepted > 0.9 * (stats.drafted - stats.rows["draft"]) > 100


def test_how_many_by_cost(passes_count):
    """Drafts where they pay, more where more are accepted, none where they cost too much."""
    config = EngineConfig(reference_rows=16, max_rows=64).resolve(
        device_type="cpu", model_positions=512
    )
    buckets = Buckets(64, 16)
    for size in buckets.sizes:
        buckets.ran(size, False, 10 + size / 8)
    admission = Admission(config, PagePool(64, 8))
    scheduler = Scheduler(config, admission, buckets)
    table = admission.table
    for n in range(4):
        table.add(None, [1, 2], (), order=n, most=100, window=16)
        table.computed[n] = 1
    many = [scheduler.how_many(4, 16, accepted, 1.0) for accepted in (0.01, 0.5, 0.8, 0.95)]
    assert many == sorted(many) and many[0] == 0 < many[1] < many[3]
    assert scheduler.how_many(4, 2, 0.95, 1.0) == 2
    assert scheduler.how_many(4, 16, 0.8, 20.0) == 0


def test_one_that_does_not_pay_is_left_alone():
    """A copy of the target costs as much as the target: after a trial it hardly runs."""
    model = model_of("as is")
    other = copy.deepcopy(model)
    rows = Rows(other)
    params = SamplingParams(max_new_tokens=200, deterministic=True, ignore_eos=True)
    with engine_of(model, drafter=other) as engine:
        cases.cost(engine)
        seconds = engine.core.assistant.runner.buckets
        seconds.seconds = lambda bucket, canonical=False: 50.0
        rows.take()
        engine.generate([text(9, 1)], params)
        ran, stats = len(rows.take()), engine.stats()
    assert 5 < ran < 70 < sum(stats.passes.values()) and stats.accepted > 0
