"""Streamers and stop strings of a patched model's ``generate`` are put and end what they do in
transformers; what a hook raises comes out as it is."""

import copy
import threading

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.generation import StopStringCriteria

import tinyspec
from tests.support import judge
from tests.support.hooks import AttentionRecorder, Boom, BoomError
from tests.support.judge import BASE, BLOCK, MASK, NEW, ROWS, greedy, joined, listen, one, pair
from tests.support.patience import PATIENCE
from tinyspec.tools.demo import BUNDLED

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
EMBEDS = torch.randn(3, 6, 64, generator=torch.Generator().manual_seed(0))
SAME = torch.tensor([ROWS[1][:6], ROWS[1][6:12], ROWS[3][:6]])
PADDED = {"input_ids": BLOCK, "attention_mask": MASK}
STREAMED = {
    "one-row": lambda g: {"input_ids": one(ROWS[0])},
    "batch": lambda g: {"input_ids": SAME},
    "padded": lambda g: PADDED,
    "ends": lambda g: {**PADDED, "eos_token_id": [g[0][2], g[1][5], g[3][0]]},
    "all-end": lambda g: {**PADDED, "eos_token_id": [g[0][2], g[1][5], g[2][1], g[3][0]]},
    "one-token": lambda g: {"input_ids": SAME, "max_new_tokens": 1},
    "samples": lambda g: {
        **PADDED,
        "do_sample": True,
        "top_k": 1,
        "num_return_sequences": 2,
        "eos_token_id": g[0][2],
    },
    "int32-dict": lambda g: {"input_ids": SAME.int(), "return_dict_in_generate": True},
    "embeddings": lambda g: {"inputs_embeds": EMBEDS},  # of no prompt that could be put
}


def test_puts_equal_transformers():
    """Shape, dtype, device and values of every put, and the end, in order."""
    for name, case in STREAMED.items():
        put = []
        for model in pair():
            recorder = AttentionRecorder()
            model.generate(**BASE | case(greedy()), streamer=recorder)
            put.append(recorder.puts)
        assert put[0] == put[1], name
        assert put[0][-1] == "end" and put[0].count("end") == 1, name


def test_a_streamer_for_each_row():
    """Only tinyspec has this: every one of them is put what it would be for its row alone."""
    model, own = pair()
    for settings in ({}, {"eos_token_id": [greedy()[0][2], greedy()[3][0]]}):
        several = [AttentionRecorder() for _ in ROWS]
        given = model.generate(**PADDED, **BASE | settings, streamer=several)
        for row, recorder, tokens in zip(ROWS, several, given, strict=True):
            alone = AttentionRecorder()
            own.generate(one(row), **BASE | settings, streamer=alone)
            assert recorder.puts == alone.puts
            new = tokens[BLOCK.shape[1] :].tolist()[: len(alone.puts) - 2]
            assert recorder.tokens[len(row) :] == new
    with pytest.raises(ValueError, match="streamer"):
        model.generate(**PADDED, **BASE, streamer=[AttentionRecorder()])
    several = [AttentionRecorder() for _ in range(4)]
    asked = {"do_sample": True, "num_return_sequences": 2, "seed": 1}
    model.generate(SAME[:2], **BASE, streamer=several, **asked)
    assert all(len(recorder.tokens) == 6 + NEW for recorder in several)
    assert several[0].tokens != several[1].tokens


def test_a_streamer_is_told_while_tokens_come():
    """A reader in another thread sees tokens before the call is over."""
    model, _ = pair()
    seen, go_on = threading.Event(), threading.Event()

    class Gate(AttentionRecorder):
        def put(self, value):
            super().put(value)
            if len(self.puts) == 3:
                seen.set()
                assert go_on.wait(PATIENCE)

    gate = Gate()
    worker = threading.Thread(target=lambda: model.generate(SAME, **BASE, streamer=gate))
    worker.start()
    assert seen.wait(PATIENCE) and worker.is_alive() and len(gate.puts) == 3
    go_on.set()
    worker.join(PATIENCE)
    assert len(gate.puts) == NEW + 2


