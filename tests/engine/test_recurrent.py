"""Models with recurrent layers or short convolutions: whatever happens to a sequence, its state, or
what lies in its pages, is that of its committed tokens. Control: what is lost shows in every
request, as the models remember."""

import copy
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

import tinyspec
from tests.support import zoo
from tests.support.cases import (
    HYBRIDS,
    bits_of,
    engine_of,
    greedy,
    model_of,
    one_by_one,
    run,
    states_whole,
    text,
    whole,
)
from tests.support.mixes import HalfLiar
from tests.support.recorded import as_on_a_gpu
from tests.support.recurrence import scanned
from tests.support.tolerances import assert_as_good_as_torch
from tinyspec import Engine, SamplingParams, UnsupportedModelError
from tinyspec.config import STATE_TILE
from tinyspec.model.recurrent import DELTA, MAMBA2

KINDS = [kind for kind in HYBRIDS if kind != "convolutions"]
recurrent = pytest.mark.parametrize("kind", KINDS)
PROMPTS = [text(n, seed=n) for n in (1, 14, 16, 33)]
REQUESTS = [(prompt, greedy(24)) for prompt in PROMPTS]
REQUESTS += [(PROMPTS[3], greedy(24, temperature=0.9, seed=3, num_return_sequences=3))]


@pytest.fixture(scope="module", params=HYBRIDS)
def subject(request):
    """A kind, and the bits of every request alone."""
    with engine_of(model_of(request.param), prefix_cache=False, overlap=False) as engine:
        return request.param, one_by_one(engine, REQUESTS)


def free(engine):
    """Nobody holds a page, and every state that can be kept is kept or free, once."""
    return whole(engine) and states_whole(engine)


@recurrent
def test_the_models_remember(kind):
    """Another first token shows in the logits 300 tokens later."""
    model, ids = zoo.tiny(HYBRIDS[kind]), torch.tensor([text(301), [7, *text(301)[1:]]])
    for module in model.modules():  # not by attention
        if type(module).__name__.endswith("Attention"):
            nn.init.zeros_(module.o_proj.weight)
    one, other = model(ids, use_cache=False).logits[:, -1]
    assert (one - other).abs().max() > 1e-3 * one.abs().max()


@recurrent
def test_sizes_that_repeat_the_distinct_rows(kind):
    """On states of their own: canonical, as a dense model's are on a CPU."""
    with engine_of(zoo.tiny(HYBRIDS[kind]), max_rows=256) as engine:
        found = engine.contract.probe(fresh=True, attention_rows=1).buckets
    assert max(bucket.rows for bucket in found) == 256 and all(b.canonical for b in found[-3:])


