"""What cannot be served is refused by name before anything runs; what fails later fails alone."""

import re
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.loading import refused
from tests.support.mixes import bits
from tests.support.tiny import VOCAB, config_of, prompts, tiny
from tinyspec import Engine, EngineConfig, SamplingParams

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


BAD_FOR_THIS_ENGINE = {
    "positions": (40, {"max_new_tokens": 600}, r"max_new_tokens=600 .*472.*40.*512"),
    "one too many": (100, {"max_new_tokens": 93}, r"13 pages of 16 .*12"),
    "pages": (250, {"max_new_tokens": 100}, r"max_new_tokens=100 .*22 pages of 16 .*12"),
    "stop token": (1, {"stop_token_ids": (5, VOCAB)}, "stop_token_ids=128 .*0 to 127"),
    "end token": (1, {"eos_token_id": 500}, "eos_token_id=500 .*0 to 127"),
    "stop string": (1, {"stop_strings": "end"}, r"stop_strings=\('end',\) .*tokenizer"),
    "top log-probabilities": (1, {"top_logprobs": VOCAB + 1}, "top_logprobs=129 .*128"),
    "bias": (1, {"logit_bias": {VOCAB: 1.0}}, "logit_bias=128 .*0 to 127"),
    "allowed token": (1, {"allowed_token_ids": [VOCAB]}, "allowed_token_ids=128 .*0 to 127"),
    "bad word": (1, {"bad_words_ids": [[1, VOCAB]]}, "bad_words_ids=128 .*0 to 127"),
    "processor": (1, {"logits_processors": [3]}, "logits_processors=3"),
    "criterion": (1, {"stopping_criteria": ["stop"]}, "stopping_criteria='stop'"),
}


@pytest.mark.parametrize(
    "length, style, message", BAD_FOR_THIS_ENGINE.values(), ids=BAD_FOR_THIS_ENGINE
)
def test_bad_for_this_engine(engine, length, style, message):
    """Control: one token less just fits."""
    params = SamplingParams(**style)
    for call in (
        lambda: engine.add_request([7] * length, params),
        lambda: engine.generate([[1, 2], [7] * length], [SHORT, params]),
    ):
        with pytest.raises(ValueError, match=message):
            call()
        assert untouched(engine)
    if style == {"max_new_tokens": 93}:
        (output,) = engine.generate([[7] * length], SamplingParams(max_new_tokens=92))
        assert len(output.completions[0].token_ids) == 92


WRONG_PARAMS = {
    "1 SamplingParams.* 2": [SHORT],
    "3 SamplingParams.* 2": [SHORT] * 3,
    "params=.*SamplingParams": [SHORT, {}],
    "params=3": 3,
}


def test_wrong_params(engine):
    for message, params in WRONG_PARAMS.items():
        with pytest.raises(ValueError, match=message):
            engine.generate([[1], [2]], params)
    assert untouched(engine)


def test_dynamic_rope_is_refused():
    """A row would depend on the longest sequence."""
    config = config_of("llama")
    config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    refused(AutoModelForCausalLM.from_config(config).eval(), "dynamic")


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
def test_fails_alone(engine, alone, deterministic):
    """Each of these requests fails behind its second new token; the others keep their bits."""
    given = prompts(6, 60)
    bad = [
        replace(DETERMINISTIC, deterministic=deterministic, **{field: [At(8 + 2, deed)]})
        for field, deed, _ in FAILURES.values()
    ]
    outputs = engine.generate(
        [*given[:3], *[[9] * 8] * len(bad), *given[3:]],
        [*[DETERMINISTIC] * 3, *bad, *[DETERMINISTIC] * 3],
    )
    for output, (*_, message) in zip(outputs[3:-3], FAILURES.values(), strict=True):
        (failed,) = output.completions
        assert failed.finish_reason == "abort"
        assert re.search(message, failed.error), failed.error
        assert len(failed.token_ids) == len(failed.logprobs) == 2
    assert [bits(output) for output in (*outputs[:3], *outputs[-3:])] == alone
    assert untouched(engine)


class Always(Stateless):
    """However often it is called there."""

    def __call__(self, ids, scores):
        return explode(scores) if ids.shape[1] == self.length else scores


def test_a_stateless_processor_fails_alone(engine, alone):
    """Called for a draft first: only what the verify meets counts."""
    once = replace(DETERMINISTIC, logits_processors=[Stateless(12, explode)])
    always = replace(DETERMINISTIC, logits_processors=[Always(12, explode)])
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
    params = replace(
        DETERMINISTIC,
        temperature=1.0,
        seed=1,
        num_return_sequences=3,
        deterministic=deterministic,
        logits_processors=[At(0, explode)],
    )
    expected = bits(engine.generate([prompt], params)[0])
    failing = replace(params, logits_processors=[At(len(prompt) + 4, explode, call)])
    completions = engine.generate([prompt], failing)[0].completions
    reasons = [c.finish_reason for c in completions]
    assert sorted(reasons) == ["abort", "length", "length"]
    for completion, (tokens, logprobs, reason) in zip(completions, expected, strict=True):
        if completion.finish_reason == reason:
            assert completion.token_ids == tokens
            assert completion.logprobs == logprobs or not deterministic
    assert untouched(engine)


def test_end_token_outside_the_vocabulary(engine):
    """A config may name an end token that the model does not have; it cannot be sampled."""
    model = tiny()
    model.generation_config.eos_token_id = [VOCAB + 7, 3]
    with Engine(model, config=CONFIG) as other:
        output = other.generate([[1, 2]], SamplingParams(max_new_tokens=4, min_new_tokens=3))[0]
        assert len(output.completions[0].token_ids) >= 3
        assert untouched(other)
