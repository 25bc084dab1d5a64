"""One run of the fuzzer: requests alone, on fresh engines, against the same requests in a crowd
while something outside changes.

The rule: the same fingerprint, the same bits. A change that would give others must change the
fingerprint, be refused, or be noticed. What the promise leaves out is never compared: plain
requests, writes that cannot be seen.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

import tinyspec
from tests.fuzz import ambient
from tests.fuzz.draws import LENGTH, Asked, Point, RunDraw, drafter_of, rng_of
from tests.fuzz.influences import Influence, Scene, Undo, begin
from tests.fuzz.models import fresh
from tinyspec import Engine, EngineConfig, RequestOutput, SamplingParams
from tinyspec.errors import DeterminismError, UnsupportedEnvironmentError, UnsupportedModelError
from tinyspec.outputs import Completion
from tinyspec.runner.sampler import NOT_FINITE

# Errors that are nobody's notice of a change: an engine broke down.
FAILURES = ("the pass raised", "logits processor", "a stopping criterion", "the drafter raised")


class Witness(NamedTuple):
    """One completion: every bit as text, token by token. whole: not aborted from outside."""

    where: str
    tokens: list[str]
    end: str
    whole: bool


def failure(output: RequestOutput) -> str:
    """The error of an output whose engine broke down; empty: none did."""
    errors = (completion.error or "" for completion in output.completions)
    return next((error for error in errors if error.startswith(FAILURES)), "")


def noticed(output: RequestOutput) -> bool:
    """Whether a request was ended because something had changed."""
    errors = [c.error for c in output.completions if c.error not in (None, NOT_FINITE)]
    return bool(errors) and not failure(output)


def _witness(completion: Completion, where: str) -> Witness:
    columns = [completion.token_ids, completion.logprobs, completion.top_logprobs]
    tokens = [" ".join(map(repr, row)) for row in zip(*(c for c in columns if c), strict=True)]
    whole = completion.finish_reason != "abort" or completion.error == NOT_FINITE
    return Witness(where, tokens, f"{completion.finish_reason} {completion.error}", whole)


def _differ(a: Witness, b: Witness) -> str:
    """Where two completions of one request differ; empty: nowhere as far as both go."""
    for place, (mine, theirs) in enumerate(zip(a.tokens, b.tokens, strict=False)):
        if mine != theirs:
            return f"token {place}: {mine} {a.where}, {theirs} {b.where}"
    shorter, longer = sorted((a, b), key=lambda witness: len(witness.tokens))
    if shorter.whole and len(longer.tokens) > len(shorter.tokens):
        count = len(shorter.tokens)
        return f"{shorter.end} after {count} tokens {shorter.where}, more {longer.where}"
    if a.whole and b.whole and a.end != b.end:
        return f"{a.end} {a.where}, {b.end} {b.where}"
    return ""


def _prompts_differ(a: Sequence[float | None] | None, b: Sequence[float | None] | None) -> bool:
    """Whether log-probabilities of a prompt differ where both are known."""
    pairs = zip(a or (), b or (), strict=False)
    return any(repr(x) != repr(y) for x, y in pairs if x is not None and y is not None)


class Ledger:
    """Outputs of numbered requests, by fingerprint."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], tuple[list[Witness], list[float | None]]] = {}

    def knows(self, number: int, output: RequestOutput) -> bool:
        """Whether there is an output of this request under the same fingerprint."""
        return (str(output.fingerprint), number) in self._known

    def add(self, number: int, output: RequestOutput, where: str) -> str:
        """Add an output of request ``number``; what differs from an earlier one with the same
        fingerprint, or empty. Failed outputs are not to be added."""
        key = str(output.fingerprint), number
        witnesses = [_witness(completion, where) for completion in output.completions]
        prompt = list(output.prompt_logprobs or ())
        known = self._known.get(key)
        if known is None:
            if all(witness.whole for witness in witnesses):
                self._known[key] = witnesses, prompt
            return ""
        if _prompts_differ(known[1], prompt):
            return f"log-probabilities of the prompt of request {number} {where}"
        for index, pair in enumerate(zip(known[0], witnesses, strict=True)):
            if found := _differ(*pair):
                return f"request {number}, completion {index}, {found}"
        return ""


# Number of a request, and what it came to.
Outputs = list[tuple[int, RequestOutput]]


