"""What cannot be served is refused by name before anything runs; what fails later fails alone."""

import re
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, BloomConfig, FalconConfig, LlamaConfig, MambaConfig

from tests.support.mixes import bits
from tests.support.tiny import VOCAB, config_of, prompts, tiny
from tinyspec import Engine, EngineConfig, SamplingParams, UnsupportedModelError

CONFIG = EngineConfig(reference_rows=16, page_size=16, num_pages=12, verify="always")
DETERMINISTIC = SamplingParams(max_new_tokens=12, deterministic=True, logprobs=True)
SHORT = SamplingParams(max_new_tokens=3)


@pytest.fixture(scope="module")
def engine():
    with Engine(tiny(), config=CONFIG) as engine:
        yield engine


def untouched(engine):
    """Nothing is queued or running, and no page is held."""
    scheduler = engine.admission
    quiet = not scheduler.waiting and not scheduler.running and not engine.has_unfinished()
    return quiet and engine.pool.num_held == 0


def test_a_config_in_place_of_the_tokenizer():
    model = tiny()
    with pytest.raises(ValueError, match=r"tokenizer=EngineConfig.*config="):
        Engine(model, CONFIG)
    with Engine(model, config=CONFIG) as engine:  # the model was given back
        assert engine.generate([[1, 2]], SHORT)[0].completions[0].token_ids


BAD_PROMPTS = {
    "none": ([], "prompts="),
    "empty": ([[]], "prompt="),
    "not a list": (5, "prompts=5"),
    "negative": ([[1, -1]], "-1 .*0 to 127"),
    "outside": ([[1, VOCAB]], "128 .*0 to 127"),
    "float": ([[1, 2.5]], "2.5.*integers"),
    "bool": ([[1, True]], "True.*integers"),
    "text within": ([[1, "2"]], "'2'.*integers"),
    "nested": ([[[1, 2]]], "integers"),
    "not a prompt": ([None], "None"),
    "text": ("hello", "'hello'.*tokenizer"),
    "messages": ([{"role": "user", "content": "hi"}], "tokenizer"),
    "bytes": (b"hello", "hello"),
}


@pytest.mark.parametrize("prompts, message", BAD_PROMPTS.values(), ids=BAD_PROMPTS)
def test_bad_prompts(engine, prompts, message):
    given = [prompts]
    if isinstance(prompts, list) and prompts and isinstance(prompts[0], list):
        given.append([[1, 2, 3], *prompts])
    for each in given:
        with pytest.raises(ValueError, match=message):
            engine.generate(each, SHORT)
        with pytest.raises(ValueError, match=message):
            engine.stream(each, SHORT)
        assert untouched(engine)


BAD_FOR_THIS_ENGINE = {
    "positions": (40, {"max_new_tokens": 600}, r"max_new_tokens=600 .*472.*40.*512"),
    "one too many": (100, {"max_new_tokens": 93}, r"13 pages of 16 .*12"),
    "pages": (250, {"max_new_tokens": 100}, r"max_new_tokens=100 .*22 pages of 16 .*12"),
    "stop token": (1, {"stop_token_ids": (5, VOCAB)}, "stop_token_ids=128 .*0 to 127"),
    "end token": (1, {"eos_token_id": 500}, "eos_token_id=500 .*0 to 127"),
    "stop string": (1, {"stop_strings": "end"}, r"stop_strings=\('end',\) .*tokenizer"),
    "top log-probabilities": (1, {"top_logprobs": VOCAB + 1}, "top_logprobs=129 .*128"),
    "bias": (1, {"logit_bias": {VOCAB: 1.0}}, "logit_bias=128 .*0 to 127"),
    "bad word": (1, {"bad_words_ids": [[1, VOCAB]]}, "bad_words_ids=128 .*0 to 127"),
    "processor": (1, {"logits_processors": [3]}, "logits_processors=3"),
    "criterion": (1, {"stopping_criteria": ["stop"]}, "stopping_criteria='stop'"),
}


@pytest.mark.parametrize(
    "length, style, message", BAD_FOR_THIS_ENGINE.values(), ids=BAD_FOR_THIS_ENGINE
)
def test_bad_for_this_engine(engine, length, style, message):
    params = SamplingParams(**style)
    with pytest.raises(ValueError, match=message):
        engine.add_request([7] * length, params)
    with pytest.raises(ValueError, match=message):
        engine.generate([[1, 2], [7] * length], [SHORT, params])
    assert untouched(engine)


def test_what_just_fits_runs(engine):
    output = engine.generate([[7] * 100], SamplingParams(max_new_tokens=92))[0]
    assert len(output.completions[0].token_ids) == 92
    assert untouched(engine)


@pytest.mark.parametrize(
    "params, message",
    [
        ([SHORT], "1 SamplingParams.* 2"),
        ([SHORT] * 3, "3 SamplingParams.* 2"),
        ([], "0 SamplingParams.* 2"),
        ({"max_new_tokens": 3}, "params=.*SamplingParams"),
        ([SHORT, {}], "params=.*SamplingParams"),
        (3, "params=3"),
    ],
    ids=["too few", "too many", "none", "dict", "dict among them", "number"],
)
def test_wrong_params(engine, params, message):
    with pytest.raises(ValueError, match=message):
        engine.generate([[1], [2]], params)
    assert untouched(engine)


def dynamic_rope():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    return LlamaConfig(**{**config_of("llama").to_dict(), "rope_parameters": rope})


SMALL = {"vocab_size": 64, "hidden_size": 32, "bos_token_id": 1, "eos_token_id": 2}
UNSUPPORTED = {
    "falcon": (FalconConfig(**SMALL, num_hidden_layers=1, num_attention_heads=4), "interface"),
    "bloom": (BloomConfig(**SMALL, n_layer=1, n_head=4), "interface"),
    "mamba": (MambaConfig(**SMALL, num_hidden_layers=1), "state"),
    "dynamic rope": (dynamic_rope(), "dynamic"),
}


