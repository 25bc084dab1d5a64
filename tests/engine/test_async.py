"""AsyncEngine: any number of tasks, one batch, one thread that steps."""

import asyncio
import gc
import sys
import threading
import time
import weakref
from dataclasses import replace

import pytest

from tests.support.budget import first
from tests.support.cases import bits_of, engine_of, greedy, model_of, one_by_one, text, whole
from tests.support.mixes import bits
from tests.support.patience import PATIENCE
from tests.support.tiny import tiny
from tinyspec import AsyncEngine, Engine, EngineConfig, QueueFull, SamplingParams
from tinyspec.engine.async_worker import Call

SETTINGS = {"page_size": 8, "num_pages": 120}
REQUESTS = [(text(3 + 7 * n, seed=n), greedy(9, temperature=n % 2, seed=n)) for n in range(5)]
LONG = SamplingParams(max_new_tokens=450)


@pytest.fixture(scope="module")
def expected():
    with engine_of(model_of("shape-sensitive"), **SETTINGS) as engine:
        return one_by_one(engine, REQUESTS)


@pytest.fixture
def served():
    """An AsyncEngine, which must be left as it was."""
    with engine_of(model_of("shape-sensitive"), **SETTINGS) as engine:
        yield (served := AsyncEngine(engine))
        run(settled(served))
        run(served.close())
        assert not engine.tracker.closed, "it was given"


def run(main):
    """With an end, so that what hangs fails."""
    return asyncio.run(asyncio.wait_for(main, PATIENCE))


async def settled(served):
    """Until nothing is unfinished and no page is held."""
    while served.engine.has_unfinished() or not whole(served.engine):
        await asyncio.sleep(0.001)


async def one(served, prompt, params, **how):
    return (await served.generate([prompt], params, **how))[0]


async def collect(events):
    return [event async for event in events]


async def read(served, prompt, params):
    """The bits of a request, put together from its events."""
    *others, last = events = await collect(served.stream([prompt], params))
    assert {event.finish_reason for event in others} <= {None}
    tokens = [token for event in events for token in event.token_ids]
    logprobs = [value for event in events for value in event.logprobs]
    return [(tokens, logprobs, last.finish_reason)]


async def begun(served, params=LONG, **how):
    """A stream whose request has begun."""
    events = served.stream([[4, 5]], params, **how)
    event = await anext(events)
    assert event.token_ids and event.error is None
    return events, event.request_id


def test_tasks_share_passes(served, expected):
    async def main():
        streams = (read(served, *request) for request in REQUESTS)
        outputs = (one(served, *request) for request in REQUESTS)
        return await asyncio.gather(asyncio.gather(*streams), asyncio.gather(*outputs))

    streamed, outputs = run(main())
    assert streamed == expected and bits_of(outputs) == expected
    assert max(record.running for record in served.engine.records) > 5


