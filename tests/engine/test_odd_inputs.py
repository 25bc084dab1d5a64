"""Odd inputs of the kinds that reports of other engines tell of, each with an input of its own.
The docstrings say what was tried, and what came."""

import json
import math

import pytest
from transformers import AutoTokenizer, LlamaForCausalLM

from tests.support.script import Recites
from tests.support.serving import CHAT, COMPLETIONS, MESSAGES, running, storyteller
from tinyspec import Engine, EngineConfig, SamplingParams
from tinyspec.tools.demo import BUNDLED

pytest.importorskip("llguidance")
TOKENIZER = AutoTokenizer.from_pretrained(BUNDLED)
OWN = {"deterministic": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def engine():
    with storyteller(verify="always", draft_window=5, num_pages=64) as engine:
        yield engine


@pytest.fixture(scope="module")
def served(engine):
    with running(engine) as server:
        yield server
        server.settled()


def recited(engine, said, prompt="Once", **style):
    """The completion of a model that says so, whose stream has the same text."""
    given, tokens = (TOKENIZER(x, add_special_tokens=False)["input_ids"] for x in (prompt, said))
    style |= {"max_new_tokens": len(tokens), "ignore_eos": True, "deterministic": True}
    params = SamplingParams(logits_processors=[Recites(tokens, len(given))], **style)
    (completion,) = engine.generate([given], params)[0].completions
    assert "".join(event.text for event in engine.stream([given], params)) == completion.text
    return completion


@pytest.mark.parametrize("behind", ["", "!", "\ufffd"])
def test_a_replacement_character_that_was_meant(engine, behind):
    """U+FFFD itself as the end of a text, which looks like half a character. Came: it is there,
    once, streamed and not, also as a stop string and before one."""
    whole = f"a\ufffd{behind}"
    assert recited(engine, whole).text == whole
    stopped = recited(engine, f"{whole}|b", stop_strings="|", include_stop_str=False)
    assert (stopped.text, stopped.stop_reason) == (whole, "|")
    ended = recited(engine, f"{whole}b", stop_strings="\ufffd")
    assert (ended.text, ended.stop_reason) == ("a\ufffd", "\ufffd")


def test_a_stop_string_over_the_border_of_the_prompt(engine):
    """Stop strings that the prompt ends with, or begins and the answer completes. Came: only what
    is generated counts, so both go on, and one in the answer ends it."""
    for stop, expected in (
        ("STO", "P! and STO"),
        ("STOP", "P! and STOP"),
        ("here", "P! and STOP!"),
    ):
        completion = recited(engine, "P! and STOP!", "Stop here. STO", stop_strings=stop)
        assert completion.text.startswith(expected)
        assert (completion.stop_reason == stop) == (stop != "here")


def test_a_vocabulary_padded_beyond_the_tokenizer():
    """A model of 1,024 tokens over a tokenizer of 896, at a temperature where any may come, with
    log-probabilities. Came over HTTP: answers, every token named, texts that join; and bits that
    neighbours leave alone."""
    model = LlamaForCausalLM.from_pretrained(BUNDLED).eval()
    model.resize_token_embeddings(1024)
    config = EngineConfig(reference_rows=16, num_pages=64)
    with Engine(model, TOKENIZER, config) as engine, running(engine) as served:
        asked = {"temperature": 2.0, "max_tokens": 40, "logprobs": True, "top_logprobs": 5}
        asked |= {"messages": MESSAGES, **OWN}
        answers = [served.post(CHAT, seed=n, **asked).json() for n in range(3)]
        choices = [answer["choices"][0] for answer in answers]
        assert max(token for choice in choices for token in choice["token_ids"]) >= 896
        for choice in choices:
            tokens = choice["logprobs"]["content"]
            assert len(tokens) == len(choice["token_ids"])
            assert all(math.isfinite(top["logprob"]) for t in tokens for top in t["top_logprobs"])
        both = served.post(CHAT, seed=1, n=2, **asked).json()["choices"]
        assert both[0]["token_ids"] == choices[1]["token_ids"] != both[1]["token_ids"]


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


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63)])
def test_seeds_at_the_ends(served, seed):
    """Seeds of 0 and of either sign, which other servers take for none or refuse. Came: each
    repeats, is told as it was sent or as the engine has it, and with the told one too."""
    asked = {"prompt": "Once", "max_tokens": 12, **OWN}
    found = [served.post(COMPLETIONS, seed=seed, **asked).json() for _ in range(2)]
    told = served.post(COMPLETIONS, seed=found[0].get("seed", seed), **asked).json()
    tokens = [each["choices"][0]["token_ids"] for each in (*found, told)]
    assert tokens[0] == tokens[1] == tokens[2]
    other = served.post(COMPLETIONS, seed=seed // 2 + 1, **asked).json()
    assert other["choices"][0]["token_ids"] != tokens[0], "control"
