"""Eight threads on one engine, and what each does with it; by public calls alone.

What they find is judged as a soak's is (tests/support/soak.py): by the bits that each request has
alone under the fingerprint that it carries. Weights are one of four known sets at every moment: one
tensor is written within passes, by a processor, and one is put in place of another by any thread at
any line, for good or for a ``torch.func.functional_call``.
"""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import gc
import random
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import tinyspec
from tests.support.cases import drain, engine_of, greedy, text
from tests.support.drop_in import SMALL
from tests.support.mixes import bits
from tests.support.patience import PATIENCE
from tests.support.sensitive import ShapeSensitiveLinear, replace_linears
from tests.support.settings import CHANGES, SettingSensitiveLinear, defaults
from tests.support.soak import CALL, IDS, PLAIN, PROMPTS, STYLES, Judge
from tests.support.tiny import tiny
from tinyspec import AsyncEngine, Completion, DeterminismError, RequestOutput, SamplingParams

# Few sizes, so that proofs are short.
SETTINGS = {"page_size": 8, "num_pages": 120, "max_rows": 32}
# Deterministic requests: what they ask for is short, so that many end between two changes.
REQUESTS = [(text(3 + 7 * n, seed=n), greedy(2 + 3 * n, **s)) for n, s in enumerate(STYLES[:4])]
SCORED = text(20, seed=30), text(6, seed=31)
WRITTEN, PUT = "model.layers.1.mlp.up_proj.weight", "model.norm.weight"
# Which values these have in each set.
SETS = [(written, put) for written in range(2) for put in range(2)]
# Calls of ``settings.CALLS`` in a pass: around a linear of the last layer, and the unembedding.
PLACES = 4
CHANGED, ASKED = "changed while it was running", "engine.abort was called for it"
# Why a deterministic request may end early.
ENDS = (CHANGED, "changed in each of 100 passes")
ENOUGH = 10**9


class Weights:
    """What each request and score gives alone, by the fingerprint of every set of weights, and each
    call of a patched model with the first set: what a Judge compares with."""

    def __init__(self) -> None:
        model = tiny(seed=1).state_dict()
        own = tiny().state_dict()
        self.written = [own[WRITTEN], model[WRITTEN]]
        self.put = [own[PUT] * factor for factor in (1.0, 1.25)]
        self.bits: dict[str | None, list[Any]] = {}
        self.fingerprints: dict[tuple[int, ...], str] = {}
        self.scores: list[Any] = []
        # The last one is of the engines that are dropped: making one is no pass.
        for chosen in (*SETS, (0, 0, False)):
            with engine_of(self.make(*chosen), **SETTINGS) as engine:
                alone = [engine.generate([prompt], params)[0] for prompt, params in REQUESTS]
                self.fingerprints[chosen] = engine.fingerprint
                self.bits[engine.fingerprint] = [bits(output) for output in alone]
                self.scores.append(engine.score(*([part] for part in SCORED)))
        patched = self.patched()
        rows = [self.call(patched, [n]) for n in range(len(PROMPTS))]
        self.rows = {0: torch.cat(rows)}
        self.logits = {0: patched(IDS).logits}
        tinyspec.unpatch(patched)

    def make(self, written: int = 0, put: int = 0, sensitive: bool = True) -> PreTrainedModel:
        """A model of that set, of which bits depend on the shape of a pass and, where it is
        ``sensitive``, on settings."""
        model = tiny()
        mlp = model.model.layers[1].mlp
        replace_linears(model.model.layers[0], ShapeSensitiveLinear)
        if sensitive:
            mlp.down_proj = SettingSensitiveLinear(mlp.down_proj)
            model.lm_head = SettingSensitiveLinear(model.lm_head)
        with torch.no_grad():
            model.get_parameter(WRITTEN).copy_(self.written[written])
        model.model.norm.weight = nn.Parameter(self.put[put].clone())
        return model

    def patched(self) -> PreTrainedModel:
        """One whose ``generate`` and forward are tinyspec's."""
        tinyspec.patch(model := self.make(), SMALL, forward=True)
        return model

    def call(self, model: PreTrainedModel, numbers: list[int]) -> Tensor:
        """What ``generate`` adds to these prompts."""
        given = [PROMPTS[n] for n in numbers]
        seeds = [CALL["seed"][n] for n in numbers]
        return model.generate(given, **{**CALL, "seed": seeds})[:, max(map(len, given)) :]


