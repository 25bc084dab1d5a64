"""One engine, many threads: requests of all share passes, and nobody's trouble is another's."""

import asyncio
import copy
import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from threading import Barrier, Event, Thread

import pytest
import torch

from tests.support import signals
from tests.support.cases import bits_of, engine_of, greedy, model_of, one_by_one, run, text, whole
from tests.support.drop_in import PAD, patched
from tests.support.patience import PATIENCE
from tests.support.stress import streamed
from tests.support.tiny import tiny
from tinyspec import AsyncEngine, EngineConfig, SamplingParams, canonical
from tinyspec.engine.driver import Driver

THREADS = 4
SETTINGS = {"page_size": 8, "num_pages": 120}
# Two prompts a thread: one deterministic, one sampled and deterministic.
REQUESTS = [
    [
        (text(3 + 5 * n, seed=n), greedy(6)),
        (text(20 - n, seed=n), greedy(8, temperature=1.0, seed=n)),
    ]
    for n in range(THREADS)
]
LONG = SamplingParams(max_new_tokens=450)
ALL = [request for own in REQUESTS for request in own]


@pytest.fixture(scope="module")
def expected():
    """Bits of each request alone, by thread."""
    with engine_of(model_of("shape-sensitive"), **SETTINGS) as engine:
        alone = one_by_one(engine, ALL)
    return [alone[2 * n : 2 * n + 2] for n in range(THREADS)]


@pytest.fixture
def engine():
    with engine_of(model_of("shape-sensitive"), **SETTINGS) as engine:
        yield engine
        assert not engine.has_unfinished() and whole(engine)


def together(work, count=THREADS) -> list:
    """What ``work(n)`` returns in as many threads, begun at once."""
    barrier = Barrier(count)

    def begin(n):
        barrier.wait(PATIENCE)
        return work(n)

    with ThreadPoolExecutor(count) as pool:
        return [future.result(PATIENCE) for future in [pool.submit(begin, n) for n in range(count)]]


def test_requests_of_all_share_passes(engine, expected):
    def work(n):
        return streamed(engine, REQUESTS[n]) if n % 2 else bits_of(run(engine, REQUESTS[n]))

    assert together(work) == expected
    assert max(record.running for record in engine.records) > 2, "more than one thread's"


def test_control_plain_requests_depend_on_each_other(engine):
    """The comparison can fail: without the flag, in a crowd."""
    plain = [[(p, replace(s, deterministic=False)) for p, s in own] for own in REQUESTS]
    alone = [one_by_one(engine, own) for own in plain]
    found = together(lambda n: bits_of(run(engine, plain[n])))
    assert found != alone


def test_nobody_is_aborted_but_who_is_asked_for(engine, expected):
    """By ``abort``, by a stream that is closed, and by one that is dropped."""

    def work(n):
        if n == 1:
            return engine.abort(engine.add_request(*REQUESTS[n][0])).completions[0].finish_reason
        if n in (2, 3):
            stream = engine.stream([p for p, _ in REQUESTS[n]], REQUESTS[n][0][1])
            next(stream)
            return stream.close() if n == 3 else None
        return bits_of(run(engine, REQUESTS[n]))

    found = together(work)
    assert found == [expected[0], "abort", None, None]


@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_what_one_threads_code_raises_is_its_own(engine, expected, error):
    """Whichever thread runs it."""

    def broken(ids, scores):
        raise error("broken")

    def work(n):
        if n != 2:
            return bits_of(run(engine, REQUESTS[n]))
        bad = replace(REQUESTS[n][0][1], stopping_criteria=[broken])
        try:
            return engine.generate([REQUESTS[n][0][0]], bad)[0].completions[0].error
        except SystemExit as raised:
            return f"raised {raised}"

    found = together(work)
    assert "broken" in found.pop(2)
    assert found == [*expected[:2], *expected[3:]]


@pytest.mark.parametrize("leads", [True, False], ids=["runs the steps", "waits"])
def test_ctrl_c_ends_the_main_threads_requests_alone(engine, expected, leads, sigint):
    begun, ended = Event(), Event()

    def interrupt(ids, scores):
        """A criterion that stands for the user, called in whichever thread steps."""
        begun.set()
        if not leads:
            ended.wait(0.001)  # others step meanwhile
        if ids.shape[1] == 8:
            signals.interrupt()
        return False

    def others(n):
        if leads:
            begun.wait(PATIENCE)
        return bits_of(run(engine, REQUESTS[n]))

    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(others, n) for n in range(2)]
        with pytest.raises(KeyboardInterrupt):
            engine.generate(
                [[1, 2, 3]], SamplingParams(max_new_tokens=100, stopping_criteria=[interrupt])
            )
        ended.set()
        assert [future.result(PATIENCE) for future in futures] == expected[:2]


