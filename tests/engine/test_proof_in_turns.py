"""A proof lets others use the engine between its passes: streams go on, and what they or others do
to the model, the engine or the process meanwhile leaves nothing wrong behind."""

import asyncio
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from threading import Event, Thread, get_ident

import pytest
import torch

from tests.support.cases import engine_of, greedy, text
from tests.support.mixes import bits
from tests.support.patience import PATIENCE
from tests.support.tiny import tiny
from tinyspec import AsyncEngine, SamplingParams
from tinyspec.determinism import contract, proof

pytestmark = pytest.mark.usefixtures("home")
PROMPT, ASKED = text(20, seed=3), greedy(6)
LONG = SamplingParams(max_new_tokens=450, seed=0)


def expected(model=None):
    with engine_of(model or tiny()) as engine:
        (output,) = engine.generate([PROMPT], ASKED)
    return bits(output), output.fingerprint


def told(output):
    return bits(output), output.fingerprint


@pytest.fixture
def committed(monkeypatch):
    """Tokens that were committed while each proof ran: of the reference bucket, of others."""
    found = {"prove_reference": [], "prove_buckets": []}

    def counting(name, own):
        def around(runner, *given):
            before = [engine.stats().committed for engine in engines]
            try:
                return own(runner, *given)
            finally:
                now = [engine.stats().committed for engine in engines]
                found[name] += [b - a for a, b in zip(before, now, strict=True)]

        return around

    engines = []
    for name in found:
        monkeypatch.setattr(contract, name, counting(name, getattr(contract, name)))
    found["of"] = engines.append
    return found


def in_a_pause(engine, work, skip=0):
    """Let another thread do ``work``, which asks for turns, between two passes of a proof."""
    driver, left, pool = engine.driver, [work], ThreadPoolExecutor(1)
    own = engine.tracker.pause
    skipped = iter(range(skip))

    def pause(aside):
        if not left or next(skipped, None) is not None:
            return own(aside)
        done = pool.submit(left.pop())
        while not (driver._line or done.done()):
            time.sleep(0)
        with aside:
            while not done.done():
                own(nullcontext())
        done.result()

    engine.contract.proving.others = pause
    return left


# Streams go on


async def beside_a_stream(engine):
    """The output of a deterministic request that is awaited beside a plain stream."""
    served = AsyncEngine(engine)
    events = served.stream([PROMPT], LONG)
    await anext(events)
    asked = asyncio.create_task(served.generate([PROMPT], ASKED))
    async for _ in events:
        pass
    (output,) = await asked
    await served.close()
    return output


def threads_beside_a_stream(engine):
    """The same in threads."""
    begun, stop = Event(), Event()

    def read():
        for _ in engine.stream([PROMPT], LONG):
            begun.set()
            if stop.is_set():
                break

    reader = Thread(target=read)
    reader.start()
    begun.wait(PATIENCE)
    (output,) = engine.generate([PROMPT], ASKED)
    stop.set()
    reader.join(PATIENCE)
    return output


WAYS = {
    "tasks": lambda engine: asyncio.run(asyncio.wait_for(beside_a_stream(engine), PATIENCE)),
    "threads": threads_beside_a_stream,
}


