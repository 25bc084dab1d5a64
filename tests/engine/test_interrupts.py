"""Ctrl-C by signal at random points of every call: afterwards the engine serves every thread, has
nothing left of the call, and gives a request its bits; and SIGINT has its handler back.

Every second point is a call of a Python function in the main thread; the others are moments, at
which another thread sends the signal, also while the main one waits.
"""

import asyncio
import gc
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from queue import SimpleQueue
from typing import Any

import pytest

import tinyspec
from tests.support import signals
from tests.support.cases import bits_of, drain, engine_of, greedy, model_of, run, text, whole
from tests.support.drop_in import PAD, SMALL
from tests.support.patience import PATIENCE
from tests.support.stress import streamed
from tinyspec import AsyncEngine, SamplingParams
from tinyspec.determinism import results

SETTINGS = {"page_size": 8, "num_pages": 120, "max_rows": 32}
ONE_SIZE = {**SETTINGS, "max_rows": 16}  # a short proof
REQUESTS = [(text(4 + 9 * n, seed=n), greedy(3 + 2 * n, temperature=n, seed=n)) for n in range(2)]
PROMPTS, PARAMS = map(list, zip(*REQUESTS, strict=True))
SCORED = text(12, seed=5), text(5, seed=6)
CALL = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": PAD, "deterministic": True}

NOTHING = nullcontext()
ANOTHER = "another"  # a thread's name


class Subject:
    """What the calls are made on, and what they give when nobody interrupts them."""

    def __init__(self) -> None:
        self.model = model_of("shape-sensitive")
        self.engine = engine_of(self.model, **SETTINGS)
        self.bits = bits_of(run(self.engine, REQUESTS))
        self.scores = self.engine.score(*([part] for part in SCORED))
        tinyspec.patch(self.model, SMALL)
        self.rows = self.model.generate(PROMPTS, **CALL).tolist()

    # Each call, to its end; what it gives.

    def generate(self) -> Any:
        return bits_of(run(self.engine, REQUESTS))

    def stream(self) -> Any:
        return streamed(self.engine, REQUESTS)

    def step(self) -> Any:
        for request in REQUESTS:
            self.engine.add_request(*request)
        return sorted(map(repr, bits_of(drain(self.engine).values())))

    def score(self) -> Any:
        return self.engine.score(*([part] for part in SCORED))

    def waits(self, how: Any = NOTHING) -> Any:
        """Beside another thread's call, in whose passes its own requests run. how: interrupts it,
        but not Python's own code that begins and ends threads, which that breaks."""
        with ThreadPoolExecutor(1) as pool:
            beside = pool.submit(self.engine.generate, [[1, 2]], SamplingParams(max_new_tokens=30))
            with how:
                found = self.generate()
            beside.result(PATIENCE)
        return found

    def asynchronous(self, how: Any = NOTHING) -> Any:
        """how: interrupts it, but not asyncio where that begins and ends, which breaks it."""

        async def main() -> Any:
            with how:
                async with AsyncEngine(self.engine) as served:
                    calls = (served.generate([prompt], params) for prompt, params in REQUESTS)
                    found = await asyncio.gather(*calls)
            return bits_of([output for outputs in found for output in outputs])

        return asyncio.run(asyncio.wait_for(main(), PATIENCE))

    def drop_in(self) -> Any:
        return self.model.generate(PROMPTS, **CALL).tolist()

    def expected(self, name: str) -> Any:
        if name == "step":
            return sorted(map(repr, self.bits))
        return {"score": self.scores, "drop_in": self.rows}.get(name, self.bits)

    def check(self, name: str) -> None:
        """After a call that was interrupted, in this thread and in another one."""
        assert signals.handler() is signals.RAISE
        if name == "step":  # what was added stays, and has its bits
            left = list(map(repr, bits_of(drain(self.engine).values())))
            assert set(left) <= set(map(repr, self.bits)) and len(left) <= len(REQUESTS)
        if name == "asynchronous":  # whose thread may still be about to end
            gc.collect()
            last = time.monotonic() + PATIENCE
            while self.engine.has_unfinished() and time.monotonic() < last:
                time.sleep(0.001)
        assert not self.engine.has_unfinished()
        with_another(self.generate, self.bits)
        assert self.engine.generate(PROMPTS[:1], PARAMS[0])[0].completions[0].token_ids
        assert whole(self.engine) and not self.engine.has_unfinished()
        if name == "drop_in":
            with_another(self.drop_in, self.rows)
        assert self.generate() == self.bits
        assert signals.handler() is signals.RAISE