def test_a_thread_with_another_number_of_torchs_threads(engine, expected):
    """A submit of it is refused, instead of ending requests of others, whose bits depend on that
    number; passes that it runs have theirs, and it has its own afterwards."""
    refused, found = [], {}

    def other():
        torch.set_num_threads(2)
        with pytest.raises(ValueError, match="torch computes with 2 threads") as refusal:
            engine.generate([[1, 2]])
        refused.append(refusal)
        while engine.has_unfinished():
            found.update({output.request_id: output for output in engine.step()})
        assert torch.get_num_threads() == 2

    ids = [engine.add_request(*request) for request in REQUESTS[0]]
    engine.step()
    thread = Thread(target=other)
    thread.start()
    thread.join(PATIENCE)
    torch.set_num_threads(1)  # of threads to come, too
    assert refused and bits_of([found[number] for number in ids]) == expected[0]
    assert bits_of(run(engine, REQUESTS[0])) == expected[0]


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_spawned_process_is_told(engine, copied):
    """Where its arguments are pickled."""
    for given in (engine, AsyncEngine(engine)):
        with pytest.raises(TypeError, match="Engine cannot be copied or pickled"):
            copied(given)


def test_closing_ends_the_calls_of_others():
    """And all later calls say so."""
    engine, begun = engine_of(tiny(), **SETTINGS), Event()

    def slow(ids, scores):
        begun.set()
        return False

    with ThreadPoolExecutor(1) as pool:
        params = SamplingParams(max_new_tokens=400, stopping_criteria=[slow])
        future = pool.submit(engine.generate, [[1, 2, 3]], params)
        begun.wait(PATIENCE)
        engine.close()
        (completion,) = future.result(PATIENCE)[0].completions
    assert completion.finish_reason == "abort" and "closed" in completion.error
    for call in (*(CALLS[name] for name in CALLS if name != "close"), lambda e: e.reserve(1)):
        with pytest.raises(ValueError, match="engine='closed'"):
            call(engine)


def test_a_stream_that_is_dropped_in_a_step(engine):
    """By a thread that waits for nobody, as finalizers are; its requests end with that step."""
    stream = engine.stream([[1, 2]], LONG)
    next(stream)
    with engine.driver.turn("test"):
        thread = Thread(target=stream.__del__)
        thread.start()
        thread.join(PATIENCE)
        assert not thread.is_alive() and not engine.has_unfinished()
    assert engine.generate([[1, 2]], greedy(2))[0].completions[0].token_ids
    assert not engine.tracker.requests


CALLS = {
    "generate": lambda engine: engine.generate([[1, 2]]),
    "score": lambda engine: engine.score([[1, 2]], [[3]]),
    "stream": lambda engine: engine.stream([[1, 2]]),
    "add_request": lambda engine: engine.add_request([1, 2]),
    "step": lambda engine: engine.step(),
    "fingerprint": lambda engine: engine.fingerprint,
    "release": lambda engine: engine.release(),
    "close": lambda engine: engine.close(),
}


@pytest.mark.parametrize("where", ["criterion", "processor", "hook"])
def test_a_step_may_not_be_entered_from_within(engine, expected, where):
    """Each call but two is refused by its name, and the request of the code goes on or ends."""
    refused = {}

    def calls(*given, **_):
        if not refused:
            for name, call in CALLS.items():
                with pytest.raises(
                    RuntimeError, match=f"^{name} was called from within a step"
                ) as e:
                    call(engine)
                refused[name] = e
            engine.weights_changed()
        return {"criterion": False, "hook": None}.get(where, given[-1])

    asked, handle = {}, None
    if where == "hook":
        handle = engine.model.lm_head.register_forward_hook(calls)
    else:
        asked = {"stopping_criteria" if where == "criterion" else "logits_processors": [calls]}
    (output,) = engine.generate([[1, 2]], SamplingParams(max_new_tokens=4, **asked))
    if handle is not None:
        handle.remove()
    assert refused.keys() == CALLS.keys() and len(output.completions[0].token_ids) == 4
    assert bits_of(run(engine, REQUESTS[0])) == expected[0]


