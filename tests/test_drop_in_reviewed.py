"""What a review of the drop-in found, case by case."""

import copy

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation import TopKLogitsWarper, UnbatchedClassifierFreeGuidanceLogitsProcessor

import tinyspec
from tests.support.cases import engine_of, greedy, model_of, text
from tests.support.tiny import tiny
from tinyspec import EngineConfig, SamplingParams

CONFIG = EngineConfig(reference_rows=16, page_size=8)


@pytest.fixture
def model():
    one = tiny()
    tinyspec.patch(one, CONFIG)
    yield one
    tinyspec.unpatch(one)


def generate(model, prompts, tokens=6, **settings):
    out = model.generate(prompts, max_new_tokens=tokens, pad_token_id=0, **settings)
    return out[:, -tokens:].tolist()


class Spoils:
    """A stateless processor that fails for one token of the drafts."""

    stateless = True

    def __call__(self, ids, scores):
        return torch.full_like(scores, -torch.inf) if int(ids[0, -1]) == 77 else scores


class Proposes77:
    def propose(self, sequences, n):
        return [[77]] * len(sequences)


def test_kv_of_a_spoilt_plain_draft_is_not_canonical():
    """A deterministic request must not start from it."""
    prompt = text(7, seed=3)
    plain = SamplingParams(max_new_tokens=40, logits_processors=[Spoils()])
    with engine_of(model_of("shape-sensitive"), page_size=8, drafter=Proposes77()) as engine:
        engine.generate([[1]], greedy(1))
        engine.add_request(prompt, plain)
        seen = []
        while engine.has_unfinished():
            engine.step()
            for sequence in engine.scheduler.running:
                records = engine.records[-1]
                seen.append((sequence.canonical, sequence.computed, records.canonical))
        assert any(computed > 10 for _, computed, _ in seen)
        natural = [canonical for canonical, _, _ in seen]
        assert max(natural) <= 7  # the prompt at most: it was computed by passes of other sizes


def test_processors_that_know_a_prompt_are_not_shared(model):
    prompts = [text(12, seed=n) for n in range(3)]
    asked = {"encoder_repetition_penalty": [1.0, 30.0, 30.0]}
    together = generate(model, prompts, **asked)
    assert together[2] == generate(model, prompts[2:], encoder_repetition_penalty=30.0)[0]
    assert together[2] != generate(model, prompts[2:])[0]


@pytest.mark.parametrize("other", [[4], [4, 5, 6, 7, 8, 9]])
def test_a_list_has_no_padding(model, other):
    prompt = [5, 0, 9, 11, 0, 33]
    alone = generate(model, [prompt], deterministic=True)
    assert generate(model, [prompt, other], deterministic=True)[0] == alone[0]
    stripped = generate(model, torch.tensor([prompt]), deterministic=True)
    assert stripped != alone  # control: without a mask, pads of a tensor are padding


def test_a_setting_of_a_module_changed_between_calls(model):
    prompt = text(40, seed=1)
    first = model.generate.fingerprint
    generate(model, [prompt], deterministic=True)
    model.model.layers[0].input_layernorm.variance_epsilon = 0.5
    twin = tiny()
    twin.model.layers[0].input_layernorm.variance_epsilon = 0.5
    tinyspec.patch(twin, CONFIG)
    asked = {"deterministic": True, "return_dict_in_generate": True, "output_logits": True}
    ours, theirs = (
        one.generate([prompt], max_new_tokens=6, pad_token_id=0, **asked) for one in (model, twin)
    )
    assert all(map(torch.equal, ours.logits, theirs.logits))
    assert model.generate.fingerprint == twin.generate.fingerprint != first
    tinyspec.unpatch(twin)


def test_plain_calls_repeat_once_buckets_are_known():
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.08}
    config = LlamaConfig(vocab_size=128, **sizes, **heads)  # wide enough for row counts to show
    model = LlamaForCausalLM(config).eval()
    tinyspec.patch(model)
    prompts = [text(n, seed=n) for n in (129, 130, 131, 133, 140)]
    asked = {"return_dict_in_generate": True, "output_logits": True, "max_new_tokens": 4}

    def calls():
        outputs = [model.generate([prompt], pad_token_id=0, **asked) for prompt in prompts]
        return [torch.cat(output.logits) for output in outputs]

    first = calls()
    generate(model, [[1, 2]], deterministic=True)
    for _ in range(2):
        assert all(map(torch.equal, calls(), first))
    tinyspec.unpatch(model)


