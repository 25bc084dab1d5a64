"""Everything at once, for minutes: threads, asyncio, Ctrl-C, aborts, weights that change, releases,
copies, and two models, of which an engine and a patched ``generate`` serve one each. No output is
another than its request's alone, no page is lost, memory is flat.

Controls: the judge finds a lost page, a wrong token, weights that nobody has and kept memory.
"""

import asyncio
import copy
import random
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

import tinyspec
from tests.support import soak as given
from tests.support.cases import drain, engine_of
from tests.support.drop_in import SMALL
from tests.support.patience import PATIENCE
from tests.support.signals import handled_by
from tests.support.soak import CALL, PLAIN, PROMPTS, REQUESTS, SETTINGS, Judge, Truth
from tinyspec import AsyncEngine

SECONDS = 20  # of the form that is a part of a sample
CHANGED = "the weights changed while it was running"
BROKEN = "broken on purpose"


class Soak:
    """The models, and what each thread of a round does with them."""

    def __init__(self, judge: Judge, seed: str):
        self.judge, self.rng = judge, random.Random(seed)
        self.served = judge.truth.make(given.OF_THE_ENGINE[0])
        self.patched = judge.truth.make(given.OF_THE_PATCHED[0])
        self.has = {"engine": given.OF_THE_ENGINE[0], "patched": given.OF_THE_PATCHED[0]}
        self.engine = engine_of(self.served, **SETTINGS)
        tinyspec.patch(self.patched, SMALL)

    def some(self, rng):
        """Numbers of deterministic requests."""
        return [rng.randrange(len(REQUESTS)) for _ in range(rng.randint(1, 3))]

    # Each of these runs in a thread of its own, with a generator of its own.

    def calls(self, rng):
        for _ in range(2):
            numbers = self.some(rng)
            requests = [*(REQUESTS[n] for n in numbers), (PROMPTS[0], PLAIN)]
            outputs = self.engine.generate(*map(list, zip(*requests, strict=True)))
            self.judge.plain(outputs.pop())
            for number, output in zip(numbers, outputs, strict=True):
                self.judge.output(number, output, (CHANGED,))

    def streams(self, rng):
        """Some are left before their end; what was collected by then is no output."""
        for number in self.some(rng):
            prompt, params = REQUESTS[number]
            left = rng.randrange(6)
            with self.engine.stream([prompt], params) as events:
                for count, _ in enumerate(events):
                    if count == left:
                        break
            self.judge.counts["streams"] += 1

    def tasks(self, rng):
        async def ask(served, number):
            prompt, params = REQUESTS[number]
            self.judge.output(number, (await served.generate([prompt], params))[0], (CHANGED,))

        async def main():
            async with AsyncEngine(self.engine, max_requests=3) as served:
                tasks = [asyncio.create_task(ask(served, n)) for n in range(len(REQUESTS))]
                await asyncio.sleep(rng.random() / 20)
                rng.choice(tasks).cancel()
                done = await asyncio.gather(*tasks, return_exceptions=True)
                for error in done:
                    right = error is None or isinstance(error, asyncio.CancelledError)
                    self.judge.check("tasks", right, repr(error))

        asyncio.run(asyncio.wait_for(main(), PATIENCE))

    def disturbs(self, rng):
        """Changes between steps, user code that raises, requests that are aborted."""
        for _ in range(3):
            time.sleep(rng.random() / 10)
            rng.choice((self.change, self.release, self.abort, self.fail))(rng)

    def change(self, rng):
        with self.engine.driver.turn("soak"):
            seed = self.has["engine"] = rng.choice(given.OF_THE_ENGINE)
            self.served.load_state_dict(self.judge.truth.weights[seed])
        self.judge.counts["weight changes"] += 1

    def release(self, rng):
        try:
            self.engine.release()
            self.judge.counts["releases"] += 1
        except ValueError as error:
            self.judge.check("refused releases", "unfinished" in str(error), str(error))

    def abort(self, rng):
        number = self.some(rng)[0]
        prompt, params = REQUESTS[number]
        name = self.engine.add_request(prompt, params)
        time.sleep(rng.random() / 50)
        try:
            output = self.engine.abort(name)
        except ValueError as error:  # it has finished: ``step`` has its output
            self.judge.check("too late aborts", name in str(error), str(error))
        else:
            reasons = {c.finish_reason for c in output.completions}
            self.judge.check("aborts", "abort" in reasons, str(reasons))

    def fail(self, rng):
        def broken(ids, scores):
            raise RuntimeError(BROKEN)

        prompt, params = REQUESTS[0]
        bad = replace(params, stopping_criteria=[broken])
        self.judge.output(0, self.engine.generate([prompt], bad)[0], (BROKEN, CHANGED))

    def drops_in(self, rng):
        for _ in range(2):
            self.judge.rows(self.has["patched"], self.patched.generate(PROMPTS, **CALL))

    def runs_itself(self, rng):
        for _ in range(5):
            self.judge.model("beside an engine", self.has["patched"], self.patched)

    # In the main thread.

    def interrupted(self, work):
        """What ``work`` returns, or None where Ctrl-C came first."""
        main = threading.main_thread().ident
        kill = threading.Timer(self.rng.random() / 3, signal.pthread_kill, (main, signal.SIGINT))
        try:
            with handled_by():
                kill.start()
                try:
                    return work()
                finally:
                    kill.cancel()
                    kill.join()
        except KeyboardInterrupt:
            self.judge.counts["interrupts"] += 1
            return None

    def main_calls(self):
        for _ in range(2):
            rows = self.interrupted(lambda: self.patched.generate(PROMPTS, **CALL))
            if rows is not None:
                self.judge.rows(self.has["patched"], rows)
            (number, *_) = self.some(self.rng)
            prompt, params = REQUESTS[number]
            outputs = self.interrupted(lambda p=prompt, s=params: self.engine.generate([p], s))
            if outputs is not None:
                self.judge.output(number, outputs[0], (CHANGED,))

    def between(self):
        """Nobody else runs: what a program does now and then, and the checks."""
        for output in drain(self.engine).values():
            (number,) = [n for n, (p, _) in enumerate(REQUESTS) if p == output.prompt_token_ids]
            self.judge.output(number, output, (CHANGED,))
        self.judge.pages(self.engine)
        self.judge.pages(self.patched.generate._engine or self.engine)
        self.judge.remember()  # while both hold the pools that their round needed
        what = self.rng.choice(("forget", "another", "weights", "patch", "release", "nothing"))
        self.judge.counts[f"between: {what}"] += 1
        if what == "forget":
            self.engine.forget_plain()
        elif what == "another":
            before, self.engine = self.engine, engine_of(self.served, **SETTINGS)
            before.close()
            del before  # or it is counted
        elif what == "weights":
            seed = self.has["patched"] = self.rng.choice(given.OF_THE_PATCHED)
            self.patched.load_state_dict(self.judge.truth.weights[seed])
        elif what == "patch":
            self.interrupted(lambda: tinyspec.unpatch(self.patched))
            tinyspec.unpatch(self.patched)
            self.judge.model("unpatched", self.has["patched"], self.patched)
            self.interrupted(lambda: tinyspec.patch(self.patched, SMALL))
            tinyspec.unpatch(self.patched)
            tinyspec.patch(self.patched, SMALL)
        elif what == "release":
            self.patched.generate.release()
            self.engine.release()
        self.judge.model("copies", self.has["patched"], copy.deepcopy(self.patched))
        self.judge.model("copies", self.has["engine"], copy.deepcopy(self.served))
        self.judge.model("beside an engine", self.has["engine"], self.served)

    def round(self):
        works = (self.calls, self.calls, self.streams, self.tasks, self.disturbs)
        works += (self.drops_in, self.runs_itself)
        seeds = [self.rng.randrange(2**32) for _ in works]
        with ThreadPoolExecutor(len(works)) as pool:
            jobs = zip(works, seeds, strict=True)
            futures = [pool.submit(work, random.Random(seed)) for work, seed in jobs]
            self.main_calls()
            for future in futures:
                future.result(PATIENCE)
        self.between()

    def close(self):
        tinyspec.unpatch(self.patched)
        self.engine.close()
        self.judge.model("closed", self.has["engine"], self.served)


