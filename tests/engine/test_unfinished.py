"""What is left unfinished: at the interpreter's end, in a reference cycle, by a reader that stops.
And plain requests, which go on when the model changes."""

import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from tests.support.cases import bits_of, drain, engine_of, greedy, run, text, whole
from tests.support.changes import Scaled
from tests.support.patience import PATIENCE
from tests.support.tiny import tiny
from tinyspec import SamplingParams

SETTINGS = {"page_size": 8, "num_pages": 120, "max_rows": 32}
LONG = SamplingParams(max_new_tokens=200, ignore_eos=True)
REQUESTS = [(text(5 + 9 * n, seed=n), greedy(6, temperature=n, seed=n)) for n in range(2)]


# The interpreter's end

AT_EXIT = """
import asyncio, threading
from tests.support.cases import engine_of
from tests.support.tiny import tiny
from tinyspec import AsyncEngine, SamplingParams

engine = engine_of(tiny(), num_pages=4000, max_rows=32)
params = SamplingParams(max_new_tokens=400, ignore_eos=True)
streams = [engine.stream([[1, 2, 3]], params) for _ in range(2)]
next(streams[0])
engine.add_request([4, 5], params)
held = [engine, streams]
held.append(held)


def begins_one():
    events = engine.stream([[6, 7]], params)
    next(events)
    begun.set()
    threading.Event().wait()


async def begins():
    served = AsyncEngine(engine_of(tiny(), num_pages=400, max_rows=32))
    events = served.stream([[1, 2]], params)
    await anext(events)
    return served, events


begun = threading.Event()
threading.Thread(target=begins_one, daemon=True).start()
begun.wait()
kept = asyncio.run(begins())
next(streams[1])
print("the end")
"""


@pytest.mark.slow("environments", 8)
def test_the_interpreter_ends_by_itself():
    """With streams, of another thread, too, a request, and an AsyncEngine in the middle of one."""
    given = [sys.executable, "-W", "ignore", "-c", AT_EXIT]
    done = subprocess.run(given, capture_output=True, text=True, timeout=PATIENCE, env=os.environ)
    assert (done.returncode, done.stdout) == (0, "the end\n"), done.stderr[-2000:]
    assert "Traceback" not in done.stderr, done.stderr[-2000:]


# Cycles


@pytest.mark.parametrize("begun", [False, True])
def test_an_engine_in_a_cycle_with_an_unfinished_stream(begun):
    """It is collected, with its memory; the model is served by others."""
    model = tiny()
    engine = engine_of(model, **SETTINGS)
    held = [engine, engine.stream([[1, 2, 3]], LONG)]
    if begun:
        next(held[1])
    held.append(held)
    gone = [weakref.ref(engine), weakref.ref(held[1])]
    del engine, held
    gc.collect()
    assert [found() for found in gone] == [None, None]
    with engine_of(model, **SETTINGS) as another:
        assert another.generate([[1, 2]], greedy(2))[0].completions[0].token_ids


def test_control_a_reference_keeps_it():
    engine = engine_of(tiny(), **SETTINGS)
    stream = engine.stream([[1, 2, 3]], LONG)
    next(stream)
    gone = weakref.ref(engine)
    del engine
    gc.collect()
    assert gone() is not None and next(stream).token_ids


# A reader that stops


def passes(engine) -> int:
    return sum(engine.stats().passes.values())


def test_a_stream_alone_is_one_pass_ahead_of_its_reader():
    """Of plain requests an event is one pass: as many passes as events, and one at most."""
    with engine_of(tiny(), **SETTINGS, drafter=None) as engine:
        engine.generate([[1, 2]], greedy(2))
        stream, first = engine.stream([[1, 2, 3]], LONG), passes(engine)
        for count in range(1, 20):
            next(stream)
            assert count <= passes(engine) - first <= count + 1


def test_a_stream_that_is_never_resumed():
    """Others finish, with their bits, in the same thread and in another one; its own request ends
    with it."""
    with engine_of(tiny(), **SETTINGS) as engine:
        alone = bits_of(run(engine, REQUESTS))
        stream = engine.stream([[1, 2, 3]], LONG)
        next(stream)
        assert bits_of(run(engine, REQUESTS)) == alone
        with ThreadPoolExecutor(2) as pool:
            found = [pool.submit(run, engine, REQUESTS) for _ in range(2)]
            assert [bits_of(each.result(PATIENCE)) for each in found] == [alone] * 2
        assert engine.has_unfinished()
        del stream
        assert not engine.has_unfinished()
        assert bits_of(run(engine, REQUESTS)) == alone
        assert whole(engine)


# Plain requests


def weights(model):
    model.load_state_dict(tiny(seed=5).state_dict())


def assigned(model):
    model.load_state_dict(tiny(seed=5).state_dict(), assign=True)


def parameter(model):
    model.lm_head.weight = nn.Parameter(tiny(seed=5).lm_head.weight.detach().clone())


def dtype(model):
    model.to(torch.float16)


def module(model):
    model.model.layers[1].mlp.up_proj = Scaled(model.model.layers[1].mlp.up_proj)


def fewer_layers(model):
    del model.model.layers[1]
    model.config.num_hidden_layers = 1


def words(model):
    """More of them, none of which is ever the best."""
    model.resize_token_embeddings(140)
    with torch.no_grad():
        model.lm_head.weight[128:] = 0.0


CHANGES = (weights, assigned, parameter, dtype, module, fewer_layers, words)
NAME = dict(ids=lambda f: f.__name__)
BEFORE, TOKENS = 4, 12


def continued(change: Callable[[nn.Module], object], tokens: list[int], count: int) -> list[int]:
    """Greedy tokens of an engine whose model was changed before it was made."""
    model = tiny()
    change(model)
    with engine_of(model, **SETTINGS, drafter=None) as engine:
        params = SamplingParams(max_new_tokens=count, ignore_eos=True)
        return engine.generate([tokens], params)[0].completions[0].token_ids


@pytest.mark.crossed(1)
@pytest.mark.parametrize("how", ["stream", "step", "another thread"])
@pytest.mark.parametrize("change", CHANGES, **NAME)
def test_plain_requests_go_on(change, how):
    """After a change between two events every token is the changed model's, to the last one."""
    prompt, params = text(11, seed=3), SamplingParams(max_new_tokens=TOKENS, ignore_eos=True)
    model = tiny()
    with engine_of(model, **SETTINGS, drafter=None) as engine:
        events = engine.stream([prompt], params)
        found = [next(events) for _ in range(BEFORE)]
        added = engine.add_request(prompt, params) if how == "step" else None
        if how == "another thread":
            thread = threading.Thread(target=change, args=(model,))
            thread.start()
            thread.join(PATIENCE)
        else:
            change(model)
        if added is not None:
            outputs = drain(engine)
            assert outputs[added].completions[0].token_ids == continued(change, prompt, TOKENS)
        found += events
    tokens = [token for event in found for token in event.token_ids]
    known = [token for event in found[:BEFORE] for token in event.token_ids]
    assert (found[-1].finish_reason, found[-1].error) == ("length", None)
    assert tokens[len(known) :] == continued(change, prompt + known, TOKENS - len(known))
    if change not in (words, dtype):
        assert tokens != continued(lambda model: None, prompt, TOKENS), "the change matters"
