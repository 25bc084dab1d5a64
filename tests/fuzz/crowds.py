"""The requests of a run, alone on a new engine and in a crowd on another, with its influence begun
and ended at its points. Compares nothing.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from tests.fuzz.draws import LENGTH, Asked, Point, RunDraw, drafter_of, rng_of
from tests.fuzz.influences import Influence, Scene, Undo, begin
from tests.fuzz.models import fresh
from tinyspec import Engine, EngineConfig, RequestOutput, SamplingParams

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
