"""Odd inputs of the kinds that reports of other engines tell of, each with an input of its own.
The docstrings say what was tried, and what came."""

import asyncio
import copy
import json
import math
import random
from dataclasses import replace

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from tests.support.cases import bits_of, one_by_one, run, steady, text
from tests.support.mixes import Liar, crowd, plain
from tests.support.script import Recites
from tests.support.sensitive import ShapeSensitiveLinear, replace_linears
from tests.support.serving import CHAT, COMPLETIONS, MESSAGES, MODEL, running
from tests.support.tiny import VOCAB, tiny
from tinyspec import Engine, EngineConfig, SamplingParams
from tinyspec.tools.demo import BUNDLED

openai, peft = pytest.importorskip("openai"), pytest.importorskip("peft")
pytest.importorskip("llguidance")
DETERMINISTIC = {"deterministic": True, "logprobs": True}
CJK = "漢字と仮名、한국어。🙂👩‍👩‍👧 e\u0301 ﷽\U00020000"
CROWDED = {"verify": "always", "draft_window": 5, "page_size": 8, "max_rows": 64}
TOKENIZER = AutoTokenizer.from_pretrained(BUNDLED)


def ids_of(words):
    return TOKENIZER(words, add_special_tokens=False)["input_ids"]


def storyteller(vocab_size=896, sensitive=True, **settings):
    """The bundled model in 16 bits, its linears sensitive to the row count."""
    model = LlamaForCausalLM.from_pretrained(BUNDLED, dtype=torch.bfloat16).eval()
    model.resize_token_embeddings(vocab_size)
    model = replace_linears(model, ShapeSensitiveLinear) if sensitive else model
    engine = Engine(model, TOKENIZER, EngineConfig(**{"reference_rows": 16, **settings}))
    engine.runner.buckets.seconds = lambda bucket, canonical=False: float(bucket)
    return engine


@pytest.fixture(scope="module")
def alone():
    with storyteller(prefix_cache=False) as engine:
        yield engine


@pytest.fixture(scope="module")
def crowded():
    with storyteller(**CROWDED, drafter=Liar(3)) as engine:
        yield engine


@pytest.fixture(scope="module")
def served(crowded):
    with running(crowded) as server:
        yield server
        server.settled()


def same_in_a_crowd(alone, crowded, requests, times=1):
    """The outputs of requests among others and alone, which have the same bits."""
    expected = one_by_one(alone, requests)
    for n in range(times):
        around = crowd(random.Random(n), 4)
        outputs = run(crowded, [*around, *requests, *around])[4:-4]
        assert bits_of(outputs) == expected
    return outputs


def recited(crowded, tokens, prompt, **style):
    """Completion, and the pieces of its stream."""
    said = Recites(tokens, len(prompt))
    given = {"max_new_tokens": len(tokens), "ignore_eos": True, **DETERMINISTIC, **style}
    params = SamplingParams(logits_processors=[said], **given)
    (completion,) = crowded.generate([prompt], params)[0].completions
    pieces = [event.text for event in crowded.stream([prompt], params)]
    assert "".join(pieces) == completion.text
    return completion, pieces


def test_characters_at_the_borders_of_chunks(alone, crowded):
    """A prompt of CJK, emoji of several code points and combining marks, three or four tokens a
    character, read in chunks and pages that end within characters. Came: the bits of one chunk,
    and control: without the flag they differ."""
    prompts = [ids_of(CJK * 3)[: 150 + n] for n in range(4)]
    style = {"temperature": 0.9, "max_new_tokens": 12, **DETERMINISTIC}
    requests = [(p, SamplingParams(seed=n, **style)) for n, p in enumerate(prompts)]
    same_in_a_crowd(alone, crowded, requests)
    loose = [(p, plain(params)) for p, params in requests]
    assert bits_of(run(crowded, loose)) != one_by_one(alone, loose), "control"


@pytest.mark.parametrize("step", range(4))
def test_a_text_of_such_characters_is_streamed_whole(crowded, step):
    """An answer of them, begun at four places. Came: no piece has half a character, however many
    tokens were accepted at once."""
    whole = CJK[step:]
    completion, pieces = recited(crowded, ids_of(whole), ids_of("Once"))
    assert completion.text == whole and len(pieces) > 5
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("behind", ["", "!", "\ufffd"])
def test_a_replacement_character_that_was_meant(crowded, behind):
    """U+FFFD itself as the end of a text, which looks like half a character. Came: it is there,
    once, streamed and not, also as a stop string and before one."""
    whole = f"a\ufffd{behind}"
    completion, _ = recited(crowded, ids_of(whole), ids_of("Once"))
    assert completion.text == whole
    stopped, _ = recited(
        crowded, ids_of(f"{whole}|b"), ids_of("Once"), stop_strings="|", include_stop_str=False
    )
    assert (stopped.text, stopped.stop_reason) == (whole, "|")
    ended, _ = recited(crowded, ids_of(f"{whole}b"), ids_of("Once"), stop_strings="\ufffd")
    assert (ended.text, ended.stop_reason) == ("a\ufffd", "\ufffd")


