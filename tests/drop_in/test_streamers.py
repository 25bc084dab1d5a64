"""Streamers of ``model.generate`` of a patched model are put what transformers puts them; what a
hook raises comes out as it is."""

import threading

import pytest
import torch

from tests.support.hooks import AttentionRecorder, Boom, BoomError
from tests.support.judge import FAMILIES, NEW, PAD, ROWS, greedy, listen, one, padded, pair
from tests.support.patience import PATIENCE

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
BASE = {"max_new_tokens": NEW, "pad_token_id": PAD}
BLOCK, MASK = padded(ROWS)
SAME = torch.tensor([ROWS[1][:6], ROWS[1][6:12], ROWS[3][:6]])

STREAMED = {
    "one-row": lambda g: ({"input_ids": one(ROWS[0])}, {}),
    "batch": lambda g: ({"input_ids": SAME}, {}),
    "padded": lambda g: ({"input_ids": BLOCK, "attention_mask": MASK}, {}),
    "ends": lambda g: (
        {"input_ids": BLOCK, "attention_mask": MASK},
        {"eos_token_id": [g[0][2], g[1][5], g[3][0]]},
    ),
    "all-end": lambda g: (
        {"input_ids": BLOCK, "attention_mask": MASK},
        {"eos_token_id": [g[0][2], g[1][5], g[2][1], g[3][0]]},
    ),
    "one-token": lambda g: ({"input_ids": SAME}, {"max_new_tokens": 1}),
    "samples": lambda g: (
        {"input_ids": BLOCK, "attention_mask": MASK},
        {"do_sample": True, "top_k": 1, "num_return_sequences": 2, "eos_token_id": g[0][2]},
    ),
    "dict": lambda g: ({"input_ids": SAME}, {"return_dict_in_generate": True}),
    "int32": lambda g: ({"input_ids": SAME.int()}, {}),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("case", STREAMED.values(), ids=STREAMED)
def test_puts_equal_transformers(family, case):
    """Shape, dtype, device and values of every put, and the end, in order."""
    put = []
    for model in pair(family):
        recorder = AttentionRecorder()
        inputs, settings = case(greedy(family))
        model.generate(**inputs, **BASE | settings, streamer=recorder)
        put.append(recorder.puts)
    assert put[0] == put[1]
    assert put[0][-1] == "end" and put[0].count("end") == 1


def test_control_puts_of_other_rows_differ():
    put = []
    for model, ids in zip(pair(), (SAME, SAME.flip(0)), strict=True):
        recorder = AttentionRecorder()
        model.generate(ids, **BASE, streamer=recorder)
        put.append(recorder.puts)
    assert put[0] != put[1]


def test_no_input_streams_its_bos():
    put = []
    for model in pair():
        recorder = AttentionRecorder()
        model.generate(**BASE, bos_token_id=5, streamer=recorder)
        put.append(recorder.puts)
    assert put[0] == put[1]


def test_embeddings_stream_no_prompt():
    model, own = pair()
    embeds = model.get_input_embeddings()(SAME).detach()
    put = []
    for each in (model, own):
        recorder = AttentionRecorder()
        each.generate(inputs_embeds=embeds, **BASE, streamer=recorder)
        put.append(recorder.puts)
    assert put[0] == put[1]


@pytest.mark.parametrize("settings", [{}, {"eos_token_id": [greedy()[0][2], greedy()[3][0]]}])
def test_a_streamer_for_each_row(settings):
    """Only tinyspec has this: every one of them is put what it would be for its row alone."""
    model, own = pair()
    several = [AttentionRecorder() for _ in ROWS]
    given = model.generate(BLOCK, attention_mask=MASK, **BASE | settings, streamer=several)
    for row, recorder, tokens in zip(ROWS, several, given, strict=True):
        alone = AttentionRecorder()
        own.generate(one(row), **BASE | settings, streamer=alone)
        assert recorder.puts == alone.puts
        assert (
            recorder.tokens[len(row) :] == tokens[BLOCK.shape[1] :].tolist()[: len(alone.puts) - 2]
        )


def test_as_many_streamers_as_completions():
    model, _ = pair()
    with pytest.raises(ValueError, match="streamer"):
        model.generate(BLOCK, attention_mask=MASK, **BASE, streamer=[AttentionRecorder()])
    several = [AttentionRecorder() for _ in range(4)]
    model.generate(
        SAME[:2], **BASE, streamer=several, do_sample=True, num_return_sequences=2, seed=1
    )
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


def test_calls_from_several_threads():
    """One after the other, each with its own result."""
    model, own = pair()
    results = {}

    def call(number):
        results[number] = model.generate(SAME + number, **BASE, streamer=AttentionRecorder())

    workers = [threading.Thread(target=call, args=(number,)) for number in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(PATIENCE)
    for number in range(4):
        assert torch.equal(results[number], own.generate(SAME + number, **BASE))


HOOKS = {
    "processor": lambda boom: {"logits_processor": [boom]},
    "criterion": lambda boom: {"stopping_criteria": [boom]},
    "streamer": lambda boom: {"streamer": boom},
    "allowed": lambda boom: {"prefix_allowed_tokens_fn": boom},
    "streamers": lambda boom: {"streamer": [AttentionRecorder(), boom, AttentionRecorder()]},
}


RAISED = [(hook, at) for hook in HOOKS for at in (1, 2, 8)]
RAISED += [("streamer", 10**6), ("streamers", 10**6)]  # in ``end``


@pytest.mark.parametrize("hook, at", RAISED)
def test_what_a_hook_raises_comes_out(hook, at):
    """The very exception, and the next call is served as if nothing had been."""
    model, own = pair()
    error = BoomError("from the user's hook")
    with pytest.raises(BoomError) as raised:
        model.generate(SAME, **BASE, **HOOKS[hook](Boom(error, at)))
    assert raised.value is error
    assert torch.equal(model.generate(SAME, **BASE), own.generate(SAME, **BASE))
    assert torch.equal(model(SAME).logits, own(SAME).logits)


@pytest.mark.parametrize("hook", ["processor", "criterion", "streamer", "allowed"])
@pytest.mark.parametrize("kind", [KeyboardInterrupt, StopIteration, SystemExit, MemoryError])
def test_whatever_a_hook_raises_comes_out(hook, kind):
    model, own = pair()
    error = kind("out")
    with pytest.raises(kind) as raised:
        model.generate(SAME, **BASE, **HOOKS[hook](Boom(error, 4)))
    assert raised.value is error
    assert torch.equal(model.generate(SAME, **BASE), own.generate(SAME, **BASE))


def test_control_hooks_that_do_not_raise():
    model, own = pair()
    for hook in ("processor", "criterion", "allowed"):
        given, judged = (
            m.generate(SAME, **BASE, **HOOKS[hook](Boom(BoomError(), 10**6))) for m in (model, own)
        )
        assert torch.equal(given, judged)


def test_streamers_of_a_failed_call_raise_as_transformers():
    """A streamer without ``put``, and one that refuses batches."""
    for streamer in (object(), 5, "text"):
        ours, theirs = (listen(m.generate, SAME, **BASE, streamer=streamer) for m in pair())
        assert type(ours.error) is type(theirs.error) is AttributeError