class Disturbance:
    """The influence of a run, begun and ended at its points."""

    def __init__(self, draw: RunDraw, model: Any):
        self._draw = draw
        self._model = model
        self._undo: Undo | None = None
        self._ended = draw.influence is None
        self.engine: Engine | None = None

    def at(self, point: Point) -> None:
        """It is ``point`` now: begin or end what is due."""
        if self._undo is None and point >= self._draw.enter and not self._inside(point):
            self.begin()
        if point >= self._draw.leave:
            self.end()

    def _inside(self, point: Point) -> bool:
        """Whether the beginning is left to a function of the user."""
        return self._draw.inside and point < (3, 0)

    def begin(self) -> None:
        if self._undo is None and not self._ended:
            assert self._draw.influence is not None
            scene = scene_of(self._draw, self._model, self.engine)
            self._undo = begin(self._draw.influence, scene)

    def end(self) -> None:
        if self._undo is not None and not self._ended:
            self._ended = True
            self._undo()


class _Trigger:
    """A logits processor that begins an influence at its n-th call."""

    def __init__(self, disturbance: Disturbance, calls: int):
        self._disturbance, self._left = disturbance, calls

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self._left -= 1
        if self._left == 0:
            self._disturbance.begin()
        return scores


def scene_of(draw: RunDraw, model: Any, engine: Engine | None = None) -> Scene:
    """What the influence of a run acts on."""
    return Scene(draw.model, model, rng_of(draw.seed, draw.number, "influence"), engine)


def model_of(draw: RunDraw, influence: Influence | None) -> Any:
    """A new copy of the model, prepared for the influence."""
    model = fresh(draw.model)
    if influence is not None and influence.prepare is not None:
        influence.prepare(model)
    return model


def alone(draw: RunDraw, influence: Influence | None) -> Outputs:
    """Every request by itself, on a new engine; with an influence that was there from the start."""
    model = model_of(draw, influence)
    undo = begin(influence, scene_of(draw, model)) if influence is not None else None
    config = EngineConfig(
        reference_rows=draw.reference_rows,
        linear=draw.linear,
        max_rows=draw.reference_rows,
        max_model_len=LENGTH,
        page_size=32,
        num_pages=4 * LENGTH // 32,
        prefix_cache=False,
    )
    try:
        with Engine(model, config=config) as engine:
            return [
                (n, engine.generate([list(asked.prompt)], asked.params)[0])
                for n, asked in enumerate(draw.needles)
            ]
    finally:
        if undo is not None:
            undo()


def crowd(draw: RunDraw, truths: list[list[int]], found: list[tuple[str, Outputs]]) -> None:
    """The requests among others, on one engine, three times; ``found`` gets (which time, outputs).
    Nothing is compared before the influence has ended, in case it changes how."""
    model = model_of(draw, draw.influence)
    disturbance = Disturbance(draw, model)
    config = EngineConfig(
        reference_rows=draw.reference_rows,
        linear=draw.linear,
        max_model_len=LENGTH,
        drafter=drafter_of(draw, truths),
        **draw.settings,
    )
    numbers = list(range(len(draw.needles)))
    rng_of(draw.seed, draw.number, "order").shuffle(numbers)
    try:
        disturbance.at((0, 0))
        with Engine(model, config=config) as engine:
            disturbance.engine = engine
            disturbance.at((1, 0))
            found.append(("first", _call(engine, draw, numbers[:1])))
            disturbance.at((2, 0))
            others = _others(draw, disturbance)
            if draw.stepping:
                found.append(("in the crowd", _step(engine, draw, others, disturbance)))
            else:
                found.append(("in the crowd", _call(engine, draw, numbers, others)))
            disturbance.at((3, 0))
            found.append(("afterwards", _call(engine, draw, numbers)))
    finally:
        disturbance.end()


def _others(draw: RunDraw, disturbance: Disturbance) -> list[Asked]:
    """The plain requests, and one whose processor disturbs."""
    if not draw.inside:
        return list(draw.others)
    trigger = _Trigger(disturbance, draw.enter[1])
    params = SamplingParams(max_new_tokens=draw.enter[1] + 3, logits_processors=[trigger])
    return [*draw.others, Asked((9, 8, 7), params)]


def _call(
    engine: Engine, draw: RunDraw, numbers: list[int], others: list[Asked] | None = None
) -> Outputs:
    """Requests in one call, others before and between them."""
    asked = [*(others or ())[::2], *(draw.needles[n] for n in numbers), *(others or ())[1::2]]
    outputs = engine.generate([list(a.prompt) for a in asked], [a.params for a in asked])
    first = len((others or ())[::2])
    return list(zip(numbers, outputs[first:], strict=False))