@pytest.mark.parametrize("count", first(1, [100, 1000], 2))
def test_a_thousand_tasks_at_once(count):
    """Few of them in the engine at a time, and each gets its own."""
    config = EngineConfig(reference_rows=16, **SETTINGS)
    served = AsyncEngine(tiny(), config=config, max_requests=count // 3)
    prompts, engine = [[n % 128, n // 128] for n in range(count)], served.engine

    async def main():
        params = SamplingParams(max_new_tokens=1)
        exact = replace(params, deterministic=True)
        async with served:
            outputs = await asyncio.gather(*(one(served, prompt, exact) for prompt in prompts))
            return outputs, await served.generate(prompts[::50], params)

    outputs, again = run(main())
    assert [output.prompt_token_ids for output in outputs] == prompts
    few, others = ([o.completions[0].token_ids for o in each] for each in (outputs[::50], again))
    assert few == others
    most = max(record.running + record.waiting for record in engine.records)
    assert 1 < most <= count // 3 and engine.tracker.closed


def test_cancelling_aborts(served, expected):
    """A task that waits for outputs, one that reads, one whose call has not begun, and a stream
    that is left; others go on."""

    async def main():
        left, _ = await begun(served)
        events, _ = await begun(served)
        reads = asyncio.create_task(collect(events))
        waits = asyncio.create_task(one(served, [1, 2, 3], LONG))
        other = asyncio.create_task(one(served, *REQUESTS[0]))
        await asyncio.sleep(0.001)
        late = asyncio.create_task(one(served, [6], LONG))
        await asyncio.sleep(0)
        for task in (reads, waits, late):
            task.cancel()
        await left.aclose()
        ended = await asyncio.gather(reads, waits, late, return_exceptions=True)
        await settled(served)
        return ended, bits(await other)

    ended, found = run(main())
    assert [type(error) for error in ended] == [asyncio.CancelledError] * 3
    assert found == expected[0]


@pytest.mark.parametrize(
    ("interval", "count", "tokens"),
    [(None, 2, 1), (None, 17, 2), (None, 33, 3), (1, 17, 1), (5, 2, 5)],
)
def test_streams_of_a_crowd_get_more_at_a_time(interval, count, tokens):
    """Their first and last tokens at once, the others every few passes; all of them."""

    def unhurried(_, scores):
        """The loop has answered all before the next pass ends."""
        time.sleep(0.02)
        return scores

    async def main(engine):
        served = AsyncEngine(engine, stream_interval=interval)
        quick = SamplingParams(max_new_tokens=16, min_new_tokens=16)
        params = [replace(quick, logits_processors=[unhurried]), *[quick] * (count - 1)]
        prompts = [[4, 5, n] for n in range(count)]
        streams = map(served.stream, ([p] for p in prompts), params)
        found = await asyncio.gather(*map(collect, streams))
        await served.close()
        outputs = [output.completions[0].token_ids for output in engine.generate(prompts, params)]
        assert [[t for event in events for t in event.token_ids] for events in found] == outputs
        sizes = [[len(event.token_ids) for event in events] for events in found]
        assert {first for first, *_ in sizes} == {1}
        assert min(n for _, _, *middle, _ in sizes for n in middle) == tokens

    with Engine(tiny(), config=EngineConfig(num_pages=200, page_size=8)) as engine:
        run(main(engine))


def test_a_step_that_raises_fails_its_calls_and_no_later_one(served, expected, monkeypatch):
    step = served.engine.core.begin

    def fails():
        monkeypatch.setattr(served.engine.core, "begin", step)
        raise MemoryError("no memory")

    async def main():
        events, _ = await begun(served)
        monkeypatch.setattr(served.engine.core, "begin", fails)
        with pytest.raises(MemoryError):
            await collect(events)
        return bits(await one(served, *REQUESTS[1]))

    assert run(main()) == expected[1]


def test_a_loop_that_ends_leaves_nothing(served):
    loop = asyncio.new_event_loop()
    task = loop.create_task(one(served, [1, 2], replace(LONG, max_new_tokens=60)))
    loop.call_later(0.01, loop.stop)
    loop.run_forever()
    loop.close()
    run(settled(served))
    assert not task.done()
    task._log_destroy_pending = False


def test_closing_fails_what_is_unfinished(served):
    async def main():
        calls = [asyncio.create_task(one(served, [n], LONG)) for n in range(2)]
        calls.append(asyncio.create_task(read(served, [7], replace(LONG, logprobs=True))))
        await asyncio.sleep(0.01)
        await served.close()
        ended = await asyncio.gather(*calls, return_exceptions=True)
        with pytest.raises(ValueError, match="engine='closed'"):
            await one(served, [1], LONG)
        return ended

    assert all("engine='closed'" in str(error) for error in run(main()))


class PanicError(BaseException):
    """As pyo3's PanicException, which is no Exception."""


@pytest.mark.parametrize("kind", [PanicError, StopIteration, KeyError])
def test_whatever_is_raised_as_a_call_begins_ends_that_call(served, kind):
    """The worker goes on, with the others' requests, and tells so; control: one that has ended."""

    class Raises(list):
        def __iter__(self):
            raise kind("no tokens")

    async def main():
        crowd = asyncio.create_task(one(served, *REQUESTS[0]))
        with pytest.raises(KeyError if kind is KeyError else RuntimeError, match="no tokens"):
            await served.generate(Raises([[1], [2]]), LONG)
        assert len((await crowd).completions[0].token_ids) == 9 and served.alive
        assert not served.waiting
        await served.close()
        assert not served.alive and served.engine.closed is None

    run(main())


def test_one_that_is_dropped_gives_the_model_back():
    model = tiny()
    served = AsyncEngine(model)
    run(one(served, [1, 2], SamplingParams(max_new_tokens=2)))
    gone, engine = weakref.ref(served), served.engine
    del served
    gc.collect()
    assert gone() is None and engine.tracker.closed
    assert not any(thread.name == "tinyspec" for thread in threading.enumerate())
    Engine(model).close()


def test_a_finalizer_at_any_line_wakes_the_worker(served):
    """Also at those lines that another one is at in the same thread."""
    call, lines = Call(list, list), []

    def finalizer(frame, event, argument):
        lines.append(frame.f_lineno)
        served._worker.end(call)

    def wakes():
        sys.setprofile(finalizer)
        try:
            served._worker.end(call)
        finally:
            sys.setprofile(None)

    thread = threading.Thread(target=wakes, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive() and len(lines) >= 5


def test_scores_fingerprint_and_stats(served, expected):
    """In a crowd; the engine's own, to the bit. Control: other tokens have other scores."""
    prompts, tokens = [p for p, _ in REQUESTS], [own[0][0] for own in expected]
    own = served.engine.score(prompts, tokens)
    assert own != served.engine.score(prompts, [*tokens[1:], tokens[0]])

    async def main():
        crowd = [asyncio.create_task(one(served, *request)) for request in REQUESTS]
        scores = (served.score([p], [t]) for p, t in zip(prompts, tokens, strict=True))
        before, *scores = await asyncio.gather(served.stats(), *scores)
        committed = before.committed
        with pytest.raises(ValueError, match="continuations="):
            await served.score(prompts, tokens[1:])
        assert await served.fingerprint() == served.engine.fingerprint
        assert bits_of(await asyncio.gather(*crowd)) == expected
        assert [score for (score,) in scores] == own
        after = await served.stats()
        assert before.committed == committed < after.committed == served.engine.stats().committed

    run(main())


def test_a_full_queue_refuses_at_once(expected):
    """And leaves the others alone; what ends makes room. Of a burst what fits is not refused."""
    with engine_of(model_of("shape-sensitive"), **SETTINGS) as engine:
        served = AsyncEngine(engine, max_requests=2, max_waiting=1)

        async def main():
            calls = [one(served, *request) for request in REQUESTS]
            burst = await asyncio.gather(*calls, return_exceptions=True)
            refused = [n for n, found in enumerate(burst) if isinstance(found, QueueFull)]
            assert refused in ([3, 4], [3], [4]), "while one begins another may queue"
            assert all(bits(burst[n]) == expected[n] for n in {*range(5)} - {*refused})
            running = [await begun(served), await begun(served)]
            waits = asyncio.create_task(one(served, *REQUESTS[0]))
            await asyncio.sleep(0)
            assert served.waiting == 1
            for call in (one(served, [1], LONG), served.score([[1]], [[2]])):
                with pytest.raises(QueueFull, match="1 calls wait"):
                    await call
            with pytest.raises(QueueFull):
                await anext(served.stream([[1]], LONG))
            waits.cancel()
            while served.waiting:
                await asyncio.sleep(0.001)
            waits = asyncio.create_task(one(served, *REQUESTS[1]))
            await running[0][0].aclose()
            output = await waits
            assert engine.has_unfinished(), "the other one that runs"
            await running[1][0].aclose()
            await settled(served)
            await served.close()
            return bits(output)

        assert run(main()) == expected[1]


def test_timeouts_abort(served, expected, monkeypatch):
    """What has begun, what waits, and what nobody reads; what has finished can still be read."""

    async def main():
        loop, late = asyncio.get_running_loop(), 0
        now = loop.time
        monkeypatch.setattr(loop, "time", lambda: now() + late)
        streams = [(await begun(served, timeout=50))[0] for _ in range(2)]
        finished, _ = await begun(served, replace(LONG, max_new_tokens=5), timeout=50)
        other = asyncio.create_task(one(served, *REQUESTS[2], timeout=500))
        while len(served.engine.tracker.requests) > 2 or not other.done():
            await asyncio.sleep(0.001)
        tasks = [asyncio.create_task(one(served, [n], LONG, timeout=50)) for n in range(2)]
        await asyncio.sleep(0)
        late = 60
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        await settled(served)  # of the one that nobody reads, too
        for stream in streams:
            with pytest.raises(TimeoutError, match="within 50 seconds"):
                await anext(stream)
        assert [len(event.token_ids) async for event in finished] == [4]
        return ended, bits(await other)

    ended, found = run(main())
    assert [type(error) for error in ended] == [TimeoutError] * 2 and found == expected[2]


def test_lower_priorities_begin_first(served):
    """Calls that wait for others, and requests that wait in the engine. Control: all the same."""
    given, order = [2, 0, 1, 0, -1], []

    async def call(served, n, priority):
        await one(served, [n], SamplingParams(max_new_tokens=2), priority=priority)
        order.append(n)

    async def main(priorities):
        single = AsyncEngine(served.engine, max_requests=1)
        events, _ = await begun(single)
        calls = [asyncio.create_task(call(single, n, p)) for n, p in enumerate(priorities)]
        await asyncio.sleep(0)
        await events.aclose()
        await asyncio.gather(*calls)
        await single.close()
        with engine_of(tiny(), max_sequences=1) as engine:
            ids = [engine.add_request([n], LONG, priority=p) for n, p in enumerate(priorities)]
            while ids:
                engine.step()
                (running,) = engine.admission.running
                order.append(running.request.prompt[0])
                engine.abort(ids.pop(ids.index(running.request.request_id)))

    run(main(given))
    assert order == [4, 1, 3, 2, 0] * 2
    order.clear()
    run(main([7] * 5))
    assert order == [0, 1, 2, 3, 4] * 2


def test_abort_ends_one_request(served, expected):
    """Its stream with an event, ``generate`` with what there is, ``score`` with an error."""
    told = "engine.abort was called for it"

    async def begins(call):
        """A call that runs, and the id of its first request."""
        known = set(served.engine.tracker.requests)
        task = asyncio.create_task(call)
        while not (new := [i for i in list(served.engine.tracker.requests) if i not in known]):
            await asyncio.sleep(0)
        return task, new[0]

    async def main():
        events, streamed = await begun(served)
        prompts, params = zip(([7], LONG), REQUESTS[0], strict=True)
        both, generated = await begins(served.generate(prompts, params))
        scored, score = await begins(served.score([[1]], [[2] * 400]))
        for request_id in (streamed, generated, score):
            assert (await served.abort(request_id)).completions[0].error == told
        with pytest.raises(ValueError, match="request_id="):
            await served.abort(streamed)
        with pytest.raises(RuntimeError, match=f"no score: {told}"):
            await scored
        return (await collect(events))[-1], await both

    last, (first, second) = run(main())
    for ended in (last, first.completions[0]):
        assert (ended.finish_reason, ended.error) == ("abort", told)
    assert bits(second) == expected[0]


BAD = {"priority": ["high", True, 0.5, 2**63], "timeout": [0, "1", float("nan"), True]}


def test_what_is_not_given(served):
    for field, value in [(field, value) for field, values in BAD.items() for value in values]:
        for call in (one(served, [1], None, **{field: value}), begun(served, **{field: value})):
            with pytest.raises(ValueError, match=f"{field}={value!r}"):
                run(call)
    bad = [("max_waiting", -1), ("max_requests", 0), ("max_requests", 1.5), ("stream_interval", 0)]
    for field, value in bad:
        with pytest.raises(ValueError, match=f"{field}={value}"):
            AsyncEngine(served.engine, **{field: value})