def test_a_stop_string_over_the_border_of_the_prompt(crowded):
    """Stop strings that the prompt ends with, or begins and the answer completes. Came: only what
    is generated counts, so both go on, and one in the answer ends it."""
    prompt, answer = ids_of("Stop here. STO"), ids_of("P! and STOP!")
    for stop, expected in (
        ("STO", "P! and STO"),
        ("STOP", "P! and STOP"),
        ("here", "P! and STOP!"),
    ):
        completion, _ = recited(crowded, answer, prompt, stop_strings=stop)
        assert completion.text.startswith(expected)
        assert (completion.stop_reason == stop) == (stop != "here")


def adapted(seed, model=None):
    """A tiny model with a LoRA adapter on its head, of its own numbers."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        names = ["lm_head", "q_proj"]
        config = peft.LoraConfig(r=4, target_modules=names, init_lora_weights=False)
        return peft.get_peft_model(model or tiny(), config).eval()


def test_lora_on_the_head_in_log_probabilities_of_the_prompt():
    """An adapter on ``lm_head``, prompts in chunks, cached and not. Came: log-probabilities of the
    adapted model's forward, the same bits alone, in a crowd and by pages that were there; without
    the adapter others."""
    model, prompts = adapted(1), [text(60, seed=n) for n in range(3)]
    params = SamplingParams(max_new_tokens=3, prompt_logprobs=True, **DETERMINISTIC)
    with steady(model, page_size=8, max_rows=32) as engine:
        found = [engine.generate([p], params)[0].prompt_logprobs for p in prompts]
        outputs = run(engine, [*crowd(random.Random(1), 5), *((p, params) for p in prompts)])[5:]
        assert [output.prompt_logprobs for output in outputs] == found
        with model.disable_adapter():
            bare = engine.generate(prompts, params)[0].prompt_logprobs
    with torch.no_grad():
        logits = model(torch.tensor(prompts[:1])).logits[0].log_softmax(-1)
    expected = [logits[n, token].item() for n, token in enumerate(prompts[0][1:])]
    assert found[0][0] is None and found[0][1:] == pytest.approx(expected, abs=1e-4)
    assert bare[1:] != pytest.approx(expected, abs=1e-2), "control"


def test_another_adapter_under_the_same_name():
    """An adapter deleted and another added under its name, with the prompt's pages in the cache.
    Came: another fingerprint, no page of before, and the bits of an engine that knew the second one
    alone."""
    model, prompt = adapted(1), [text(40)]
    params = SamplingParams(max_new_tokens=8, **DETERMINISTIC)
    with steady(model, page_size=8) as engine:
        (first,) = engine.generate(prompt, params)
        config = copy.copy(model.peft_config["default"])
        model.delete_adapter("default")
        with torch.random.fork_rng():
            torch.manual_seed(2)
            model.add_adapter("default", config)
        model.set_adapter("default")
        (second,) = engine.generate(prompt, params)
    with steady(model.eval(), page_size=8) as fresh:
        (expected,) = fresh.generate(prompt, params)
    assert second.completions[0].stats.cached_prompt_tokens == 0
    assert bits_of([second]) == bits_of([expected]) != bits_of([first])
    assert second.fingerprint == expected.fingerprint != first.fingerprint


@pytest.mark.parametrize("deterministic", [True, False], ids=["deterministic", "plain"])
def test_a_processor_outlives_its_neighbours(deterministic):
    """A processor that keeps state, while neighbours of one to six tokens with processors of
    their own come and go and rows move up. Came: each is called for its own sequence alone, once
    for each token, in order."""

    class Counts:
        def __init__(self):
            self.seen = []

        def __call__(self, ids, scores):
            self.seen.append(ids[0].tolist())
            scores = scores.clone()
            scores[0, (7 * len(self.seen)) % VOCAB] += 4.0
            return scores

    style = {"deterministic": deterministic, "temperature": 0.8}

    def asked(n, tokens):
        kept.append(Counts())
        one = SamplingParams(max_new_tokens=tokens, seed=n, logits_processors=[kept[-1]], **style)
        return text(5 + n, seed=n), one

    kept = []
    with steady(tiny(), draft_window=4, drafter=Liar(1), max_sequences=4) as engine:
        outputs = run(engine, [asked(n, tokens) for n, tokens in enumerate((1, 6, 40, 2, 1, 3, 5))])
    for processor, output in zip(kept, outputs, strict=True):
        tokens, prompt = output.completions[0].token_ids, output.prompt_token_ids
        assert processor.seen == [prompt + tokens[:n] for n in range(len(tokens))]


@pytest.mark.parametrize("favourite", [0, 1])
def test_two_end_tokens_behind_complete_json(alone, crowded, favourite):
    """Two ``eos_token_id``, of which a bias favours one, behind JSON that is complete, with
    ``min_new_tokens`` beyond it. Came: the favourite ends it, neither comes before the JSON is
    complete, and none is in the text but one that is a word (895, " rice"), as in transformers."""
    ends = [0, 895]
    schema = {"type": "object", "properties": {"a": {"enum": [1, True]}}, "required": ["a"]}
    style = {"eos_token_id": ends, "logit_bias": {ends[favourite]: 60.0, ends[1 - favourite]: 30.0}}
    params = SamplingParams(
        json_schema={**schema, "additionalProperties": False},
        **{"max_new_tokens": 30, "min_new_tokens": 25, **style, **DETERMINISTIC},
    )
    (output,) = same_in_a_crowd(alone, crowded, [(ids_of("Once"), params)])
    (completion,) = output.completions
    *said, end = completion.token_ids
    assert end == ends[favourite] and completion.finish_reason == "stop"
    assert json.loads(TOKENIZER.decode(said))["a"] in (1, True)
    assert completion.text == TOKENIZER.decode(said) + (" rice" if end else "")


def test_a_vocabulary_padded_beyond_the_tokenizer():
    """A model of 1,024 tokens over a tokenizer of 896, at a temperature where any may come, with
    log-probabilities. Came over HTTP: answers, every token named, texts that join; and bits that
    neighbours leave alone."""
    with storyteller(1024, sensitive=False) as engine, running(engine) as served:
        asked = {"temperature": 2.0, "max_tokens": 40, "logprobs": True, "top_logprobs": 5}
        own = {"deterministic": True, "return_token_ids": True, "messages": MESSAGES}
        answers = [served.post(CHAT, seed=n, **asked, **own).json() for n in range(3)]
        choices = [answer["choices"][0] for answer in answers]
        assert max(token for choice in choices for token in choice["token_ids"]) >= 896
        for choice in choices:
            tokens = choice["logprobs"]["content"]
            assert len(tokens) == len(choice["token_ids"])
            assert all(math.isfinite(top["logprob"]) for t in tokens for top in t["top_logprobs"])
        both = served.post(CHAT, seed=1, n=2, **asked, **own).json()["choices"]
        assert both[0]["token_ids"] == choices[1]["token_ids"] != both[1]["token_ids"]


def test_equal_seeds_at_once(served):
    """Eight requests with one seed at the same time: four with one prompt, four with others, and
    one for two completions. Came: equal requests have equal answers, others their own, and a
    request's second completion is not its first."""
    own = {"deterministic": True, "return_token_ids": True}

    async def asked():
        async with served.client(openai.AsyncOpenAI) as client:

            async def one(prompt, n=1):
                found = await client.completions.create(
                    **{"model": MODEL, "prompt": prompt, "seed": 5, "max_tokens": 16, "n": n},
                    extra_body=own,
                )
                return [tuple(choice.token_ids) for choice in found.choices]

            given = ["Once"] * 4 + ["The fox", "A bee", "One day", "Once more"]
            return await asyncio.gather(*map(one, given), one("Once", 2))

    *each, pair = asyncio.run(asked())
    assert each[0] == each[1] == each[2] == each[3] == pair[:1]
    assert len({*map(tuple, each[3:]), (pair[1],)}) == 6


