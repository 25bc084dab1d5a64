"""``generate_batch`` and managers of a patched model: transformers' types and methods, with the
tokens of ``generate``.

Controls: what transformers' own continuous batching ignores changes the tokens here; logits that
depend on the row count show in plain requests.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import pickle
import queue
import sys
import threading
import time
from dataclasses import fields

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    ContinuousBatchingConfig,
    GenerationConfig,
)
from transformers.generation.continuous_batching import ContinuousBatchingManager
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

import tinyspec
from tests.support.drop_in import (
    PAD,
    SMALL,
    AfterEven,
    AtMultiples,
    greedy,
    own,
    patched,
    portrait,
    random_ids,
)
from tests.support.patience import PATIENCE
from tests.support.sensitive import ShapeSensitiveLinear, replace_linears
from tests.support.tiny import tiny
from tinyspec.tools.demo import BUNDLED

PROMPTS = [random_ids(5, 1), random_ids(12, 2), random_ids(8, 3)]
SAMPLED = {"do_sample": True, "temperature": 2.0, "top_k": 0}
FINISHED, FAILED = RequestStatus.FINISHED, RequestStatus.FAILED


@pytest.fixture(scope="module")
def served():
    with patched(tiny()) as model:
        yield model


def config(**settings):
    return GenerationConfig(**{"max_new_tokens": 8, "pad_token_id": PAD, **settings})


def rows(model, prompts=PROMPTS, **settings):
    """What ``generate`` adds to each prompt, up to the end that ``generate_batch`` gives it."""
    return model.generate(prompts, **settings)[:, max(map(len, prompts)) :].tolist()


def tokens(outputs):
    return [output.generated_tokens for output in outputs]


class Started:
    """A manager that runs in a block, and stops at once where the block fails."""

    def __init__(self, model, *configs, **named):
        self.manager = model.init_continuous_batching(*configs, **named)

    def __enter__(self):
        self.manager.start()
        return self.manager

    def __exit__(self, kind, *_):
        self.manager.stop(hard_stop=kind is not None, timeout=PATIENCE)


def results(manager, ids):
    return [manager.get_result(request_id, PATIENCE) for request_id in ids]


def slow_processor(ids, scores):
    time.sleep(0.01)
    return scores


LONG = {"max_new_tokens": 150, "logits_processor": [slow_processor]}


def test_outputs_are_transformers_own(served):
    given = config(num_return_sequences=2, **SAMPLED)
    cb = ContinuousBatchingConfig(return_logprobs=True)
    outputs = served.generate_batch(PROMPTS, given, cb, record_timestamps=True, seed=[4, 5, 6])
    names = [f"req_{n}{child}" for n in range(3) for child in ("__child#0", "")]
    assert list(outputs) == names == [output.request_id for output in outputs.values()]
    assert tokens(outputs.values()) == rows(served, generation_config=given, seed=[4, 5, 6])
    for number, output in enumerate(outputs.values()):
        assert type(output) is GenerationOutput and output.is_finished()
        assert {field.name for field in fields(output)} <= vars(output).keys()
        assert output.prompt_ids == PROMPTS[number // 2] and output.seed == 4 + number // 2
        assert (output.status, output.error) == (FINISHED, None)
        assert len(output.logprobs) == len(output.timestamps) == 8
        assert max(output.logprobs) <= 0
        begun, ended = output.lifespan
        assert output.created_time <= begun <= output.timestamps[0] <= output.timestamps[-1]
        assert output.timestamps == sorted(output.timestamps) and output.timestamps[-1] <= ended
    plain = served.generate_batch(PROMPTS[:1], given)["req_0"]
    assert (plain.logprobs, plain.timestamps) == ([], None)
    assert served.generate_batch([]) == {}


def test_tokens_are_those_of_generate(served):
    """Greedy ones of transformers' own; of a seed in an argument, in a config, of torch's."""
    found = served.generate_batch(PROMPTS, config())
    assert tokens(found.values()) == [greedy(own(), prompt) for prompt in PROMPTS]
    for given, more in (
        (config(**SAMPLED), {"seed": 3}),
        (config(**SAMPLED), {}),
    ):
        torch.manual_seed(0)
        expected = rows(served, generation_config=given, **more)
        torch.manual_seed(0)
        found = served.generate_batch(PROMPTS, given, **more)
        assert tokens(found.values()) == expected
    assert expected != rows(served, generation_config=given, seed=3)


@pytest.mark.slow("crosses", 0.5)
def test_a_base_of_seeds(served):
    """Of a config, also of continuous batching's: equal prompts differ, and a script repeats."""

    def script(*configs):
        with patched(tiny()) as model:
            first = model.generate_batch(PROMPTS[:1] * 4, *configs)
            with Started(model, *configs) as manager:
                ids = [manager.add_request(PROMPTS[0]) for _ in range(2)]
                return tokens([*first.values(), *results(manager, ids)])

    based = script(config(seed=9, **SAMPLED))
    assert based == script(config(**SAMPLED), ContinuousBatchingConfig(seed=9))
    assert based == script(config(seed=9, **SAMPLED)) != script(config(seed=8, **SAMPLED))
    assert len(set(map(tuple, based))) == 6