@pytest.mark.parametrize("wrong", [0.1, 0.6])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.crossed(3)
def test_rolled_back_at_every_offset(subject, page_size, wrong):
    """Drafts that are wrong at every place around a state that is moved, in a pool that preempts;
    cold, and from the prefix cache."""
    kind, alone = subject
    truths = [[*prompt, *bits[0][0]] for prompt, bits in zip(PROMPTS, alone, strict=False)]
    drafter = HalfLiar(truths, page_size, wrong)
    pages = -(-70 // page_size)
    settings = {"page_size": page_size, "num_pages": pages, "draft_window": 7, "drafter": drafter}
    with engine_of(model_of(kind), trace=True, **settings) as engine:
        for _ in range(2):
            assert bits_of(run(engine, REQUESTS)) == alone
        stats, ends = engine.stats(), set()
        assert stats.rollbacks > 15 and (stats.preemptions or page_size == 64)
        assert free(engine)
        assert stats.cached_prompt_tokens
        for record in engine.trace.passes():
            ends |= {
                (work.start + 1 + work.accepted) % STATE_TILE
                for work in record.works
                if work.kind == "verify"
            }
    assert {STATE_TILE - 2, STATE_TILE - 1, 0, 1, 2} <= ends


@pytest.mark.parametrize("lost", ["state", "kv", "gates", "conv"])
@pytest.mark.crossed(2)
def test_control_a_state_that_is_lost(subject, lost):
    """Or rows that are, which have come since."""
    kind, alone = subject
    with engine_of(model_of(kind), max_rows=16) as engine:
        kernels, context = engine.runner.kernels, engine.served.context

        def forgetful(name, *given, **rule):
            parts = [getattr(layer, lost) for layer in context.states]
            for part in parts or engine.runner.cache.rows:
                part.zero_()
            return getattr(kernels, name)(*given, **rule)

        changed = {name: partial(forgetful, name) for name in ("recurrent", "short_conv")}
        assert engine.fingerprint  # the proof is not what fails
        context.kernels = replace(kernels, **changed)
        found = bits_of(run(engine, REQUESTS[-2:]))
    assert not any(a == b for a, b in zip(found, alone[-2:], strict=True))


def delta_rule(query, key, value, g, beta, use_qk_l2norm_in_kernel=False, **_):
    q, k = query[0].double(), key[0].double()
    if use_qk_l2norm_in_kernel:
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    rows = q * q.shape[-1] ** -0.5, k, value[0].double(), g[0].double(), beta[0].double()
    return scanned(*rows, delta=True).to(value.dtype)[None], None


def mamba2(x, dt, a, b, c, D, dt_bias=None, dt_softplus=False, dt_limit=(0.0, torch.inf), **_):
    dt, values = dt[0].double() + (0 if dt_bias is None else dt_bias.double()), x[0].double()
    dt = (nn.functional.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
    found = scanned(c[0].double(), b[0].double(), values, a.double() * dt, dt, delta=False)
    return (found + D.double()[:, None] * values).to(x.dtype)[None]


@recurrent
def test_logits_beside_an_exact_recurrence(kind, monkeypatch):
    """Of a whole model: no farther from fp64, whose states go on token by token, than twice what
    transformers' own fp32 is. Control: a recurrence that forgets is elsewhere."""
    model, ids = zoo.tiny(HYBRIDS[kind]), torch.tensor([text(90)])
    same_dtype = model(ids, use_cache=False).logits.detach()
    with tinyspec.canonical(model), torch.no_grad():
        found = model(ids).logits

    def exact(rule, mamba):
        wide = copy.deepcopy(model).double()
        with monkeypatch.context() as patches, torch.no_grad():
            for home in {sys.modules[type(module).__module__] for module in wide.modules()}:
                for name, own in ((DELTA, rule), (MAMBA2, mamba)):
                    if hasattr(home, name):
                        patches.setattr(home, name, own)
            return wide(ids, use_cache=False).logits

    truth = exact(delta_rule, mamba2)
    assert_as_good_as_torch(found, same_dtype, truth)
    forgets = exact(
        lambda q, k, v, g, beta, **more: delta_rule(q, k, v, g - 1e-3, beta, **more),
        lambda x, dt, a, *given, **more: mamba2(x, dt, a - 1e-3, *given, **more),
    )
    with pytest.raises(AssertionError):
        assert_as_good_as_torch(forgets.float(), same_dtype, truth)


@pytest.mark.crossed(7)
@pytest.mark.parametrize("settings", [{"kv_dtype": "fp8_e4m3"}, {"backend": "triton"}], ids=str)
def test_settings(subject, settings, monkeypatch):
    """A cache of codes holds keys and values alone; what a GPU runs pads its passes."""
    if "backend" in settings:
        as_on_a_gpu(monkeypatch)
    with engine_of(model_of(subject[0]), **settings) as engine:
        cache = engine.runner.cache
        parts = [*cache.rows, *(part for layer in cache.states for part in layer)]
        assert {part.dtype for part in parts} == {torch.float32}
        assert bits_of(run(engine, REQUESTS[1:4])) == one_by_one(engine, REQUESTS[1:4])
        assert free(engine)


@recurrent
def test_states_that_are_kept(kind):
    """A second turn starts behind the first one; of more prompts than there is room for the latest
    are kept."""
    model, wanted = model_of(kind), greedy(24)
    with engine_of(model, page_size=16, max_sequences=2) as engine:
        (first,) = engine.generate([text(70)], wanted)
        turn = [*text(70), *first.completions[0].token_ids, *text(9)]
        (second,) = engine.generate([turn], wanted)
        # States are kept where pages end, and the last drafts moved none.
        assert second.completions[0].stats.cached_prompt_tokens in (64, 80)
        states = engine.admission.checkpoints
        many = [text(40, seed=n) for n in range(2 * states.count)]
        engine.generate(many, greedy(1))
        again = engine.generate(many, greedy(1))
        assert sum(o.completions[0].stats.cached_prompt_tokens > 0 for o in again) == 0
        again = engine.generate(many[-3:], greedy(1))
        assert all(o.completions[0].stats.cached_prompt_tokens == 32 for o in again)
        assert free(engine)
    with engine_of(model, prefix_cache=False) as engine:
        (alone,) = engine.generate([turn], wanted)
    assert bits_of([alone]) == bits_of([second])


def test_weights_that_change(subject):
    """And nothing of before is used again."""
    model = model_of(subject[0])
    with engine_of(model, page_size=16) as engine:
        (before,) = engine.generate([PROMPTS[3]], greedy(12))
        with torch.no_grad():
            for module in model.modules():
                if hasattr(module, "A_log"):
                    module.A_log.add_(1.0)
                if isinstance(module, nn.Conv1d):
                    module.weight.mul_(-1)
        (after,) = engine.generate([PROMPTS[3]], greedy(12))
        assert before.fingerprint != after.fingerprint and bits_of([before]) != bits_of([after])
        assert after.completions[0].stats.cached_prompt_tokens == 0
        with engine_of(model, page_size=16) as fresh:
            assert bits_of(fresh.generate([PROMPTS[3]], greedy(12))) == bits_of([after])


@recurrent
def test_values_that_are_not_finite(kind):
    """A wrong draft whose rows are NaN takes no other with it, whatever of its tile it reaches."""
    model, poison = model_of(kind), 191
    with torch.no_grad():
        model.get_input_embeddings().weight[poison] = torch.nan

    class Poisoning:
        def propose(self, sequences, n):
            return [[5, poison, 7][:n] for _ in sequences]

    with engine_of(model, drafter=Poisoning()) as engine, engine_of(model) as own:
        requests = [(prompt, greedy(6)) for prompt in PROMPTS[2:]]
        assert bits_of(run(engine, requests)) == one_by_one(own, requests)
        assert engine.stats().drafted and free(engine)


@recurrent
def test_scores_and_audit(kind):
    model = model_of(kind)
    with engine_of(model) as engine:
        outputs = engine.generate(PROMPTS, greedy(24))
        tokens = [o.completions[0].token_ids for o in outputs]
        scores = engine.score(PROMPTS, tokens)
        assert scores == [o.completions[0].logprobs for o in outputs]
        assert tinyspec.audit(engine, outputs)


@recurrent
def test_exact_forwards_and_gradients(kind):
    """Logits of a forward are those of generation; gradients are refused by name."""
    model = zoo.tiny(HYBRIDS[kind])
    with engine_of(model) as engine:
        (made,) = engine.generate([PROMPTS[3]], greedy(24))
        ids = torch.tensor([[*PROMPTS[3], *made.completions[0].token_ids]])
        with tinyspec.canonical(model, engine.config):
            with torch.no_grad():
                logits = model(ids).logits[0, len(PROMPTS[3]) - 1 : -1]
            with pytest.raises(NotImplementedError, match="recurrent layers have no exact grad"):
                model(ids)
        found = tinyspec.token_logprobs(logits, ids[0, len(PROMPTS[3]) :])
        assert found.tolist() == made.completions[0].logprobs


def doubled(layer):
    """Compute something else."""

    class Doubled(type(layer)):
        def forward(self, *args, **kwargs):
            return 2 * super().forward(*args, **kwargs)

    layer.__class__ = Doubled


def own_forward(layer):
    layer.forward = partial(type(layer).forward, layer)


def padded(layer):
    layer.conv = nn.Conv1d(64, 64, 3, groups=64, padding=1)


def layer_of(model):
    """Its first one with a state."""
    kinds = ("Lfm2ShortConv", "Qwen3_5GatedDeltaNet")
    return next(module for module in model.modules() if type(module).__name__ in kinds)


UNKNOWN = [("qwen3_5_text", doubled), ("qwen3_5_text", own_forward)]
UNKNOWN += [("lfm2", doubled), ("lfm2", padded)]


def test_others_are_refused():
    """A layer that computes something else, or calls what is not known."""
    for family, change in UNKNOWN:
        change(layer_of(model := zoo.tiny(family)))
        with pytest.raises(UnsupportedModelError, match="of its 2 layers with a state 1 are known"):
            Engine(model)


def test_hooks_of_a_convolution():
    """On the module they run, on the convolution inside of it they would not."""
    model, called, params = zoo.tiny("lfm2"), [], SamplingParams(max_new_tokens=2)
    layer_of(model).register_forward_hook(lambda *_: called.append(1))
    with engine_of(model) as engine:
        engine.generate([[1, 2]], params)
        assert called
        layer_of(model).conv.register_forward_hook(lambda *_: None)
        with pytest.raises(UnsupportedModelError, match=r"conv\.conv has forward hooks"):
            engine.generate([[1, 2]], params)


def test_a_model_without_attention():
    """Has pages without numbers."""
    model = zoo.tiny("mamba2")
    with engine_of(model, num_pages=3, page_size=32) as engine:
        requests = [(prompt, greedy(20)) for prompt in PROMPTS]
        alone = one_by_one(engine, requests)
        assert bits_of(run(engine, requests)) == alone and engine.stats().preemptions
        ids = torch.tensor([PROMPTS[3]])
        own = model.generate(ids, max_new_tokens=20, do_sample=False, pad_token_id=0)
        assert own[0, ids.shape[1] :].tolist() == alone[3][0][0]
