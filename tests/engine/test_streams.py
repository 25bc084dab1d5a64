"""Work of an engine is in one order, whichever streams its callers have: by streams that record."""

from dataclasses import replace
from threading import Event, Thread

import pytest
import torch

from tests.support import streams
from tests.support.patience import PATIENCE
from tests.support.streams import Stream
from tests.support.tiny import prompts, tiny
from tinyspec import Engine, EngineConfig, SamplingParams
from tinyspec.model import torch_state

CONFIG = EngineConfig(reference_rows=8, page_size=4, max_model_len=64)
PARAMS = SamplingParams(max_new_tokens=5)
SAMPLED = replace(PARAMS, temperature=1.0, seed=1, num_return_sequences=3)


@pytest.fixture(autouse=True)
def streams_of_before():
    yield
    torch_state._streams.clear()


def two_callers(recorder) -> list:
    """Two threads with a stream each, one after the other, and a third caller that steps."""
    callers = [Stream() for _ in range(3)]
    with Engine(tiny(), config=CONFIG) as engine:

        def call(stream: Stream) -> None:
            with recorder.on(stream):
                recorder.work("before")
                engine.generate(prompts(3), SAMPLED)
                recorder.work("after")

        for stream in callers[:2]:
            thread = Thread(target=call, args=(stream,))
            thread.start()
            thread.join()
        with recorder.on(callers[2]):
            engine.add_request([1, 2, 3], PARAMS)
            while engine.has_unfinished():
                recorder.work("before")
                engine.step()
                recorder.work("after")
        engine.generate(prompts(2), PARAMS)
    return callers


def test_one_order(monkeypatch):
    """All that works on the pool; the caller's work before and after a call too."""
    recorder = streams.record(monkeypatch)
    callers = two_callers(recorder)
    pool = recorder.named(*streams.ON_THE_POOL)
    assert {work.name for work in pool} >= {"forward", "copy_pages"}
    (own,) = {work.stream for work in pool}
    assert own not in (*callers, recorder.current)
    assert recorder.ordered(pool)
    # A caller's work comes after the passes of its call and before those of the next.
    for n, work in enumerate(recorder.works):
        passes = [m for m, other in enumerate(recorder.works) if other.name == "forward"]
        if work.name == "after":
            assert {m for m in passes if m < n} <= work.before
        elif work.name == "before":
            assert n in recorder.works[next(m for m in passes if m > n)].before


def test_control_the_callers_stream(monkeypatch):
    """As it was: passes of two callers are in no order."""
    recorder = streams.record(monkeypatch, streams=False)
    callers = two_callers(recorder)
    pool = recorder.named(*streams.ON_THE_POOL)
    assert {work.stream for work in pool} == {*callers, recorder.current}
    assert not recorder.ordered(pool)


def test_code_of_the_user_changes_the_stream(monkeypatch):
    """For the rest of the step it is the engine's again, after what ran on the other."""
    recorder, other = streams.record(monkeypatch), Stream()

    def processor(ids, scores):
        recorder.set_stream(other)
        recorder.work("processor")
        return scores

    with Engine(tiny(), config=CONFIG) as engine:
        caller, kernels = recorder.current, engine.core.sampler.kernels

        def sample(*args, **kwargs):
            recorder.work("sample")
            return kernels.sample(*args, **kwargs)

        engine.core.sampler.kernels = replace(kernels, sample=sample)
        engine.generate([[1, 2, 3]], replace(PARAMS, logits_processors=[processor]))
        assert recorder.current is caller
        own = engine.runner.torch_state.stream.own
    works = recorder.named("forward", "processor", "sample")
    names = ["forward", "processor", "sample"]
    assert [work.name for work in works] == names * PARAMS.max_new_tokens
    assert [work.stream for work in works] == [own, other, own] * PARAMS.max_new_tokens
    for processed, after in zip(works[1::3], works[2::3], strict=True):
        assert recorder.works.index(processed) in after.before


def test_memory_of_what_is_handed_over(monkeypatch):
    """Scores that the caller gets, and embeddings that it gives."""
    recorder = streams.record(monkeypatch)
    params = replace(PARAMS, max_new_tokens=2)
    with Engine(tiny(), config=CONFIG) as engine:
        own, caller = engine.runner.torch_state.stream.own, recorder.current
        (request,) = engine.ready().requests([[1, 2, 3]], params)
        request.keeps = frozenset({"scores", "logits"})
        engine.tracker.submit([request])
        engine.tracker.run([request], bool)
        (sequence,) = request.sequences
        for tensor in (*sequence.scores, *sequence.logits):
            assert recorder.kept[tensor.data_ptr()] == [caller]
        assert len(sequence.scores) == len(sequence.logits) == 2
        given = torch.randn(3, engine.model.config.hidden_size)
        (request,) = engine.ready().requests([[0, 0, 0]], params)
        request.embeds = given
        engine.tracker.submit([request])
        engine.tracker.run([request], bool)
        assert recorder.kept[given.data_ptr()] == [own]


@pytest.mark.parametrize("queues", [True, False])
def test_memory_goes_back(queues, monkeypatch):
    """That of the pool, to the device, once it is free: by ``release`` and ``close``."""
    recorder = streams.record(monkeypatch, streams=queues)
    empty = torch.cuda.empty_cache

    def checked():
        assert not engine.runner.holds_memory
        empty()

    monkeypatch.setattr(torch.cuda, "empty_cache", checked)
    with Engine(tiny(), config=CONFIG) as engine:
        engine.generate(prompts(1), PARAMS)
        assert not recorder.named("empty_cache")
        engine.release()
        assert len(recorder.named("empty_cache")) == queues
    assert len(recorder.named("empty_cache")) == 2 * queues


def test_who_captures_is_alone(monkeypatch):
    """Work that another thread hands over to the stream would be captured with it."""
    streams.record(monkeypatch)
    stream, order = torch_state.stream_of(torch.device("cpu")), []
    inside, leave = Event(), Event()

    def other():
        with stream():
            order.append("other")
            inside.set()
            leave.wait(PATIENCE)

    thread = Thread(target=other)
    with stream():
        with stream(), stream.alone() as alone:
            thread.start()
            inside.wait(0.05)
            order.append("captured")
        assert alone and inside.wait(PATIENCE)
        with stream.alone() as alone:
            assert not alone
        leave.set()
        thread.join(PATIENCE)
        with stream.alone() as alone:
            assert alone
    assert order == ["captured", "other"]