def test_what_continuous_batching_ignores_is_honoured(served):
    """Processors, criteria, EOS and the default top_k."""
    plain = tokens(served.generate_batch(PROMPTS, config()).values())
    for settings in (
        {"logits_processor": [AfterEven()]},
        {"stopping_criteria": [AtMultiples()]},
        {"eos_token_id": plain[0][2]},
        {"repetition_penalty": 5.0, "no_repeat_ngram_size": 2},
    ):
        found = tokens(served.generate_batch(PROMPTS, config(), **settings).values())
        assert found[0] != plain[0]
        for row, prompt in zip(found, PROMPTS, strict=True):
            expected = greedy(own(), prompt, **settings)
            assert row == expected
    sampled = config(do_sample=True, temperature=5.0, max_new_tokens=1)
    top = own()(torch.tensor([PROMPTS[0]])).logits[0, -1].topk(50).indices.tolist()
    for seed in range(5):
        (output,) = served.generate_batch(PROMPTS[:1], sampled, seed=seed).values()
        assert output.generated_tokens[0] in top


@pytest.mark.slow("crosses", 3)
def test_stop_strings():
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED)
    plain = AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32)
    ids = tokenizer("Once upon a time")["input_ids"]
    text = tokenizer.decode(greedy(plain, ids, 40))
    stop = {"stop_strings": ["nowhere", text[40:44]], "tokenizer": tokenizer}
    expected = greedy(plain, ids, 40, **stop)
    assert 1 < len(expected) < 40
    stop |= {"max_new_tokens": 40, "do_sample": False}
    with patched(copy.deepcopy(plain), None) as model:
        assert model.generate_batch([ids], **stop)["req_0"].generated_tokens == expected
        with Started(model) as manager:
            output = manager.get_result(manager.add_request(ids, **stop), PATIENCE)
            assert output.generated_tokens == expected


def test_deterministic_bits_alone_and_in_a_crowd():
    """Control: this model's plain logits depend on the row count."""
    cb = ContinuousBatchingConfig(return_logprobs=True)
    crowd = [random_ids(3 + n, n) for n in range(6)]

    def answers(model, deterministic, others):
        with Started(model, config(**SAMPLED), cb) as manager:
            more = manager.add_requests(others, seed=1)
            asked = {"deterministic": deterministic, "seed": 7}
            ids = [manager.add_request(prompt, **asked) for prompt in PROMPTS[:2]]
            found = results(manager, ids)
            results(manager, more)
        return [(o.generated_tokens, list(map(repr, o.logprobs))) for o in found]

    with patched(replace_linears(tiny(), ShapeSensitiveLinear)) as model:
        alone = answers(model, True, [])
        assert alone == answers(model, True, crowd)
        given = config(**SAMPLED)
        expected = rows(model, PROMPTS[:2], generation_config=given, seed=7, deterministic=True)
        assert [row for row, _ in alone] == expected
        assert answers(model, False, []) != answers(model, False, crowd)