# The engine's model and the patched one.
KINDS = {"llamas": (), "delta rule": ("qwen3_5_text", "llama"), "mamba 2": ("llama", "bamba")}


@pytest.fixture(scope="module", params=KINDS)
def truth(request):
    return Truth(*KINDS[request.param])


def seconds(config) -> float:
    """``--soak-minutes``; else 10 minutes, and in a sample of the slow tests ``SECONDS``."""
    minutes = config.getoption("--soak-minutes")
    if minutes is None and config.getoption("--minutes") is not None:
        return SECONDS
    return 60 * (10 if minutes is None else minutes)


@pytest.mark.slow("soak", SECONDS + 10)
def test_everything_at_once(truth, request, no_results_on_disk):
    length, judge = seconds(request.config), Judge(truth)
    soak = Soak(judge, request.config.getoption("--seed"))
    end = time.monotonic() + length
    rounds = 0
    try:
        while time.monotonic() < end or rounds < 6:
            soak.round()
            rounds += 1
            assert not judge.wrong, judge.wrong[:3]
    finally:
        soak.close()
        counts = dict(sorted(judge.counts.items()))
        print(f"\n{rounds} rounds", counts, *judge.memory[:: rounds // 6 or 1], sep="\n")
    judge.flat()
    assert not judge.wrong, judge.wrong[:3]
    assert judge.counts["outputs"] > 5 * rounds and judge.counts["rows"] > rounds
    assert judge.counts["interrupts"] > 0


@pytest.mark.slow("soak", 3)
def test_controls_of_the_judge(truth):
    """A page that is lost, another token, weights that nobody has, a model that is another, memory
    that is kept."""
    seed, other = given.OF_THE_ENGINE
    number = next(n for n, (_, params) in enumerate(REQUESTS) if params.temperature)
    prompt, params = REQUESTS[number]
    judge, lost = Judge(truth), []
    with engine_of(truth.make(seed), **SETTINGS) as engine:
        output = engine.generate([prompt], params)[0]
        judge.output(number, output)
        judge.pages(engine)
        judge.model("itself", seed, engine.model)
        assert not judge.wrong
        judge.output(number - 1, output)
        judge.output(number, replace(output, fingerprint="another"))
        first, *rest = output.completions
        changed = replace(first, token_ids=[*first.token_ids[:-1], first.token_ids[-1] ^ 1])
        judge.output(number, replace(output, completions=[changed, *rest]))
        judge.model("itself", other, engine.model)
        engine.pool.grow(lost, 9)
        judge.pages(engine)
        engine.pool.free(lost)
    judge.rows(given.OF_THE_PATCHED[0], torch.zeros(3, 40, dtype=torch.long))
    judge.output(number, replace(output, completions=[replace(first, finish_reason="abort")]))
    for grown in torch.eye(3, dtype=torch.int64) << 20:
        judge.memory = [tuple((grown * turn).tolist()) for turn in range(9)]
        judge.flat()
    wrong = {"outputs": 3, "itself": 1, "pages": 1, "rows": 1, "named errors": 1, "memory": 3}
    assert Counter(line.partition(":")[0] for line in judge.wrong) == wrong