@pytest.mark.parametrize("config, reason", UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_unsupported_models(config, reason):
    model = AutoModelForCausalLM.from_config(config).eval()
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        before = model(ids).logits
        modules = {name: type(module) for name, module in model.named_modules()}
        with pytest.raises(UnsupportedModelError, match=f"{type(model).__name__}.*{reason}"):
            Engine(model)
        assert not hasattr(model, "_tinyspec")
        assert {name: type(module) for name, module in model.named_modules()} == modules
        assert torch.equal(model(ids).logits, before)


class At:
    """A processor or criterion that does ``deed`` at one length, at its n-th call there."""

    def __init__(self, length, deed, call=1):
        self.length, self.deed, self.call, self.calls = length, deed, call, 0

    def __call__(self, ids, scores):
        if ids.shape[1] == self.length:
            self.calls += 1
            if self.calls == self.call:
                return self.deed(scores)
        return False if scores is None else scores


class Stateless(At):
    stateless = True


def explode(scores):
    raise RuntimeError("boom")


PROCESSOR, CRITERION = "logits_processors", "stopping_criteria"
FAILURES = {
    "processor": (PROCESSOR, explode, "processor.*At.* RuntimeError: boom"),
    "criterion": (CRITERION, explode, "criterion.* RuntimeError: boom"),
    "nan": (PROCESSOR, lambda scores: scores * torch.nan, "finite"),
    "inf": (PROCESSOR, lambda scores: scores + torch.inf, "finite"),
    "all excluded": (PROCESSOR, lambda scores: scores - torch.inf, "finite"),
    "wrong shape": (PROCESSOR, lambda scores: scores[:, :5], "processor.* ValueError: .*1, 5"),
    "nothing": (PROCESSOR, lambda scores: None, "processor.* TypeError"),
}


@pytest.fixture(scope="module")
def alone(engine):
    return [bits(engine.generate([prompt], DETERMINISTIC)[0]) for prompt in prompts(6, 60)]


@pytest.mark.parametrize("deterministic", [True, False], ids=["deterministic", "plain"])
@pytest.mark.parametrize("field, deed, message", FAILURES.values(), ids=FAILURES)
def test_fails_alone(engine, alone, field, deed, message, deterministic):
    """One request fails behind its second new token; the others keep their bits."""
    bad = replace(DETERMINISTIC, deterministic=deterministic, **{field: [At(8 + 2, deed)]})
    given = prompts(6, 60)
    outputs = engine.generate(
        [*given[:3], [9] * 8, *given[3:]], [*[DETERMINISTIC] * 3, bad, *[DETERMINISTIC] * 3]
    )
    failed = outputs.pop(3).completions[0]
    assert failed.finish_reason == "abort"
    assert re.search(message, failed.error), failed.error
    assert len(failed.token_ids) == len(failed.logprobs) == 2
    assert [bits(output) for output in outputs] == alone
    assert untouched(engine)


class Always:
    """Raises at one length, however often it is called there."""

    stateless = True

    def __init__(self, length):
        self.length = length

    def __call__(self, ids, scores):
        return explode(scores) if ids.shape[1] == self.length else scores


def test_a_stateless_processor_fails_alone(engine, alone):
    """Called for a draft first: only what the verify meets counts."""
    once = replace(DETERMINISTIC, logits_processors=[Stateless(12, explode)])
    always = replace(DETERMINISTIC, logits_processors=[Always(12)])
    outputs = engine.generate(
        [*prompts(6, 60), [9] * 8, [9] * 8], [*[DETERMINISTIC] * 6, once, always]
    )
    survived, failed = (output.completions[0] for output in outputs[6:])
    assert [bits(output) for output in outputs[:6]] == alone
    assert (survived.finish_reason, survived.error) == ("length", None)
    assert failed.finish_reason == "abort" and "boom" in failed.error
    assert failed.token_ids == survived.token_ids[:4]
    assert untouched(engine)


@pytest.mark.parametrize("deterministic", [True, False], ids=["deterministic", "plain"])
@pytest.mark.parametrize("call", [1, 3])
def test_completions_of_one_prompt_fail_alone(engine, deterministic, call):
    """Siblings share the prompt's pages: what becomes of one must not touch them."""
    prompt = prompts(8)[7]
    assert len(prompt) > 2 * CONFIG.page_size
    params = SamplingParams(
        max_new_tokens=14,
        temperature=1.0,
        seed=1,
        num_return_sequences=3,
        deterministic=deterministic,
        logprobs=deterministic,
        logits_processors=[At(0, explode)],
    )
    expected = bits(engine.generate([prompt], params)[0])
    failing = replace(params, logits_processors=[At(len(prompt) + 4, explode, call)])
    completions = engine.generate([prompt], failing)[0].completions
    reasons = [c.finish_reason for c in completions]
    assert sorted(reasons) == ["abort", "length", "length"]
    for completion, (tokens, logprobs, reason) in zip(completions, expected, strict=True):
        if completion.finish_reason == reason:
            assert (completion.token_ids, completion.logprobs) == (tokens, logprobs)
    assert untouched(engine)


def test_end_token_outside_the_vocabulary(engine):
    """A config may name an end token that the model does not have; it cannot be sampled."""
    model = tiny()
    model.generation_config.eos_token_id = [VOCAB + 7, 3]
    with Engine(model, config=CONFIG) as other:
        output = other.generate([[1, 2]], SamplingParams(max_new_tokens=4, min_new_tokens=3))[0]
        assert len(output.completions[0].token_ids) >= 3
        assert untouched(other)