@pytest.mark.parametrize("drafter", ["ngram", Liar(4)], ids=["ngram", "liar"])
def test_penalties_while_short_requests_come_and_go(alone, drafter):
    """All penalties over a text that repeats itself, so that prompt lookup proposes much, while
    requests of one to four tokens are added and aborted at every second step. Came: the bits of the
    request alone; control: without penalties it repeats more."""
    prompt = ids_of("the fox ran and the fox sat and ") * 3
    style = {"repetition_penalty": 1.3, "frequency_penalty": 0.7, "presence_penalty": 0.4}
    params = SamplingParams(max_new_tokens=40, ignore_eos=True, **style, **DETERMINISTIC)
    expected, bare = one_by_one(alone, [(prompt, params), (prompt, replace(params, **UNSET))])
    rng, done = random.Random(1), {}
    with storyteller(**CROWDED, drafter=drafter, max_sequences=6) as engine:
        wanted = engine.add_request(prompt, params)
        for n in range(5000):
            if wanted in done:
                break
            if n % 2:
                short = SamplingParams(max_new_tokens=rng.randint(1, 4), **style)
                added = engine.add_request(prompt[: rng.randint(1, 30)], short)
                if rng.random() < 0.3:
                    engine.abort(added)
            done |= {output.request_id: output for output in engine.step()}
        (completion,) = done[wanted].completions
        assert bits_of([done[wanted]])[0] == expected
    assert completion.stats.drafted > 0 and len(done) > 5
    assert len({*bare[0][0]}) < len({*completion.token_ids}), "control"


