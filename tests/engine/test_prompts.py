"""Prompts in every form: lists, tensors and arrays, and what a tokenizer returns."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoModelForCausalLM, AutoTokenizer, BatchEncoding, PreTrainedTokenizerFast

from tests.support.tiny import tiny
from tinyspec import Engine, EngineConfig, SamplingParams
from tinyspec.tools.demo import BUNDLED

SHORT = SamplingParams(max_new_tokens=2)
PROMPTS = [[5, 6, 7], [8, 9, 10, 11], [12, 1, 2, 3]]
EQUAL = [row[:3] for row in PROMPTS]


@pytest.fixture(scope="module")
def engine():
    with Engine(tiny(), config=EngineConfig(reference_rows=16, page_size=16, num_pages=12)) as own:
        yield own


def encoded(rows, left=True, **changes):
    """As a tokenizer returns rows that it has padded."""
    width = max(map(len, rows))
    ids, mask = [], []
    for row in rows:
        pad, own = [0] * (width - len(row)), [1] * len(row)
        ids.append(pad + row if left else row + pad)
        mask.append(pad + own if left else own + pad)
    data = {"input_ids": ids, "attention_mask": mask, "token_type_ids": mask, **changes}
    return BatchEncoding({name: value for name, value in data.items() if value is not None})


def tensors(encoding):
    return encoding.convert_to_tensors("pt")


FORMS = {
    "tensor": (torch.tensor(EQUAL), EQUAL),
    "array": (np.array(EQUAL), EQUAL),
    "one tensor": (torch.tensor(PROMPTS[0]), PROMPTS[:1]),
    "one array": (np.array(PROMPTS[0], np.uint8), PROMPTS[:1]),
    "tensors": ([torch.tensor(row) for row in PROMPTS], PROMPTS),
    "tensors of one row": ([torch.tensor([row]) for row in PROMPTS], PROMPTS),
    "numbers": ([np.int64(5), torch.tensor(6), 7], PROMPTS[:1]),
    "lists of numbers": ([list(map(np.int32, row)) for row in PROMPTS], PROMPTS),
    "padded on the left": (encoded(PROMPTS), PROMPTS),
    "padded on the right": (encoded(PROMPTS, left=False), PROMPTS),
    "padded tensors": (tensors(encoded(PROMPTS)), PROMPTS),
    "without a mask": (encoded(PROMPTS, attention_mask=None, input_ids=PROMPTS), PROMPTS),
    "one text": (BatchEncoding({"input_ids": PROMPTS[0], "attention_mask": [1] * 3}), PROMPTS[:1]),
    "a dict": ({"input_ids": EQUAL}, EQUAL),
    "several of one text": ([encoded([row]) for row in PROMPTS], PROMPTS),
    "several dicts": ([{"input_ids": row} for row in PROMPTS], PROMPTS),
}


@pytest.mark.parametrize("prompts, expected", FORMS.values(), ids=FORMS)
def test_forms(engine, prompts, expected):
    assert [request.prompt for request in engine.ready().requests(prompts, SHORT)] == expected


@pytest.mark.parametrize("prompt", [FORMS["one tensor"][0], encoded(PROMPTS[:1]), PROMPTS[0]])
def test_one_prompt(engine, prompt):
    engine.abort(engine.add_request(prompt, SHORT))
    scores = engine.score(prompt, torch.tensor([PROMPTS[1]]))
    assert scores == engine.score([PROMPTS[0]], [PROMPTS[1]])


MOST = SamplingParams(max_new_tokens=None, ignore_eos=True, deterministic=True)


def with_pages(count):
    sizes = {"max_rows": 16, "reference_rows": 16, "page_size": 16, "max_model_len": 50}
    return Engine(tiny(), config=EngineConfig(**sizes, num_pages=count))


def test_as_many_tokens_as_fit():
    """Into the model's length, whatever the pool; the output records how many. What fits none is
    told, and what there are too few pages for, but of a call that gives its numbers."""
    found = []
    for pages in (4, 9):
        with with_pages(pages) as engine:
            (output,) = engine.generate([PROMPTS[0]], MOST)
            assert output.params.max_new_tokens == len(output.completions[0].token_ids) == 47
            found.append((output.fingerprint, output.completions[0].token_ids))
            with pytest.raises(ValueError, match=r"min_new_tokens=48 .*=47"):
                engine.generate([PROMPTS[0]], replace(MOST, min_new_tokens=48))
            with pytest.raises(ValueError, match="prompt='50 tokens'"):
                engine.generate([[1] * 50], MOST)
            assert not engine.has_unfinished()
    assert found[0] == found[1]
    with with_pages(3) as engine:
        with pytest.raises(ValueError, match=r"max_new_tokens=47 .*need 4 pages .*there are 3"):
            engine.generate([PROMPTS[0]], MOST)
        (scores,) = engine.score([PROMPTS[0]], [[1, 2]], MOST)
        (output,) = engine.generate([PROMPTS[0]], replace(MOST, max_new_tokens=45))
        assert len(scores) == 2 and len(output.completions[0].token_ids) == 45


BAD = {
    "none": ([], "prompts="),
    "empty": ([[]], "prompt="),
    "not a list": (5, "prompts=5"),
    "negative": ([[1, -1]], "-1 .*0 to 127"),
    "outside": (np.array([[1, 128]]), "128 .*0 to 127"),
    "float": ([[1, 2.5]], "2.5.*integers"),
    "floats": (torch.ones(2, 3), "1.0.*integers"),
    "bool": ([[1, True]], "True.*integers"),
    "text within": ([[1, "2"]], "'2'.*integers"),
    "nested": ([[[1, 2]]], "integers"),
    "not a prompt": ([None], "None"),
    "among others": ([[1, 2], None], "None"),
    "text": ("hello", "'hello'.*tokenizer"),
    "messages": ([{"role": "user", "content": "hi"}], "tokenizer"),
    "bytes": (b"hello", "hello"),
    "no dimension": (torch.tensor(3), "prompts="),
    "three": (torch.ones(1, 2, 3, dtype=torch.int64), "prompts=.*one or two dimensions"),
    "no ids": ({"inputs_embeds": 1}, "prompts=.*input_ids"),
    "mask of another shape": (encoded(PROMPTS, attention_mask=[[1]] * 3), "attention_mask=.*shape"),
    "a hole": ({"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]}, r"mask=\[1, 0, 1\]"),
    "nothing left": ({"input_ids": [1, 2], "attention_mask": [0, 0]}, "at least one token"),
    "several in one": ([torch.tensor(EQUAL)], "prompt=.*one prompt"),
}


@pytest.mark.parametrize("prompts, message", BAD.values(), ids=BAD)
def test_what_is_refused(engine, prompts, message):
    for call in (engine.generate, engine.stream):
        with pytest.raises(ValueError, match=f"(?s){message}"):
            call(prompts, SHORT)
        assert not engine.has_unfinished()


TEMPLATE = """{%- if tools %}tools {{ tools | tojson }} {% endif %}
{%- for message in messages %}{{ message.role }}: {{ message.content }}
{%- if message.role == "robot" %}{{ raise_exception("no robots") }}{% endif %} . {% endfor %}
{%- if add_generation_prompt %}answer{{ " thinking" if enable_thinking }}{% endif %}"""
TOOLS = [{"type": "function", "function": {"name": "flip", "parameters": {"type": "object"}}}]
USER = [{"role": "user", "content": [{"type": "text", "text": "flips"}]}]
CHATS = {
    "messages alone": ({}, "user: flips . answer"),
    "tools": ({"tools": TOOLS}, f"tools {json.dumps(TOOLS)} user: flips . answer"),
    "names": ({"chat_template_kwargs": {"enable_thinking": True}}, "user: flips . answer thinking"),
    "no answer": ({"chat_template_kwargs": {"add_generation_prompt": False}}, "user: flips . "),
    "nothing": ({"tools": [], "chat_template_kwargs": None}, "user: flips . answer"),
}


@pytest.fixture(scope="module")
def chats():
    """An engine whose template shows what it was given."""
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED)
    tokenizer.chat_template = TEMPLATE
    few = EngineConfig(max_rows=16, reference_rows=16)
    with Engine(AutoModelForCausalLM.from_pretrained(BUNDLED), tokenizer, few) as engine:
        yield engine


@pytest.mark.parametrize("more, text", CHATS.values(), ids=CHATS)
def test_chats(chats, more, text):
    """As a mapping, alone or in a list beside other prompts; all that takes prompts takes it."""
    chat = {"messages": USER, **more}
    for given in (chat, [chat], [chat, "flips", USER]):
        first, *_ = chats.ready().requests(given, SHORT)
        assert chats.tokenizer.decode(first.prompt) == text
    assert chats.score([chat], ["x"]) == chats.score([text], ["x"])


IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
NO_CHATS = {
    "raise_exception": ({"messages": [{"role": "robot"}]}, r"messages=.*robot.*no robots"),
    "template error": ({"messages": [5]}, "messages=.*UndefinedError|messages=.* takes"),
    "a list alone": ([{"role": "robot", "content": ""}], "messages=.*no robots"),
    "no messages": ({"messages": []}, r"messages=\[\] .*at least one"),
    "an image": ({"messages": [{"role": "user", "content": [IMAGE]}]}, "content=.* is not allowed"),
    "text": ({"messages": "hello"}, "messages='hello'"),
    "another name": ({"messages": USER, "tool_choice": "auto"}, "tool_choice='auto'"),
    "tools": ({"messages": USER, "tools": {"name": "flip"}}, "tools="),
    "names": ({"messages": USER, "chat_template_kwargs": [1]}, r"chat_template_kwargs=\[1\]"),
    "ours": ({"messages": USER, "chat_template_kwargs": {"tokenize": True}}, "kwargs=.*tokenize"),
}


@pytest.mark.parametrize("chat, message", NO_CHATS.values(), ids=NO_CHATS)
def test_chats_that_are_refused(chats, chat, message):
    with pytest.raises(ValueError, match=message):
        chats.generate([chat], SHORT)
    chats.tokenizer.chat_template = "{{ messages[0].content }}"
    try:
        with pytest.raises(ValueError, match=r"tools=.*template has none"):
            chats.generate({"messages": USER, "tools": TOOLS}, SHORT)
    finally:
        chats.tokenizer.chat_template = TEMPLATE


@pytest.mark.parametrize("text, told", [("a b", 0), ("a </s> b", 0), ("a c b", 1)])
def test_an_unknown_token_that_begins_every_text(text, told, caplog):
    """As OPT's does, which is its end token too."""
    words = models.WordLevel({"</s>": 0, "a": 1, "b": 2}, unk_token="</s>")
    own = Tokenizer(words)
    own.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    own.post_processor = processors.TemplateProcessing(
        single="</s> $A", special_tokens=[("</s>", 0)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=own, unk_token="</s>", eos_token="</s>")
    with Engine(tiny(), tokenizer, EngineConfig(num_pages=4)) as engine:
        assert len(engine.generate([text], SHORT)[0].prompt_token_ids) == len(text.split()) + 1
    assert caplog.text.count("1 tokens are unknown to the tokenizer") == told