def test_a_manager(served):
    """Its methods in the order in which a server calls them."""
    manager = served.init_continuous_batching(config())
    assert isinstance(manager, ContinuousBatchingManager)
    assert not manager.is_running() and manager.get_result() is None
    first = manager.add_request(PROMPTS[0])  # before start
    manager.start()
    assert manager.is_running() and first == "req_0"
    named = manager.add_request(PROMPTS[1], "mine", max_new_tokens=3, eos_token_id=[-1])
    several = manager.add_requests(PROMPTS, max_new_tokens=[2, 3, 4])
    assert (named, several) == ("mine", ["req_1", "req_2", "req_3"])
    found = {}
    for output in manager:
        found[output.request_id] = output
        if len(found) == 5:
            break
    expected = [greedy(own(), prompt) for prompt in PROMPTS]
    assert found[first].generated_tokens == expected[0]
    assert found["mine"].generated_tokens == expected[1][:3]
    short = [row[:n] for row, n in zip(expected, (2, 3, 4), strict=True)]
    assert tokens(found[name] for name in several) == short
    streamed = manager.add_request(PROMPTS[2], streaming=True, record_timestamps=True)
    events = list(manager.request_id_iter(streamed))
    assert tokens(events) == [expected[2][: n + 1] for n in range(8)]
    assert [event.status for event in events[-2:]] == [RequestStatus.DECODING, FINISHED]
    assert len(events[-1].timestamps) == 8
    begun = time.monotonic()
    assert manager.get_result(timeout=0.05) is None and time.monotonic() - begun >= 0.05
    assert manager.get_result("nobody") is None
    manager.stop()
    assert not manager.is_running() and manager.get_result() is None
    with pytest.raises(AttributeError, match="no such_thing"):
        _ = manager.such_thing