HOOKS = {
    "processor": lambda boom: {"logits_processor": [boom]},
    "criterion": lambda boom: {"stopping_criteria": [boom]},
    "streamer": lambda boom: {"streamer": boom},
    "allowed": lambda boom: {"prefix_allowed_tokens_fn": boom},
    "drafter": lambda boom: {"assistant_model": boom},
    "streamers": lambda boom: {"streamer": [AttentionRecorder(), boom, AttentionRecorder()]},
}
RAISED = [(hook, 4, BoomError) for hook in HOOKS]
RAISED += [("processor", 1, KeyboardInterrupt), ("streamer", 1, SystemExit)]
RAISED += [("criterion", 8, StopIteration)]
RAISED += [("streamer", 10**6, BoomError), ("streamers", 10**6, BoomError)]  # in ``end``


@pytest.mark.parametrize("hook, at, kind", RAISED)
def test_what_a_hook_raises_comes_out(hook, at, kind):
    """The very exception, of a call of which nothing is left; the next one is served as if nothing
    had been."""
    model, own = pair()
    error = kind("from the user's hook")
    for deterministic in (False, True):
        with pytest.raises(kind) as raised:
            asked = {**BASE, "deterministic": deterministic}
            model.generate(SAME, **asked, **HOOKS[hook](Boom(error, at)))
        assert raised.value is error
    engine = model.generate._engine
    assert engine.pool.num_held == 0 and not len(engine.admission.table)
    assert not engine.admission.waiting and not engine.has_unfinished()
    assert torch.equal(model.generate(SAME, **BASE), own.generate(SAME, **BASE))
    assert torch.equal(model(SAME).logits, own(SAME).logits)


@pytest.mark.parametrize("several", [False, True], ids=["one", "several"])
def test_a_streamer_is_told_of_the_end_when_generate_raises(several):
    """As a TextIteratorStreamer's reader in another thread waits for it; once each."""
    model, _ = pair()
    recorders = [AttentionRecorder() for _ in (SAME if several else SAME[:1])]
    for hook, at in (("processor", 4), ("criterion", 4)):
        with pytest.raises(BoomError):
            streamer = recorders if several else recorders[0]
            model.generate(SAME, **BASE, **HOOKS[hook](Boom(BoomError(), at)), streamer=streamer)
        for recorder in recorders:
            assert recorder.puts.count("end") == 1 and recorder.puts[-1] == "end"
            recorder.puts.clear()


LONG = 24
TEXTS = ["Once upon a time", "The dog", "A girl named Lily had a red ball. She"]


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


STOPS = [
    lambda t: {"stop_strings": ["lived", "clev", "Finn Finn"]},
    lambda t: {"stop_strings": ["lived", "clev"], "min_new_tokens": LONG - 1},  # which end at once
    lambda t: {"generation_config": GenerationConfig(stop_strings="Finn Fi")},
    lambda t: {
        "stop_strings": ["lived", "Iris"],
        "stopping_criteria": [StopStringCriteria(t, ["Finn Fi"])],
    },
    lambda t: {
        "stop_strings": "Finn Fi",
        "eos_token_id": [0, 447],
        "do_sample": True,
        "top_k": 1,
        "num_return_sequences": 2,
    },
]


def test_stop_strings_equal_transformers(models, tokenizer):
    model, own = models
    inputs = tokenizer(TEXTS, padding=True, return_tensors="pt")
    rows = [tokenizer(text)["input_ids"] for text in TEXTS]
    full = model.generate(**inputs, max_new_tokens=LONG)
    for stop in STOPS:

        def settings(stop=stop):
            return {"max_new_tokens": LONG, "tokenizer": tokenizer, **stop(tokenizer)}

        given = model.generate(**inputs, **settings())
        alone = by_text(own, tokenizer, **settings())
        assert torch.equal(given, joined(inputs["input_ids"], rows, alone, pad=1))
        assert given.shape != full.shape or not torch.equal(given, full), "control"


def test_stop_strings_without_a_tokenizer(models, tokenizer):
    asked = {**tokenizer(TEXTS[0], return_tensors="pt"), "max_new_tokens": LONG}
    config = GenerationConfig(stop_strings=["a"])
    for given in ({"stop_strings": ["a"]}, {"generation_config": config}, {}):
        with judge.defaults(models, stop_strings=None if given else ["a"]):
            ours, theirs = (listen(m.generate, **asked, **given) for m in models)
        assert isinstance(theirs.error, ValueError) and ours.complaint == theirs.complaint