@contextmanager
def many_switches() -> Iterator[None]:
    """Threads are switched as often as the interpreter can; settings are as before afterwards."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
        defaults()


def stop(thread: threading.Thread) -> None:
    """End a thread that runs Python code, whatever it does; one that waits for a lock stays."""
    for _ in range(50):
        if not thread.is_alive():
            return
        asked = ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(*asked)
        thread.join(0.1)


class Stress:
    """One engine under eight threads; a second model under ``patch``, and a third one of which
    engines are made and dropped."""

    def __init__(self, judge: Judge, weights: Weights, seed: str):
        self.judge, self.weights, self.rng = judge, weights, random.Random(seed)
        self.served, self.other = weights.make(), weights.make(sensitive=False)
        self.patched = weights.patched()
        self.parameters = [nn.Parameter(x.clone()) for x in weights.put]
        self.engine = engine_of(self.served, **SETTINGS)
        self.queued: dict[str, int] = {}
        self.parked: list[Any] = []
        self.dropped: list[weakref.ref[Any]] = []
        self.end = 0.0

    def some(self, rng: random.Random, most: int = 3) -> list[int]:
        return [rng.randrange(len(REQUESTS)) for _ in range(rng.randint(1, most))]

    # Each of these is called by a thread of its own until the round is over.

    def generates(self, rng: random.Random) -> None:
        numbers = self.some(rng)
        given = [*(REQUESTS[n] for n in numbers), (PROMPTS[0], PLAIN)]
        outputs = self.engine.generate(*map(list, zip(*given, strict=True)))
        self.judge.plain(outputs.pop())
        for number, output in zip(numbers, outputs, strict=True):
            self.judge.output(number, output, ENDS)
        if rng.random() < 0.3:
            self.replays(numbers, outputs)

    def replays(self, numbers: list[int], outputs: list[RequestOutput]) -> None:
        """With the bits of the request; or to the first token that is another under the weights of
        now."""
        again = self.engine.replay(outputs)
        for number, before, after in zip(numbers, outputs, again, strict=True):
            ended = [c for c in after.completions if c.finish_reason == "abort"]
            if not ended:
                self.judge.output(number, after)
            elif all(c.finish_reason != "abort" for c in before.completions):
                other = before.fingerprint != after.fingerprint
                told = all(any(each in str(c.error) for each in ENDS) for c in ended)
                self.judge.check("replays that ended", told or other, str(ended))

    def streams(self, rng: random.Random) -> None:
        """Read to their end, closed, dropped, or not resumed before the round is over."""
        (number,) = self.some(rng, 1)
        prompt, params = REQUESTS[number]
        events = self.engine.stream([prompt], params)
        left = rng.choice((ENOUGH, ENOUGH, 0, 1, 2))
        seen = list(islice(events, left))
        if left == ENOUGH:
            return self.judge.output(number, output_of(prompt, params, seen), ENDS)
        self.judge.counts["streams that were left"] += 1
        what = rng.choice(("close", "drop", "park"))
        if what == "close":
            events.close()
        elif what == "park":
            self.parked.append(events)

    def steps(self, rng: random.Random) -> None:
        """Requests that ``step`` reports, in whichever thread they run, and ``abort`` of some."""
        if len(self.queued) < 5:
            (number,) = self.some(rng, 1)
            self.queued[self.engine.add_request(*REQUESTS[number])] = number
        if rng.random() < 0.1:
            self.abort(rng.choice(list(self.queued)))
        self.report(self.engine.step())

    def abort(self, name: str) -> None:
        try:
            output = self.engine.abort(name)
        except ValueError as error:  # it has finished: ``step`` has its output
            self.judge.check("too late aborts", name in str(error), str(error))
            return
        del self.queued[name]
        errors = {c.error for c in output.completions if c.finish_reason == "abort"}
        self.judge.check("aborts", errors == {ASKED}, str(output.completions))

    def report(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            known = output.request_id in self.queued
            self.judge.check("reports", known, f"{output.request_id} was reported before")
            if known:
                self.judge.output(self.queued.pop(output.request_id), output, ENDS)

    def writes(self, rng: random.Random) -> None:
        """A tensor in place of another, at any line; or values, within a pass."""
        time.sleep(rng.random() / 2)
        what = rng.choice(("put", "write", "write by data", "say so"))
        if what == "put":
            self.served.model.norm.weight = self.parameters[rng.randrange(2)]
        elif what == "say so":
            self.engine.weights_changed()
        else:
            value = self.weights.written[rng.randrange(2)]

            def write(ids: Tensor, scores: Tensor) -> Tensor:
                weight = self.served.get_parameter(WRITTEN)
                if what == "write":
                    with torch.no_grad():
                        weight.copy_(value)
                else:
                    weight.data.copy_(value)
                    self.engine.weights_changed()
                return scores

            params = SamplingParams(max_new_tokens=1, logits_processors=[write])
            self.judge.plain(self.engine.generate([PROMPTS[0]], params)[0])
        self.judge.counts["changes of weights"] += 1

    def sets(self, rng: random.Random) -> None:
        """A setting of the process, never to what passes have: no look could tell."""
        name = rng.choice(list(CHANGES))
        _, values, put = CHANGES[name]
        put(rng.choice(values))
        self.judge.counts[name] += 1
        time.sleep(rng.random() / 20)

    def calls_functionally(self, rng: random.Random) -> None:
        """The served model, with one of two tensors in place of its own."""
        value = self.parameters[rng.randrange(2)]
        with torch.no_grad():
            torch.func.functional_call(self.served, {PUT: value}, (IDS,))
        self.judge.counts["functional calls"] += 1
        time.sleep(rng.random() / 3)

    def scores(self, rng: random.Random) -> None:
        """And what a patched model computes."""
        try:
            found = self.engine.score(*([part] for part in SCORED))
        except RuntimeError as error:
            named = any(each in str(error) for each in ENDS)
            self.judge.check("named errors", named, str(error))
        else:
            self.judge.check("scores", found in self.weights.scores)
        self.judge.check("fingerprints", self.engine.fingerprint in self.weights.bits)
        if rng.random() < 0.5:
            with torch.no_grad():
                self.judge.model("canonical forwards", 0, self.patched)
        else:
            number = rng.randrange(len(PROMPTS))
            found = self.weights.call(self.patched, [number])
            self.judge.check("rows", torch.equal(found, self.weights.rows[0][[number]]))

    def drops(self, rng: random.Random) -> None:
        """An engine: closed, or dropped with a stream that is unfinished, in a cycle or not."""
        engine = engine_of(self.other, **SETTINGS)
        (number,) = self.some(rng, 1)
        prompt, params = REQUESTS[number]
        if rng.random() < 0.3:
            outputs = asyncio.run(asyncio.wait_for(in_tasks(engine, number), PATIENCE))
            for output in outputs:
                self.judge.output(number, output)
        else:
            self.judge.output(number, engine.generate([prompt], params)[0])
        held: list[Any] = [engine, engine.stream([prompt], params)]
        next(held[1])
        self.dropped.append(weakref.ref(engine))
        if rng.random() < 0.3:
            engine.close()
        if rng.random() < 0.5:
            held.append(held)
        self.judge.counts["engines"] += 1

    WORKS = (generates, streams, steps, writes, sets, calls_functionally, scores, drops)

    def work(self, what: Callable[[Stress, random.Random], None], seed: int) -> None:
        rng = random.Random(seed)
        try:
            while time.monotonic() < self.end and not self.judge.wrong:
                try:
                    what(self, rng)
                except DeterminismError as error:  # settings moved during each try
                    told = "during each of 10 proofs", "during a canonical forward"
                    known = any(each in str(error) for each in told)
                    self.judge.check("refused", known, str(error))
        except Exception as error:
            where = error.__traceback__
            while where and where.tb_next:
                where = where.tb_next
            at = f"{where.tb_frame.f_code.co_filename}:{where.tb_lineno}" if where else ""
            self.judge.check(what.__name__, False, f"{error!r} at {at}")

    def round(
        self, seconds: float, works: Any = WORKS, patience: float = PATIENCE, dump: bool = True
    ) -> None:
        """``works`` at once; then nothing is left unfinished, lost or held."""
        self.end = time.monotonic() + seconds
        threads = []
        for number, what in enumerate(works):
            given = what, self.rng.randrange(2**32)
            name = f"{what.__name__} {number}"
            threads.append(threading.Thread(target=self.work, args=given, name=name, daemon=True))
        for thread in threads:
            thread.start()
        last = self.end + patience
        for thread in threads:
            thread.join(max(0.0, last - time.monotonic()))
        if hung := [thread for thread in threads if thread.is_alive()]:
            if dump:
                faulthandler.dump_traceback(sys.__stderr__, all_threads=True)
            self.judge.check("hangs", False, str([thread.name for thread in hung]))
            for thread in hung:
                stop(thread)
        defaults()
        if not self.judge.wrong:
            self.at_rest()

    def at_rest(self) -> None:
        self.parked.clear()
        self.report(list(drain(self.engine).values()))
        self.engine.check_model()  # ends the requests of streams that were dropped
        self.judge.check("lost", not self.queued, str(self.queued))
        self.judge.check("unfinished", not self.engine.has_unfinished())
        self.judge.pages(self.engine)
        gc.collect()
        alive = [found for found in self.dropped if found() is not None]
        self.judge.check("dropped engines", not alive, f"{len(alive)} are there")
        self.dropped.clear()

    def close(self) -> None:
        tinyspec.unpatch(self.patched)
        self.engine.close()


async def in_tasks(engine: tinyspec.Engine, number: int) -> list[RequestOutput]:
    """One request twice, beside one that is cancelled; the engine stays open."""
    prompt, params = REQUESTS[number]
    async with AsyncEngine(engine) as served:
        tasks = [asyncio.create_task(served.generate([prompt], params)) for _ in range(3)]
        await asyncio.sleep(0)
        tasks[0].cancel()
        found = await asyncio.gather(*tasks[1:])
    return [output for outputs in found for output in outputs]


def output_of(prompt: list[int], params: SamplingParams, events: list[Any]) -> RequestOutput:
    """A request put together from its events, all of which have one fingerprint."""
    fingerprints = {event.fingerprint for event in events if event.token_ids}
    completions = [Completion([], logprobs=[]) for _ in range(params.num_return_sequences)]
    for event in events:
        completion = completions[event.index]
        completion.token_ids += event.token_ids
        completion.logprobs += event.logprobs
        completion.finish_reason, completion.error = event.finish_reason, event.error
    known = fingerprints.pop() if len(fingerprints) == 1 else None
    return RequestOutput(events[0].request_id, prompt, params, completions, known)


def streamed(
    engine: tinyspec.Engine, requests: list[tuple[list[int], SamplingParams]]
) -> list[Any]:
    """The bits of each of ``requests``, put together from the events of one stream."""
    events = list(engine.stream(*map(list, zip(*requests, strict=True))))
    each = [[event for event in events if event.prompt == n] for n in range(len(requests))]
    return [bits(output_of(*given, own)) for given, own in zip(requests, each, strict=True)]