def test_stop_and_cancel(served, caplog):
    """What is stopped finishes, or fails at once; what is cancelled is told of no more."""
    with Started(served, config()) as manager:
        gone = manager.add_request(PROMPTS[0], **LONG)
        kept = manager.add_request(PROMPTS[1])
        manager.cancel_request(gone)
        manager.cancel_request("nobody")
        assert list(manager.request_id_iter(gone)) == []
        assert manager.get_result(timeout=PATIENCE).request_id == kept
    last = manager.add_request(PROMPTS[0])  # after stop
    assert last is None and "dropped" in caplog.text
    with pytest.raises(RuntimeError, match=r"deterministic=True.*stopped"):
        manager.add_request(PROMPTS[0], deterministic=True)
    manager.start()
    flushed = manager.add_request(PROMPTS[0])
    manager.stop()
    assert manager.get_result(flushed).generated_tokens == greedy(own(), PROMPTS[0])
    manager.start()
    failed = manager.add_request(PROMPTS[0], streaming=True, **LONG)
    queued = manager.get_result(failed, PATIENCE) and manager.add_request(PROMPTS[1], **LONG)
    manager.stop(hard_stop=True)
    found = {output.request_id: output for output in manager}
    assert found.keys() == {failed, queued}
    assert all(o.status == FAILED and "stopped" in o.error for o in found.values())
    assert 1 <= len(found[failed].generated_tokens) < 150
    assert rows(served, max_new_tokens=3) == [greedy(own(), prompt, 3) for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"input_ids": []}, ValueError, r"input_ids=\[\]"),
        ({"input_ids": "text"}, ValueError, "input_ids='text'"),
        ({"input_ids": [1, 2.5]}, ValueError, "input_ids=2.5"),
        ({"input_ids": [1, 128]}, ValueError, "input_ids=128"),
        ({"max_new_tokens": 0}, ValueError, "max_new_tokens"),
        ({"temperature": -1.0, "do_sample": True}, ValueError, "temperature"),
        ({"no_such": 1}, NotImplementedError, "no_such"),
        ({"seed": -1}, ValueError, "seed=-1"),
        ({"streamer": object()}, ValueError, "streamer"),
        ({"inputs_embeds": torch.ones(1, 2, 3)}, ValueError, "inputs_embeds"),
        ({"num_beams": 2}, NotImplementedError, "beam"),
        ({"num_beams": 2, "deterministic": True}, NotImplementedError, "beam"),
        ({"max_new_tokens": 10_000, "deterministic": True}, NotImplementedError, "positions"),
        ({"max_time": 1.0, "deterministic": True}, ValueError, "max_time"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_bad_requests_name_the_field(served, wrong, error, message):
    """At once, and none is left; nothing of what is not served runs elsewhere."""
    manager = served.init_continuous_batching()
    settings = {"input_ids": PROMPTS[0], **wrong}
    with pytest.raises(error, match=message):
        manager.add_request(**settings)
    prompt = settings.pop("input_ids")
    with pytest.raises(error, match=message.replace("input_ids", r"inputs\[1\]")):
        served.generate_batch([PROMPTS[0], prompt], **settings)
    manager.start()
    manager.stop()
    assert manager.get_result() is None


@pytest.mark.slow("crosses", 0.2)
def test_ids_that_are_taken(served):
    manager = served.init_continuous_batching(config())
    manager.add_request(PROMPTS[0], "one")
    with pytest.raises(ValueError, match="request_id='one'"):
        manager.add_request(PROMPTS[0], "one")
    manager.cancel_request("one")
    assert manager.add_request(PROMPTS[1], "one") == "one"
    manager.start()
    assert manager.get_result("one").generated_tokens == greedy(own(), PROMPTS[1])
    manager.stop()


@pytest.mark.slow("crosses", 0.2)
def test_a_full_queue(served, monkeypatch):
    monkeypatch.setattr("tinyspec.drop_in.worker.PATIENCE", 0.01)
    cb = ContinuousBatchingConfig(max_queue_size=1)
    manager = served.init_continuous_batching(config(), cb)
    manager.add_request(PROMPTS[0])
    with pytest.raises(queue.Full):
        manager.add_request(PROMPTS[1])
    manager.start()
    manager.stop()
    assert [output.request_id for output in manager] == ["req_0"]


def test_a_request_that_fails_hurts_no_other(served):
    def raises(ids, scores):
        raise KeyError("mine")

    with Started(served, config()) as manager:
        ids = [manager.add_request(PROMPTS[0], logits_processor=[raises])]
        ids.append(manager.add_request(PROMPTS[1]))
        bad, good = results(manager, ids)
    assert bad.status == FAILED and "mine" in bad.error
    assert good.generated_tokens == greedy(own(), PROMPTS[1])
    with pytest.raises(KeyError, match="mine"):
        served.generate_batch(PROMPTS, config(), logits_processor=[raises])


@pytest.mark.slow("crosses", 0.2)
def test_handlers_of_an_event_loop(served):
    async def main():
        told = asyncio.Queue()
        with Started(served, config(max_new_tokens=3)) as manager:
            early = manager.add_request(PROMPTS[0], "early")
            while manager._worker._rows:  # its output lies there before the handler
                await asyncio.sleep(0.01)
            manager.register_result_handler(early, told.put_nowait)
            manager.register_result_handler("late", told.put_nowait)
            manager.add_request(PROMPTS[1], "late", streaming=True)
            return [await told.get() for _ in range(4)]

    found = asyncio.run(main())
    assert [output.request_id for output in found] == ["early"] + ["late"] * 3
    assert found[-1].generated_tokens == greedy(own(), PROMPTS[1], 3)


@pytest.mark.slow("crosses", 1)
def test_other_calls_and_pauses_beside_a_manager(served):
    """They get the model when what runs has finished; what is queued goes on behind them."""
    expected = rows(served, max_new_tokens=8)
    with Started(served, config()) as manager:
        first = manager.add_request(PROMPTS[0], streaming=True, **LONG | {"max_new_tokens": 30})
        manager.get_result(first, PATIENCE)
        assert rows(served, max_new_tokens=8) == expected
        assert list(manager.request_id_iter(first))[-1].status == FINISHED
        with manager.pause():
            paused = manager.add_request(PROMPTS[1])
            assert manager.get_result(paused, timeout=0.05) is None
            assert torch.equal(*(m(torch.tensor([PROMPTS[0]])).logits for m in (served, own())))
            assert rows(served, max_new_tokens=8) == expected
            with pytest.raises(RuntimeError, match="inside of pause"):
                manager.stop()
        assert manager.get_result(paused).generated_tokens == greedy(own(), PROMPTS[1])
    with pytest.raises(RuntimeError, match="no generation loop"), manager.pause():
        pass


def test_context_managers_and_kept_managers(served):
    with served.continuous_batching_context_manager(config(), persistent_manager=True) as manager:
        output = manager.get_result(manager.add_request(PROMPTS[0]), PATIENCE)
        assert output.generated_tokens == greedy(own(), PROMPTS[0])
    assert not manager.is_running()
    assert served.init_continuous_batching(config(max_new_tokens=2)) is manager
    manager.start()
    assert len(manager.get_result(manager.add_request(PROMPTS[0])).generated_tokens) == 2
    served.destroy_cached_continuous_batching_manager()
    assert not manager.is_running()
    served.generate_batch(PROMPTS[:1], config(), persistent_manager=True)
    assert served.init_continuous_batching() is not manager
    twin = pickle.loads(pickle.dumps(served))
    assert type(twin.generate_batch) is type(own().generate_batch)
    served.destroy_cached_continuous_batching_manager()
    with served.continuous_batching_context_manager() as manager:
        pass
    assert not manager.is_running()


def test_generate_with_a_paged_cache(served, caplog):
    """transformers hands such a call to ``generate_batch``, pads included."""
    ids = torch.tensor([PROMPTS[0], PROMPTS[1][:5]])
    with caplog.at_level(logging.ERROR):
        found = served.generate(ids, cache_implementation="paged", max_new_tokens=4)
    assert torch.equal(found[0, :, :5], ids) and not caplog.records
    assert found[0, :, 5:].tolist() == [greedy(own(), row, 4) for row in ids.tolist()]


def test_processors_are_called_for_each_row_alone(served):
    seen = []

    def odd(ids, scores):
        seen.append(ids.tolist())
        scores[:, ids.shape[1] % 2 :: 2] = -torch.inf
        return scores

    given = {"generation_config": config(), "logits_processor": [odd]}
    found = tokens(served.generate_batch(PROMPTS, **given).values())
    assert {len(ids) for ids in seen} == {1} and {len(ids[0]) for ids in seen} >= {5, 12, 8}
    assert found == rows(served, **given | {"logits_processor": [[odd]] * 3})
    # Control: for all rows at once it sees pads, and lengths with them.
    seen.clear()
    assert found != rows(served, **given)
    assert {len(ids) for ids in seen} == {3} and {len(ids[0]) for ids in seen} == set(range(12, 20))


def test_another_transformers_is_named(served, monkeypatch):
    """One whose continuous batching lies elsewhere."""
    monkeypatch.delattr("tinyspec.drop_in.batches", raising=False)
    monkeypatch.setitem(sys.modules, "tinyspec.drop_in.batches", None)
    for call in (lambda: served.generate_batch(PROMPTS), served.init_continuous_batching):
        with pytest.raises(RuntimeError, match=r"transformers 5.*model\.generate"):
            call()


def test_unpatched_all_is_transformers_own():
    model = tiny()
    before = portrait(model)
    tinyspec.patch(model, SMALL, deterministic=True)
    assert model.generate_batch(PROMPTS[:1], deterministic=False)["req_0"].is_finished()
    with pytest.raises(NotImplementedError, match="beam"):
        model.generate_batch(PROMPTS, num_beams=2)
    copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    manager, stopped = (model.init_continuous_batching(config()) for _ in range(2))
    manager.start()
    running = manager.add_request(PROMPTS[0], streaming=True, deterministic=False, **LONG)
    assert manager.get_result(running, PATIENCE) is not None
    tinyspec.unpatch(model)
    assert portrait(model) == before
    *_, end = manager
    assert end.status == FAILED and end.error == "the model was unpatched"
    manager.join(0, PATIENCE)
    assert not manager.is_running()
    stopped.start()
    output = stopped.get_result(stopped.add_request(PROMPTS[0]), PATIENCE)
    assert output.status == FAILED and "unpatched" in output.error
    stopped.stop()
    for one in (model, *copies):
        assert one.generate_batch.__func__ is type(model).generate_batch
        assert one.init_continuous_batching.__func__ is type(model).init_continuous_batching


@pytest.mark.slow("random use", 4)
def test_many_threads_use_one_manager(served):
    expected = {n: greedy(own(), random_ids(3 + n, n), 12) for n in range(8)}
    wrong = []

    def use(number):
        for turn in range(6):
            n = (number + turn) % 8
            prompt = random_ids(3 + n, n)
            if turn == number % 6:
                found = rows(served, [prompt], max_new_tokens=12, do_sample=False)[0]
            else:
                name = manager.add_request(prompt, deterministic=bool(turn % 2))
                found = manager.get_result(name, PATIENCE).generated_tokens
            if found != expected[n]:
                wrong.append((n, found))

    with Started(served, config(max_new_tokens=12)) as manager:
        threads = [threading.Thread(target=use, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        assert not any(thread.is_alive() for thread in threads)
    assert wrong == []