@pytest.mark.parametrize("control", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_streams_go_on_while_a_first_request_is_proven(way, control, committed, monkeypatch):
    if control:
        monkeypatch.setattr(proof.Prober, "pause", lambda prober: None)
    with engine_of(tiny()) as engine:
        committed["of"](engine)
        found = told(WAYS[way](engine))
    assert len(committed["prove_reference"]) == 1
    (there,) = committed["prove_reference"]
    assert there == 0 if control else there > 5
    assert found == expected()


@pytest.mark.parametrize("way", WAYS)
def test_streams_go_on_while_a_further_bucket_is_proven(way, committed, proven_on_demand):
    """By the thread that runs passes for all, the worker of tasks too."""
    with engine_of(tiny()) as engine:
        engine.generate([PROMPT], greedy(1))
        committed["of"](engine)
        found = told(WAYS[way](engine))
    assert any(committed["prove_buckets"])
    assert found == expected()


def test_a_proof_alone_waits_for_nobody(committed, monkeypatch):
    """No turn is given up, and scratch weights stay where they are."""
    monkeypatch.setattr(proof.ScratchModel, "shared", counted := Counted(proof.ScratchModel.shared))
    with engine_of(tiny()) as engine:
        committed["of"](engine)
        assert told(engine.generate([PROMPT], ASKED)[0]) == expected()
    assert counted.calls <= 6


class Counted:
    """A method that counts its calls."""

    def __init__(self, method):
        self.method, self.calls = method, 0

    def __get__(self, own, kind):
        def call(*given):
            self.calls += 1
            return self.method(own, *given)

        return call


# What others do meanwhile


def scaled(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.25)


def replaced(model):
    model.model.norm = torch.nn.Identity()


@pytest.mark.parametrize("skip", [0, 7])
@pytest.mark.parametrize("change", [scaled, replaced])
def test_a_model_that_others_change_and_look_at(change, skip):
    """The proof begins again; what is told is of the model as it is then."""
    changed = tiny()
    change(changed)
    model = tiny()
    with engine_of(model) as engine:

        def work():
            change(model)
            engine.generate([PROMPT], SamplingParams(max_new_tokens=2))

        left = in_a_pause(engine, work, skip)
        (output,) = engine.generate([PROMPT], ASKED)
        assert not left
    assert told(output) == expected(changed) != expected()


def test_requests_of_others_run_in_a_pause(monkeypatch):
    """A plain one, and a deterministic one, which waits for the proof that is under way."""
    found, reference = [], []
    whole = contract.prove_reference
    monkeypatch.setattr(
        contract, "prove_reference", lambda *given: reference.append(1) or whole(*given)
    )
    with engine_of(tiny()) as engine:

        def work():
            found.append(engine.generate([PROMPT], [greedy(6, deterministic=False)])[0])
            thread = Thread(target=lambda: found.append(engine.generate([PROMPT], ASKED)[0]))
            thread.start()
            threads.append(thread)

        threads = []
        left = in_a_pause(engine, work)
        found.append(engine.generate([PROMPT], ASKED)[0])
        threads[0].join(PATIENCE)
        assert not left and len(reference) == 1
    deterministic = [told(each) for each in found if each.params.deterministic]
    assert deterministic == [expected()] * 2 and len(found) == 3


def test_an_engine_that_others_close():
    with engine_of(tiny()) as engine:
        left = in_a_pause(engine, engine.close)
        with pytest.raises(ValueError, match="closed"):
            engine.generate([PROMPT], ASKED)
        assert not left


def test_what_needs_an_idle_engine_waits(committed):
    """For the proof, and for the request, whose pages a call that ends would give back."""
    told_to, threads = [], []
    with engine_of(tiny(), num_pages=None) as engine:

        def refused(name):
            with pytest.raises(ValueError, match="unfinished"):
                getattr(engine, name)()
            told_to.append(name)

        def work():
            for name in ("release", "forget_plain"):
                threads.append(Thread(target=refused, args=(name,)))
            threads.append(Thread(target=lambda: told_to.append(engine.end_call(True))))
            for thread in threads:
                thread.start()
            while len(engine.driver._line) < 3:
                time.sleep(0)

        left = in_a_pause(engine, work)
        pages = engine.pool.num_pages
        stream = engine.stream([PROMPT], greedy(450))
        assert next(stream).token_ids and not left
        for thread in threads:
            thread.join(PATIENCE)
        assert {*told_to} == {"release", "forget_plain", None}
        assert engine.pool.num_pages == pages
        stream.close()


def test_two_warm_ups(proven_on_demand):
    with engine_of(tiny()) as engine, ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(engine.warm_up) for _ in range(2)]:
            done.result(PATIENCE)
        assert engine.contract.results.sizes == list(engine.contract.buckets.sizes)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_reader_with_another_number_of_threads(deterministic, two_threads):
    """Its passes run on the number that is being proven; a deterministic request of its own is
    refused meanwhile, and asked again afterwards has the bits of its number."""
    begun, errors = Event(), []
    torch.set_num_threads(1)
    with engine_of(tiny()) as engine:

        def read():
            torch.set_num_threads(2)
            for _ in engine.stream([PROMPT], LONG):
                begun.set()
            assert torch.get_num_threads() == 2

        def work():
            torch.set_num_threads(2)
            try:
                engine.generate([PROMPT], ASKED)
            except ValueError as error:
                errors.append(str(error))

        if deterministic:
            left = in_a_pause(engine, work)
            (output,) = engine.generate([PROMPT], ASKED)
            assert not left and "threads" in errors[0]
        else:
            reader = Thread(target=read)
            reader.start()
            begun.wait(PATIENCE)
            (output,) = engine.generate([PROMPT], ASKED)
            reader.join(PATIENCE)
    assert told(output) == expected()