def with_another(work: Callable[[], Any], expected: Any, patience: float = PATIENCE) -> None:
    """``work`` gives this in another thread, which does not wait for ever."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()), name=ANOTHER, daemon=True)
    thread.start()
    thread.join(patience)
    assert found == [expected]


@cache
def subject() -> Subject:
    return Subject()


def size_of(work: Callable[[], Any]) -> tuple[int, float]:
    """Calls of Python functions in the main thread, and seconds, of a whole call."""
    calls, begun = 0, time.monotonic()

    def count(frame: Any, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls, (time.monotonic() - begun) / 2  # counting takes as long again


@contextmanager
def interrupt_after(seconds: float):
    """Ctrl-C from another thread, as a terminal sends it, unless the block has ended before."""
    main, begun, over = threading.main_thread().ident, SimpleQueue(), []

    def kill() -> None:
        begun.get()
        time.sleep(seconds)
        if not over:
            signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=kill)
    thread.start()  # it is no place for a signal, nor is ``join``
    begun.put(None)
    try:
        yield
    finally:
        over.append(True)
        handler = signal.signal(signal.SIGINT, lambda *_: None)
        thread.join()
        signal.signal(signal.SIGINT, handler)


def interrupted(work: Callable[[], Any], how: Any) -> tuple[bool, Any]:
    """Whether ``work`` was, and what it gave otherwise."""
    try:
        with how:
            return False, work()
    except KeyboardInterrupt:
        return True, None


def points(rng: random.Random, calls: int, seconds: float, count: int) -> list[Any]:
    """At calls, and at moments, in turns."""
    return [
        interrupt_after(rng.random() * seconds)
        if n % 2
        else signals.interrupt_at_call(rng.randrange(1, calls))
        for n in range(count)
    ]


NAMES = ("generate", "stream", "step", "score", "waits", "asynchronous", "drop_in")
# Points of each call; those of a sample of the slow tests, too.
FEW, MANY = 5, 40
COUNTS = [FEW, pytest.param(MANY, marks=pytest.mark.slow("random use", 40))]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", NAMES)
def test_ctrl_c(name, count, request, sigint):
    rng = random.Random(f"{request.config.getoption('--seed')} {name}")
    work, times = getattr(subject(), name), 0
    expected = subject().expected(name)
    for how in points(rng, *size_of(work), count):
        within = name in ("asynchronous", "waits")
        call = partial(work, how) if within else work
        came, found = interrupted(call, NOTHING if within else how)
        assert came or found == expected
        subject().check(name)
        times += came
    assert times >= count // 3, "the signal came too late"


@pytest.mark.parametrize("count", [3, pytest.param(MANY // 2, marks=COUNTS[1].marks)])
def test_ctrl_c_within_a_proof(count, request, monkeypatch, sigint):
    """Of ``warm_up`` or of a first request: what was found is whole, or is found again."""
    rng = random.Random(f"{request.config.getoption('--seed')} proof")
    times = 0

    def forget() -> None:
        kept: dict[str, Any] = {}
        monkeypatch.setattr(results, "load", kept.get)
        monkeypatch.setattr(results, "store", kept.__setitem__)

    def first() -> Any:
        with engine_of(subject().model, **ONE_SIZE) as engine:
            return bits_of(run(engine, REQUESTS))

    forget()
    for n, how in enumerate(points(rng, *size_of(first), count)):
        forget()
        with engine_of(subject().model, **ONE_SIZE) as engine:
            begins = engine.warm_up if n % 3 else lambda e=engine: run(e, REQUESTS)
            came, _ = interrupted(begins, how)
            times += came
            assert signals.handler() is signals.RAISE and not engine.has_unfinished()
            with_another(lambda e=engine: bits_of(run(e, REQUESTS)), subject().bits)
            assert bits_of(run(engine, REQUESTS)) == subject().bits
    assert first() == subject().bits, "what was found stays"
    assert times >= count // 3, "the signal came too late"


def test_control_of_the_check(sigint):
    """It sees a turn that is held, a request that is left, and a handler that is not back."""
    begun, go_on = threading.Event(), threading.Event()

    def waits(ids: Any, scores: Any) -> Any:
        begun.set()
        go_on.wait(PATIENCE)
        return scores

    params = SamplingParams(max_new_tokens=1, logits_processors=[waits])
    engine = subject().engine
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(engine.generate, [[1, 2]], params)
        try:
            assert begun.wait(PATIENCE)
            with pytest.raises(AssertionError):
                with_another(subject().generate, subject().bits, patience=0.2)
        finally:
            go_on.set()
        held.result(PATIENCE)
    for late in [thread for thread in threading.enumerate() if thread.name == ANOTHER]:
        late.join(PATIENCE)
    left = engine.add_request(*REQUESTS[0])
    with pytest.raises(AssertionError):
        subject().check("generate")
    engine.abort(left)
    with signals.handled_by(lambda *_: None), pytest.raises(AssertionError):
        subject().check("generate")
    subject().check("generate")
