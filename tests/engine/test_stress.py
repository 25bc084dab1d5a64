"""Eight threads at once, switched as often as the interpreter can: no output is another than its
request's alone, none hangs, none is lost. And what a single other thread may do beside a request.

Control: where no call waits for another thread's, the same rounds go wrong.
"""

import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from functools import cache

import pytest
import torch

from tests.engine.test_soak import seconds
from tests.support.cases import engine_of
from tests.support.mixes import bits
from tests.support.patience import PATIENCE
from tests.support.settings import CALLS, CHANGES, defaults
from tests.support.soak import IDS, Judge
from tests.support.stress import REQUESTS, SETTINGS, Stress, Weights, many_switches, output_of
from tinyspec import Engine
from tinyspec.determinism import results

SECONDS = 20  # of the form that is a part of a sample
SHORT = 3.0
NUMBER = 3  # of the longest request
ONE_BY_ONE = {**SETTINGS, "verify": "padded"}  # a token a pass


KNOWN: dict[str, object] = {}  # what is proven before


@cache
def truth() -> Weights:
    return Weights()


@pytest.fixture
def weights(monkeypatch):
    """What is proven while a test changes settings is kept for that test alone."""
    for before, name in ((KNOWN.get, "load"), (KNOWN.__setitem__, "store")):
        monkeypatch.setattr(results, name, before)
    found, kept = truth(), {**KNOWN}
    for own, name in ((kept.get, "load"), (kept.__setitem__, "store")):
        monkeypatch.setattr(results, name, own)
    with many_switches():
        yield found


def run(weights: Weights, seed: str, length: float, rounds: float, least: dict[str, int]) -> Judge:
    """For ``length`` seconds, and until there was the ``least`` of each kind, which a busy machine
    takes longer for."""
    judge = Judge(weights)
    stress, end = Stress(judge, weights, seed), time.monotonic() + length

    def unfinished() -> bool:
        lacks = any(judge.counts[kind] < number for kind, number in least.items())
        return time.monotonic() < (end + PATIENCE if lacks else end)

    try:
        while not judge.wrong and unfinished():
            stress.round(rounds)
    finally:
        print("\n", dict(sorted(judge.counts.items())))
    stress.close()
    return judge


KINDS = ("outputs", "plain outputs", "aborts", "scores", "canonical forwards", "rows", "reports")
KINDS += (
    "fingerprints",
    "streams that were left",
    "engines",
    "functional calls",
    "changes of weights",
    *CHANGES,
)


def test_eight_threads(weights):
    judge = run(weights, "0", SHORT, SHORT / 2, {"outputs": 6})
    assert not judge.wrong, judge.wrong[:3]
    assert judge.counts["outputs"] > 5, judge.counts


@pytest.mark.slow("soak", SECONDS + 10)
def test_eight_threads_for_minutes(weights, request):
    length = seconds(request.config)
    judge = run(weights, request.config.getoption("--seed"), length, 5.0, dict.fromkeys(KINDS, 1))
    assert not judge.wrong, judge.wrong[:3]
    assert all(judge.counts[kind] for kind in KINDS), judge.counts


# The control


def without_turns(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> None:
    """From here on no call of ``engine`` waits for another thread's: each runs passes at once."""
    monkeypatch.setattr(engine.driver, "_take", lambda ready, asleep_at: None)
    monkeypatch.setattr(engine.driver, "_give", lambda news: None)


def test_control_without_turns(weights, monkeypatch):
    """Threads that change nothing go wrong; with turns they do not."""
    works = (Stress.generates, Stress.generates, Stress.streams, Stress.steps)
    judge = Judge(weights)
    stress = Stress(judge, weights, "control")
    end = time.monotonic() + PATIENCE
    while judge.counts["outputs"] < 3 and time.monotonic() < end:
        stress.round(0.5, works)
    assert not judge.wrong and judge.counts["outputs"] > 2
    without_turns(monkeypatch, stress.engine)
    for _ in range(20):
        stress.round(0.5, works, patience=1.0, dump=False)
        if judge.wrong:
            break
    assert judge.wrong, "the check cannot fail"


# One other thread, at a known moment


def in_thread(work: Callable[..., object], *args: object) -> None:
    """In another one, to its end."""
    thread = threading.Thread(target=work, args=args)
    thread.start()
    thread.join(PATIENCE)


@contextmanager
def at_places(works: dict[int, Callable[[], object]]):
    """At these places of the next pass, as ``CALLS`` has them."""
    left, calls = dict(works), []

    def call():
        calls.append(len(calls))
        left.pop(calls[-1], lambda: None)()

    CALLS.append(call)
    try:
        yield
    finally:
        CALLS.remove(call)
    assert not left, "it was done"


WHEN = ("a pass", "a pass, before one of another engine", "between passes")


@pytest.mark.crossed(1)
@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("name", CHANGES)
def test_a_setting_by_another_thread(weights, name, when):
    """Set while a request runs, and left: it has its bits, under one fingerprint. Another engine
    that sets what passes have hides nothing from this one."""
    prompt, params = REQUESTS[NUMBER]
    fingerprint = weights.fingerprints[0, 0]
    expected = weights.bits[fingerprint][NUMBER]
    get, (value, _), put = CHANGES[name]
    seen = []

    def change():
        in_thread(put, value)
        seen.append(get())

    def hide():
        """At the end of the same pass."""
        in_thread(second.step)
        seen.append(get())

    with (
        engine_of(weights.make(), **ONE_BY_ONE) as engine,
        engine_of(weights.make(sensitive=False), **ONE_BY_ONE) as second,
    ):
        second.add_request(prompt, params)
        second.step()
        events = engine.stream([prompt], params)
        found = [next(events), next(events)]
        if when == "between passes":
            change()
        else:
            works = {0: change} if when == "a pass" else {0: change, 3: hide}
            with at_places(works):
                found.append(next(events))
        found += events
    output = output_of(prompt, params, found)
    assert (bits(output), output.fingerprint) == (expected, fingerprint)
    assert seen[0] == value


def test_control_settings_matter(weights):
    """Each of them, to the model by itself."""
    model = weights.make()
    with torch.no_grad():
        own = model(IDS).logits
        for _, values, put in CHANGES.values():
            for value in values:
                put(value)
                assert not torch.equal(model(IDS).logits, own)
                defaults()
    assert torch.equal(model(IDS).logits, own)
