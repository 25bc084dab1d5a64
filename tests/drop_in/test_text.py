"""Tokenizers, stop strings and text streamers with a patched model that speaks: the bundled one."""

import copy
import threading

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    TextIteratorStreamer,
    TextStreamer,
)
from transformers.generation import StopStringCriteria

import tinyspec
from tests.support.judge import defaults, joined, listen
from tests.support.patience import PATIENCE
from tinyspec.tools.demo import BUNDLED

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
TEXTS = ["Once upon a time", "The dog", "A girl named Lily had a red ball. She"]
NEW = 24


@pytest.fixture(scope="module")
def models():
    own = AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32)
    model = copy.deepcopy(own)
    tinyspec.patch(model)
    return model, own


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(BUNDLED)


def by_text(own, encode, **settings):
    """What transformers makes of each of TEXTS by itself."""
    return [own.generate(**encode(text, return_tensors="pt"), **settings) for text in TEXTS]


def test_a_batch_encoding_as_the_tokenizer_gives_it(models, tokenizer):
    model, own = models
    inputs = tokenizer(TEXTS, padding=True, padding_side="left", return_tensors="pt")
    rows = [tokenizer(text)["input_ids"] for text in TEXTS]
    given = model.generate(**inputs, max_new_tokens=NEW)
    alone = by_text(own, tokenizer, max_new_tokens=NEW)
    assert torch.equal(given, joined(inputs["input_ids"], rows, alone, pad=1))
    ragged = model.generate(**tokenizer(TEXTS), max_new_tokens=NEW)
    left = tokenizer(TEXTS, padding=True, return_tensors="pt")["input_ids"]
    assert torch.equal(ragged, joined(left, rows, alone, pad=1))


def test_a_chat_template(models, tokenizer):
    model, own = models
    chat = [{"role": "user", "content": "Tell me of a dog."}]
    inputs = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    inputs.pop("token_type_ids", None)
    given, judged = (m.generate(**inputs, max_new_tokens=NEW) for m in (model, own))
    assert torch.equal(given, judged)


STOPS = {
    "one": lambda t: {"stop_strings": "Finn Fi", "tokenizer": t},
    "several": lambda t: {"stop_strings": ["lived", "clev", "Finn Finn"], "tokenizer": t},
    "config": lambda t: {
        "generation_config": GenerationConfig(stop_strings=["lived"]),
        "tokenizer": t,
    },
    "kwargs-over-config": lambda t: {
        "generation_config": GenerationConfig(stop_strings=["lived"]),
        "stop_strings": ["Finn Fi"],
        "tokenizer": t,
    },
    "criterion": lambda t: {"stopping_criteria": [StopStringCriteria(t, ["Finn Fi"])]},
    "criterion-besides": lambda t: {
        "stop_strings": ["lived", "Iris"],
        "tokenizer": t,
        "stopping_criteria": [StopStringCriteria(t, ["Finn Fi"])],
    },
    "with-eos": lambda t: {"stop_strings": "Finn Fi", "tokenizer": t, "eos_token_id": [0, 447]},
    "sampled": lambda t: {
        "stop_strings": "Finn Fi",
        "tokenizer": t,
        "do_sample": True,
        "top_k": 1,
        "num_return_sequences": 2,
    },
}


@pytest.mark.parametrize("stop", STOPS.values(), ids=STOPS)
def test_stop_strings_equal_transformers(models, tokenizer, stop):
    model, own = models
    inputs = tokenizer(TEXTS, padding=True, return_tensors="pt")
    rows = [tokenizer(text)["input_ids"] for text in TEXTS]
    given = model.generate(**inputs, **{"max_new_tokens": NEW, **stop(tokenizer)})
    alone = by_text(own, tokenizer, **{"max_new_tokens": NEW, **stop(tokenizer)})
    assert torch.equal(given, joined(inputs["input_ids"], rows, alone, pad=1))
    full = model.generate(**inputs, max_new_tokens=NEW)
    assert given.shape != full.shape or not torch.equal(given, full), "control"