def test_custom_generate_keeps_the_users_own_processors():
    model = tiny()
    ids = torch.tensor([[5, 17, 3, 99]])
    asked = {"do_sample": True, "max_new_tokens": 12, "pad_token_id": 0}
    asked["logits_processor"] = [TopKLogitsWarper(1)]
    expected = model.generate(ids, **asked)
    assert torch.equal(model.generate(ids, custom_generate=tinyspec.generate, **asked), expected)


def test_custom_generate_with_pads_that_count():
    model = tiny()
    ids = torch.tensor([[0, 5, 0, 9, 11, 0, 33, 8]])
    asked = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "pad_token_id": 0}
    expected = model.generate(ids, **asked)
    assert torch.equal(model.generate(ids, custom_generate=tinyspec.generate, **asked), expected)


def test_custom_generate_with_embeddings():
    model = tiny()
    embeds = model.get_input_embeddings()(torch.tensor([[5, 17, 3, 99]])).detach()
    asked = {"inputs_embeds": embeds, "max_new_tokens": 8, "pad_token_id": 0}
    expected = model.generate(**asked)
    asked |= {"custom_generate": tinyspec.generate, "deterministic": True}
    assert torch.equal(model.generate(**asked), expected)


def test_a_call_left_to_transformers_draws_as_without_us(model):
    twin, ids = tiny(), torch.tensor([[5, 17, 3]])
    asked = {"do_sample": True, "max_new_tokens": 511, "pad_token_id": 0}
    torch.manual_seed(0)
    expected = twin.generate(ids, **asked)
    torch.manual_seed(0)
    assert torch.equal(model.generate(ids, **asked), expected)


def test_guidance_is_left_to_transformers(model, caplog):
    twin, ids = copy.deepcopy(model), torch.tensor([[5, 17, 3]])
    for asked in (
        {"guidance_scale": 0.0},
        {"logits_processor": [UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, twin)]},
    ):
        model.generate(ids, max_new_tokens=3, pad_token_id=0, **asked)
        assert "not served" in caplog.records[-1].getMessage()


@pytest.mark.parametrize("seed", [-5, "abc", 1.5])
def test_a_bad_seed_of_a_greedy_request(model, seed):
    with pytest.raises(ValueError, match="seed"):
        model.generate([[1, 2]], seed=seed, max_new_tokens=2)


def test_an_interrupt_that_leaves_requests_over(model, monkeypatch):
    """The error comes out, and the next call works."""
    ids = torch.tensor([[5, 17, 3]])
    expected = generate(model, ids)

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("tinyspec.engine.engine.EventStream", interrupted)
    with pytest.raises(KeyboardInterrupt):
        generate(model, ids)
    monkeypatch.undo()
    assert model.config._attn_implementation != "tinyspec"
    assert generate(model, ids) == expected


def test_growth_that_fails_on_the_way(model, monkeypatch):
    generate(model, [[1, 2, 3]])
    cache = model.generate._engine.runner.cache
    before = len(cache.k[0])
    new_empty, calls = torch.Tensor.new_empty, []

    def fails(self, *size, **settings):
        if self.ndim == 4:
            calls.append(size)
            if len(calls) % 2 == 0:
                raise MemoryError
        return new_empty(self, *size, **settings)

    monkeypatch.setattr(torch.Tensor, "new_empty", fails)
    for _ in range(2):
        with pytest.raises(MemoryError):
            generate(model, [text(90)] * 3)
    monkeypatch.undo()
    grown = {len(pool) for pool in (*cache.k, *cache.v)}
    assert len(grown) == 2 and min(grown) == before
    expected = generate(tiny(), torch.tensor([text(90)]), attention_mask=torch.ones(1, 90))
    assert generate(model, [text(90)] * 3) == expected * 3


def test_release_gives_the_size_back_as_well(model):
    generate(model, [text(90)] * 8)
    large = model.generate._engine.pool.num_pages
    model.generate.release()
    generate(model, [[1, 2, 3]])
    assert model.generate._engine.pool.num_pages < large