def test_a_fork_is_told_whatever_runs():
    """While another thread's call is in the middle of a pass, and a stream is unfinished; each call
    by its name for it, and the parent goes on."""
    begun, go_on = Event(), Event()

    def waits(ids, scores):
        begun.set()
        go_on.wait(PATIENCE)
        return scores

    model = tiny()
    with patched(tiny()) as other, engine_of(model, **SETTINGS, max_rows=32) as engine:
        (prompt, params), (second, _) = ALL[:2]
        (output,) = engine.generate([prompt], params)
        ids = torch.tensor([prompt])
        call = {"max_new_tokens": 2, "pad_token_id": PAD}
        expected = other.generate(ids, **call)
        block = canonical(other, EngineConfig(reference_rows=16, max_rows=16))
        stream, served = engine.stream([second], LONG), AsyncEngine(engine)
        next(stream)
        name = engine.add_request(second, LONG)
        calls = [
            lambda: engine.generate([prompt]),
            lambda: engine.score([prompt], [second]),
            lambda: engine.replay([output]),
            lambda: engine.stream([prompt]),
            lambda: next(stream),
            stream.close,
            lambda: engine.add_request(prompt),
            engine.step,
            lambda: engine.abort(name),
            engine.weights_changed,
            engine.warm_up,
            engine.release,
            lambda: engine.reserve(1),
            lambda: engine.fingerprint,
            engine.close,
            lambda: asyncio.run(served.score([prompt], [second])),
            lambda: asyncio.run(served.abort(name)),
            lambda: other.generate(ids, **call),
        ]
        slow = SamplingParams(max_new_tokens=2, logits_processors=[waits])
        with block, ThreadPoolExecutor(1) as pool:
            calls.append(lambda: other(ids))
            beside = pool.submit(engine.generate, [prompt], slow)
            try:
                assert begun.wait(PATIENCE)
                found = [signals.told_in_a_fork(call) for call in calls]
            finally:
                go_on.set()
            assert len(beside.result(PATIENCE)[0].completions[0].token_ids) == 2
        assert found == [1] * len(calls)
        assert next(stream).token_ids
        stream.close()
        engine.abort(name)
        assert bits_of(run(engine, ALL[:1])) == bits_of([output])
        assert torch.equal(other.generate(ids, **call), expected)


# The driver


@pytest.mark.parametrize("waits", [False, True])
def test_ctrl_c_at_any_call_leaves_no_turn_held(waits, sigint):
    """Another thread always gets it afterwards."""
    driver = Driver()
    for number in range(1, 26):
        with ThreadPoolExecutor(1) as pool:
            entered, leave = Event(), Event()

            def hold(entered=entered, leave=leave):
                with driver.turn("test"):
                    entered.set()
                    leave.wait(0.02)

            held = pool.submit(hold) if waits else None
            if waits:
                entered.wait(PATIENCE)
            with suppress(KeyboardInterrupt), signals.interrupt_at_call(number), driver.turn("x"):
                pass
            leave.set()
            if held is not None:
                held.result(PATIENCE)
            pool.submit(hold).result(PATIENCE)
        assert not driver.in_turn and not driver._line


class Line:
    """Threads that ask ``driver`` for the turn one after the other; order: in which they had it."""

    def __init__(self):
        self.driver, self.order, self.threads = Driver(), [], []

    def wait(self, name, *how):
        def work():
            with self.driver.turn(name, *how):
                self.order.append(name)

        self.threads.append(Thread(target=work, daemon=True))
        self.threads[-1].start()
        while len(self.driver._line) < len(self.threads):
            time.sleep(0.001)

    def post(self):
        self.driver.post(lambda: self.order.append("posted"))

    def join(self):
        for thread in self.threads:
            thread.join(PATIENCE)
        return self.order


def test_turns_come_in_the_order_in_which_they_were_asked_for():
    """Behind what was posted; who wants passes alone is passed over, once."""
    line = Line()
    with line.driver.turn("test"):
        line.wait("passes", lambda: False)
        line.wait("first")
        line.wait("second")
        line.post()
    assert line.join() == ["posted", "first", "passes", "second"]


@pytest.mark.parametrize("news", ["a post", "a turn"])
def test_a_sleeper_wakes_for_news_alone(news):
    line = Line()
    line.wait("sleeper", lambda: False, line.driver.news)
    with line.driver.turn("passes that ran nothing", lambda: True):
        pass
    time.sleep(0.01)
    assert not line.order
    if news == "a post":
        line.post()
    else:
        with line.driver.turn("another call"):
            line.order.append("posted")
    assert line.join() == ["posted", "sleeper"]


@pytest.mark.parametrize("raises", [True, False])
def test_ctrl_c_wakes_who_waits(raises, sigint):
    """Where its handler raises, the turn goes to the next; where not, it waits on."""
    line, seen = Line(), []
    with signals.handled_by(signals.RAISE if raises else lambda *_: seen.append(1)):
        entered, leave = Event(), Event()

        def hold():
            with line.driver.turn("test"):
                entered.set()
                while not line.driver._line:
                    time.sleep(0.001)
                signals.interrupt_main_thread()
                leave.wait(PATIENCE if raises else 0.05)

        thread = Thread(target=hold, daemon=True)
        thread.start()
        entered.wait(PATIENCE)
        try:
            with line.driver.turn("main"):
                assert not raises
        except KeyboardInterrupt:
            assert raises
        leave.set()
        thread.join(PATIENCE)
    with line.driver.turn("free again"):
        assert seen == [1] * (not raises)