def test_stop_strings_of_the_models_own_config(models, tokenizer):
    inputs = tokenizer(TEXTS[1], return_tensors="pt")
    for settings in ({}, {"stop_strings": None}, {"stop_strings": ["lived"]}):
        with defaults(models, stop_strings=["Finn Fi"]):
            heard = [
                listen(m.generate, **inputs, **settings, max_new_tokens=NEW, tokenizer=tokenizer)
                for m in models
            ]
        ours, theirs = heard
        assert ours.complaint == theirs.complaint and ours.lines == theirs.lines
        assert torch.equal(ours.result, theirs.result)


@pytest.mark.parametrize("source", ["kwargs", "config", "model"])
def test_stop_strings_without_a_tokenizer(models, tokenizer, source):
    inputs = tokenizer(TEXTS[0], return_tensors="pt")
    settings = {"max_new_tokens": NEW}
    if source == "kwargs":
        settings["stop_strings"] = ["a"]
    if source == "config":
        settings["generation_config"] = GenerationConfig(stop_strings=["a"])
    with defaults(models, stop_strings=["a"] if source == "model" else None):
        ours, theirs = (listen(m.generate, **inputs, **settings) for m in models)
    assert isinstance(theirs.error, ValueError) and ours.complaint == theirs.complaint


def test_a_tokenizer_without_stop_strings(models, tokenizer):
    inputs = tokenizer(TEXTS[0], return_tensors="pt")
    given, judged = (m.generate(**inputs, tokenizer=tokenizer, max_new_tokens=NEW) for m in models)
    assert torch.equal(given, judged)


@pytest.mark.parametrize("skip_prompt", [False, True])
def test_a_text_streamer_prints_what_transformers_prints(models, tokenizer, capsys, skip_prompt):
    inputs = tokenizer(TEXTS[0], return_tensors="pt")
    printed = []
    for model in models:
        streamer = TextStreamer(tokenizer, skip_prompt=skip_prompt, skip_special_tokens=True)
        model.generate(**inputs, streamer=streamer, max_new_tokens=NEW)
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    assert printed[0].startswith(TEXTS[0]) != skip_prompt


def test_a_text_streamer_refuses_a_batch(models, tokenizer):
    inputs = tokenizer(TEXTS, padding=True, return_tensors="pt")
    ours, theirs = (
        listen(m.generate, **inputs, streamer=TextStreamer(tokenizer), max_new_tokens=NEW)
        for m in models
    )
    assert theirs.complaint == (ValueError, "TextStreamer only supports batch size 1")
    assert ours.complaint == theirs.complaint


def test_a_text_streamer_for_each_row_of_a_batch(models, tokenizer):
    model, own = models
    inputs = tokenizer(TEXTS, padding=True, return_tensors="pt")
    streamers = [TextIteratorStreamer(tokenizer, skip_prompt=True) for _ in TEXTS]
    model.generate(**inputs, streamer=streamers, max_new_tokens=NEW)
    for text, streamer in zip(TEXTS, streamers, strict=True):
        alone = TextIteratorStreamer(tokenizer, skip_prompt=True)
        own.generate(**tokenizer(text, return_tensors="pt"), streamer=alone, max_new_tokens=NEW)
        assert list(streamer) == list(alone)


def test_an_iterator_streamer_in_a_thread(models, tokenizer):
    inputs = tokenizer(TEXTS[2], return_tensors="pt")
    pieces = []
    for model in models:
        streamer = TextIteratorStreamer(tokenizer, timeout=PATIENCE)
        settings = {**inputs, "streamer": streamer, "max_new_tokens": NEW}
        worker = threading.Thread(target=model.generate, kwargs=settings)
        worker.start()
        pieces.append(list(streamer))
        worker.join(PATIENCE)
    assert pieces[0] == pieces[1] and len(pieces[0]) > 5