UNSET = {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}


def test_log_probabilities_of_tokens_that_may_not_follow(served):
    """The likeliest 20 of places where a grammar or a bias leaves one. Came: JSON that any reader
    takes, with no infinity in it, streamed and not."""
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    form = {"name": "x", "schema": {**schema, "additionalProperties": False}}
    for body in (
        {"response_format": {"type": "json_schema", "json_schema": form}},
        {"logit_bias": {"5": 100}, "max_tokens": 3},
    ):
        asked = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 20, **body}
        answer = served.post(CHAT, **asked)
        assert answer.status_code == 200, answer.text
        found = json.loads(answer.text, parse_constant=pytest.fail)
        assert found["choices"][0]["logprobs"]["content"]
        streamed = served.post(CHAT, **asked, stream=True).text.split("\n\n")
        for line in streamed[:-2]:
            json.loads(line.removeprefix("data: "), parse_constant=pytest.fail)


EXTREMES = {
    "coldest": {"temperature": 1e-6},
    "one of many": {"temperature": 1.0, "top_k": 1},
    "more than there are": {"temperature": 1e-6, "top_k": 10**6},
    "least": {"temperature": 1.0, "top_p": 0.0},
    "a share of all": {"temperature": 1.0, "min_p": 1.0},
}


@pytest.mark.parametrize("style", EXTREMES.values(), ids=EXTREMES)
def test_filters_that_leave_the_likeliest(alone, crowded, style):
    """Temperatures and filters at their ends, in a crowd, with all log-probabilities. Came: the
    likeliest tokens, of those that tie in 16 bits any one, and the same bits everywhere."""
    own = {"top_logprobs": 896, "logprobs_mode": "raw", "seed": 9, "ignore_eos": True}
    params = SamplingParams(max_new_tokens=16, **own, **style, **DETERMINISTIC)
    (output,) = same_in_a_crowd(alone, crowded, [(ids_of("Once"), params)])
    (completion,) = output.completions
    assert completion.logprobs == [top[0][1] for top in completion.top_logprobs]
    assert {len(top) for top in completion.top_logprobs} == {896}


def test_an_abort_of_the_request_that_others_share_pages_with(alone, crowded):
    """Requests with one long beginning, the first of which is aborted as it is read, with the
    others waiting for its pages. Came: the others' bits, and no page is held."""
    beginning = ids_of(CJK * 3)
    style = {"max_new_tokens": 10, "temperature": 0.7, **DETERMINISTIC}
    requests = [([*beginning, n], SamplingParams(seed=n, **style)) for n in range(5, 9)]
    expected, done = one_by_one(alone, requests), {}
    first, *others = [crowded.add_request(*request) for request in requests]
    done |= {output.request_id: output for output in crowded.step()}
    crowded.abort(first)
    while crowded.has_unfinished():
        done |= {output.request_id: output for output in crowded.step()}
    assert bits_of([done[name] for name in others]) == expected[1:]
    assert crowded.pool.num_held == 0


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63)])
def test_seeds_at_the_ends(served, seed):
    """Seeds of 0 and of either sign, which other servers take for none or refuse. Came: each
    repeats, is told as it was sent or as the engine has it, and with the told one too."""
    asked = {"prompt": "Once", "max_tokens": 12, "deterministic": True, "return_token_ids": True}
    found = [served.post(COMPLETIONS, seed=seed, **asked).json() for _ in range(2)]
    told = served.post(COMPLETIONS, seed=found[0].get("seed", seed), **asked).json()
    tokens = [each["choices"][0]["token_ids"] for each in (*found, told)]
    assert tokens[0] == tokens[1] == tokens[2]
    other = served.post(COMPLETIONS, seed=seed // 2 + 1, **asked).json()
    assert other["choices"][0]["token_ids"] != tokens[0], "control"


def test_everything_of_one_token(alone, crowded):
    """One token from a prompt of one, with all log-probabilities, three completions, a stop token
    that is its only token and a form that it completes. Came: it ends at once, alike everywhere."""
    style = {"num_return_sequences": 3, "top_logprobs": 3, "prompt_logprobs": True, "seed": 1}
    params = SamplingParams(
        regex="[a-z]?",
        temperature=1.0,
        max_new_tokens=1,
        stop_token_ids=[0],
        **style,
        **DETERMINISTIC,
    )
    (output,) = same_in_a_crowd(alone, crowded, [([5], params)], times=2)
    assert output.prompt_logprobs == [None]
    for completion in output.completions:
        assert len(completion.token_ids) == len(completion.logprobs) == 1
        assert (completion.finish_reason == "stop") == (completion.token_ids == [0])