# Signals


class Alarm(Exception):
    pass


def test_what_a_handler_raises_in_a_pause_leaves_the_turn_where_it_is():
    """The other's pass goes on alone; then it is raised, and the engine serves on."""
    inside, seen = Event(), []

    def alarm(*_):
        raise Alarm

    before = signal.signal(signal.SIGALRM, alarm)
    try:
        with engine_of(tiny()) as engine:

            class Slow:
                def __call__(self, ids, scores):
                    if not seen:
                        inside.set()
                        signal.pthread_kill(main, signal.SIGALRM)
                        time.sleep(0.2)
                        seen.append((engine.driver._owner, get_ident()))
                    return scores

            main = get_ident()
            params = SamplingParams(max_new_tokens=3, logits_processors=[Slow()])
            in_a_pause(engine, lambda: engine.generate([PROMPT], params))
            with pytest.raises(Alarm):
                engine.generate([PROMPT], ASKED)
            assert inside.is_set() and seen[0][0] == seen[0][1]
            assert told(engine.generate([PROMPT], ASKED)[0]) == expected()
    finally:
        signal.signal(signal.SIGALRM, before)


def test_an_interrupt_while_another_thread_proves(monkeypatch):
    """Takes effect at once: the call that waits has nothing half done."""
    prepare, proving, ended = proof.Prober.prepare, Event(), []

    def slow(prober):
        proving.set()
        until = time.monotonic() + PATIENCE
        while not ended and time.monotonic() < until:
            time.sleep(0.01)
            prober.pause()
        return prepare(prober)

    monkeypatch.setattr(proof.Prober, "prepare", slow)
    with engine_of(tiny()) as engine, ThreadPoolExecutor(1) as pool:
        other = pool.submit(engine.generate, [PROMPT], ASKED)
        proving.wait(PATIENCE)
        pool_of_one = Thread(
            target=lambda: (time.sleep(0.3), signal.pthread_kill(main, signal.SIGINT))
        )
        main = get_ident()
        pool_of_one.start()
        with pytest.raises(KeyboardInterrupt):
            engine.generate([PROMPT], ASKED)
        assert not other.done()
        ended.append(1)
        assert told(other.result(PATIENCE)[0]) == expected()


def test_a_task_that_ends_during_a_proof(monkeypatch):
    """Its stream is aborted there, not behind the proof."""
    prepare, left = proof.Prober.prepare, []

    async def main(engine):
        served = AsyncEngine(engine)
        events = served.stream([PROMPT], LONG)
        await anext(events)
        asked = asyncio.create_task(served.generate([PROMPT], ASKED))
        while not left:
            await asyncio.sleep(0.001)
        await events.aclose()
        (output,) = await asked
        await served.close()
        return output

    with engine_of(tiny()) as engine:

        def slow(prober):
            left.append(len(engine.tracker.requests))
            until = time.monotonic() + PATIENCE
            while engine.tracker.requests and time.monotonic() < until:
                time.sleep(0.005)
                prober.pause()
            left.append(len(engine.tracker.requests))
            return prepare(prober)

        monkeypatch.setattr(proof.Prober, "prepare", slow)
        output = asyncio.run(asyncio.wait_for(main(engine), PATIENCE))
    assert left[:2] == [1, 0]
    assert told(output) == expected()