def _step(engine: Engine, draw: RunDraw, others: list[Asked], disturbance: Disturbance) -> Outputs:
    """Requests added, and some ended, between steps."""
    asked: list[tuple[int, Asked]] = [*enumerate(draw.needles), *((-1, other) for other in others)]
    rng_of(draw.seed, draw.number, "arrivals").shuffle(asked)
    ids: dict[str, int] = {}
    ends: dict[str, int] = {}
    done: dict[str, RequestOutput] = {}
    last = max(one.arrives for _, one in asked)
    step = 0
    while step <= last or engine.has_unfinished():
        disturbance.at((2, step))
        for number, one in asked:
            if one.arrives == step:
                request_id = engine.add_request(list(one.prompt), one.params)
                ids[request_id] = number
                if one.aborted is not None:
                    ends[request_id] = one.aborted
        for request_id in [r for r, when in ends.items() if when == step and r not in done]:
            with suppress(ValueError):  # it has ended
                done[request_id] = engine.abort(request_id)
        done |= {output.request_id: output for output in engine.step()}
        step += 1
        assert step < 5000, "the engine does not drain"
    return [(ids[key], output) for key, output in done.items() if ids[key] >= 0]


PACKAGE = Path(tinyspec.__file__).parent
REFUSALS = (DeterminismError, UnsupportedModelError, UnsupportedEnvironmentError)


def refused(error: Exception) -> bool:
    """Whether an error is an answer: one of the package's own, or a ValueError that it raises."""
    if not isinstance(error, ValueError):
        return isinstance(error, REFUSALS)
    raised = traceback.extract_tb(error.__traceback__)[-1].filename
    return Path(raised).is_relative_to(PACKAGE)


class Run:
    """Carries a run out and judges it. findings: broken promises. counts: what it has compared;
    refusals: why it was refused."""

    def __init__(self, draw: RunDraw):
        self.draw = draw
        self.findings: list[str] = []
        self.counts: Counter[str] = Counter()
        self.refusals: list[str] = []
        self._ledger = Ledger()
        self._truths: list[list[int]] = []

    def carry_out(self) -> None:
        """Alone undisturbed, alone disturbed, and in the crowd."""
        draw, before, threads = self.draw, ambient.state(), torch.get_num_threads()
        torch.set_num_threads(draw.threads)
        try:
            self._attempt(lambda: self._alone(None), disturbed=False)
            if draw.influence is not None:
                self._attempt(lambda: self._alone(draw.influence), disturbed=True)
            self._attempt(self._crowd, disturbed=draw.influence is not None)
        finally:
            torch.set_num_threads(threads)
        after = ambient.state()
        assert after == before, f"left behind: {after} instead of {before}"

    def _attempt(self, part: Callable[[], None], disturbed: bool) -> None:
        """Run a part; a refusal is an answer, but not where nothing disturbs; nothing else is."""
        try:
            part()
        except Exception as error:
            if not refused(error):
                line = traceback.extract_tb(error.__traceback__)[-1]
                found = f"{type(error).__name__}: {error} ({line.filename}:{line.lineno})"
                self.findings.append(found)
                return
            self.counts["refused"] += 1
            self.refusals.append(str(error))
            if not disturbed:
                self.findings.append(f"refused though nothing disturbs: {error}")

    def _alone(self, influence: Influence | None) -> None:
        where = "alone" if influence is None else "alone and disturbed"
        outputs = alone(self.draw, influence)
        if influence is None:
            for n, output in outputs:
                follows = output.completions[0].token_ids
                self._truths.append([*self.draw.needles[n].prompt, *follows])
        self.judge(outputs, where)

    def _crowd(self) -> None:
        found: list[tuple[str, Outputs]] = []
        try:
            crowd(self.draw, self._truths, found)
        finally:
            for where, outputs in found:
                self.judge(outputs, where)

    def judge(self, outputs: Outputs, where: str) -> None:
        """Compare outputs with those known under their fingerprint."""
        for number, output in outputs:
            self.counts["outputs"] += 1
            if failed := failure(output):
                self.findings.append(f"request {number} failed {where}: {failed}")
                continue
            self.counts["noticed"] += noticed(output)
            self.counts["compared"] += self._ledger.knows(number, output)
            if found := self._ledger.add(number, output, where):
                self.findings.append(found)


def run(draw: RunDraw) -> Run:
    """Carry out one run."""
    found = Run(draw)
    found.carry_out()
    return found


def command(draw: RunDraw) -> str:
    """What to type to have this run again; a run of chosen classes is one of the controls'."""
    return f"pytest 'tests/fuzz/test_fuzz.py::test_fuzz[{draw.number}]' -m slow --seed {draw.seed}"
