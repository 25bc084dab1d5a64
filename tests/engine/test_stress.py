"""Eight threads at once, switched as often as the interpreter can: no output is another than its
request's alone, none hangs, none is lost. And what a single other thread may do beside a request.

Control: where no call waits for another thread's, the same rounds go wrong.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from functools import cache

import pytest
import torch
from torch import nn

from tests.engine.test_soak import seconds
from tests.support.cases import drain, engine_of
from tests.support.mixes import bits
from tests.support.patience import PATIENCE
from tests.support.settings import CALLS, CHANGES, defaults
from tests.support.soak import IDS, Judge
from tests.support.stress import (
    CHANGED,
    PLACES,
    PUT,
    REQUESTS,
    SETTINGS,
    Stress,
    Weights,
    many_switches,
)
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


class Held:
    """A thread that does something that it is in the middle of until it is told to go on."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()

    def wait(self) -> None:
        self.begun.set()
        self.go_on.wait(PATIENCE)

    @contextmanager
    def __call__(self, work: Callable[[], object]):
        thread = threading.Thread(target=work)
        thread.start()
        try:
            assert self.begun.wait(PATIENCE)
            yield
        finally:
            self.go_on.set()
            thread.join(PATIENCE)


def alone(weights: Weights, written: int, put: int) -> tuple[list, str]:
    """Bits of request ``NUMBER``, and fingerprint, where nobody disturbs."""
    fingerprint = weights.fingerprints[written, put]
    return weights.bits[fingerprint][NUMBER], fingerprint


class Slow(torch.Tensor):
    """Token ids of which the first use waits."""

    held: Held

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        cls.held.wait()
        return super().__torch_function__(function, types, args, kwargs)


def in_thread(work: Callable[..., object], *args: object) -> None:
    """In another one, to its end."""
    thread = threading.Thread(target=work, args=args)
    thread.start()
    thread.join(PATIENCE)


@contextmanager
def at_pass(number: int, works: dict[int, Callable[[], object]]):
    """In that pass, at these of its ``PLACES``."""
    left, calls = {(number - 1) * PLACES + place: work for place, work in works.items()}, []

    def call():
        calls.append(len(calls))
        left.pop(calls[-1], lambda: None)()

    CALLS.append(call)
    try:
        yield
    finally:
        CALLS.remove(call)
    assert not left, "it was done"


@pytest.mark.parametrize("when", ["within a pass", "for four passes", "before the submit"])
def test_functional_call_beside_a_request(weights, when):
    """While another thread has put other weights into the model, a request goes on with its own,
    or ends saying so: it has the bits of its fingerprint. Who comes later has the model's."""
    model, held, (prompt, params) = weights.make(), Held(), REQUESTS[NUMBER]
    before, fingerprint = alone(weights, 0, 0)
    during, other = alone(weights, 0, 1)
    Slow.held = held

    def call():
        with torch.no_grad():
            value = {PUT: nn.Parameter(weights.put[1])}
            torch.func.functional_call(model, value, (IDS.as_subclass(Slow),))

    outputs, block = [], held(call)
    with engine_of(model, **ONE_BY_ONE) as engine:
        engine.fingerprint  # noqa: B018 - what is to be proven is
        if when != "before the submit":
            engine.add_request(prompt, params)
            outputs += engine.step() + engine.step() + engine.step()
        if when == "within a pass":  # around the norm whose weight is another one
            with at_pass(1, {1: block.__enter__, 2: lambda: block.__exit__(None, None, None)}):
                outputs += engine.step()
        else:
            with block:
                if when == "before the submit":
                    engine.add_request(prompt, params)
                outputs += [output for _ in range(4) for output in engine.step()]
        outputs += drain(engine).values()
        later = engine.generate([prompt], params)[0]
    (output,) = outputs
    expected = {fingerprint: before, other: during}[output.fingerprint]
    (completion,) = output.completions
    if completion.finish_reason == "abort":
        assert CHANGED in completion.error
        tokens, logprobs, _ = expected[0]
        count = len(completion.token_ids)
        assert completion.token_ids == tokens[:count] and completion.logprobs == logprobs[:count]
    else:
        assert bits(output) == expected
    assert (bits(later), later.fingerprint) == (before, fingerprint)
    assert before != during, "the weights matter"


WHEN = ("a pass", "a pass, before one of another engine", "between passes")


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("name", CHANGES)
def test_a_setting_by_another_thread(weights, name, when):
    """Set while a request runs, and left: it has its bits, under one fingerprint. Another engine
    that sets what passes have hides nothing from this one."""
    prompt, params = REQUESTS[NUMBER]
    expected, fingerprint = alone(weights, 0, 0)
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
            with at_pass(1, works):
                found.append(next(events))
        found += events
    tokens = [token for event in found for token in event.token_ids]
    logprobs = [value for event in found for value in event.logprobs]
    assert [(tokens, logprobs, found[-1].finish_reason)] == expected
    assert {event.fingerprint for event in found} == {fingerprint}
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


def test_weights_put_in_place_within_a_pass(weights):
    """By another thread, between two layers of one pass: what the request has is of one model."""
    prompt, params = REQUESTS[NUMBER]
    model, value = weights.make(), nn.Parameter(weights.put[1].clone())
    tokens, logprobs, _ = alone(weights, 0, 0)[0][0]
    with engine_of(model, **ONE_BY_ONE) as engine:
        engine.fingerprint  # noqa: B018 - what is to be proven is
        with at_pass(4, {0: lambda: in_thread(setattr, model.model.norm, "weight", value)}):
            (completion,) = engine.generate([prompt], params)[0].completions
    count = len(completion.token_ids)
    assert completion.finish_reason == "abort" and CHANGED in completion.error
    assert 0 < count < len(tokens)
    assert completion.token_ids == tokens[:count] and completion.logprobs == logprobs[:count]
