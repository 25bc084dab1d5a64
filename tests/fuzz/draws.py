"""What one run of the fuzzer consists of: everything is drawn from its seed and its number.

Knows models, requests and settings by name; makes and runs nothing.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from transformers import PreTrainedModel

from tests.fuzz.influences import BUILD, CALLS, CODE, PROOF, STEPS, TABLE, Influence
from tests.fuzz.models import POISON, SPECIAL, VOCAB, ModelDraw, draw_model, larger, pristine
from tests.support.mixes import HalfLiar, Liar
from tinyspec import SamplingParams
from tinyspec.model.supported import recurrent_layers

LENGTH = 256
# Runs that share a stock of models: facts about a model are found once.
BLOCK, STOCK = 48, 12
# (stage, step): when something happens. Stages: before the engine is made, before the first
# deterministic request, before the crowd, before the second call; steps are those of the crowd.
Point = tuple[int, int]
STAGES = {BUILD: 0, PROOF: 1, CALLS: 2}
LAST: Point = (9, 0)


@dataclass(frozen=True)
class Asked:
    """One request. arrives: the step of the crowd at which it is added. aborted: at which it is
    ended, None: not."""

    prompt: tuple[int, ...]
    params: SamplingParams
    arrives: int = 0
    aborted: int | None = None


@dataclass(frozen=True)
class RunDraw:
    """One run: a model, requests that ask for determinism and others, settings, an influence.

    stepping: the crowd is added between steps instead of given to ``generate``. enter, leave: when
    the influence begins and ends. inside: it begins in a function of the user, within a step.
    """

    seed: str
    number: int
    classes: tuple[str, ...]
    model: ModelDraw
    reference_rows: int
    linear: str
    threads: int
    needles: tuple[Asked, ...]
    others: tuple[Asked, ...]
    settings: dict[str, Any] = field(hash=False)
    drafter: str | None
    stepping: bool
    influence: Influence | None
    enter: Point
    leave: Point
    inside: bool


def rng_of(*words: object) -> random.Random:
    """A generator for a part of a run."""
    return random.Random(" ".join(map(str, words)))


@lru_cache(maxsize=4)
def _stock(seed: str, block: int) -> tuple[ModelDraw, ...]:
    rng = rng_of(seed, "stock", block)
    return tuple(draw_model(rng) for _ in range(STOCK))


def _model_for(rng: random.Random, seed: str, number: int, influence: Influence) -> ModelDraw:
    """A model of the stock that has what is changed, or another one."""
    only = influence.only
    if influence.also and rng.random() < 0.5:
        only = rng.choice(influence.also)
    if not (only or influence.flavour):
        stock = [draw for draw in _stock(seed, number // BLOCK) if draw.kind not in SPECIAL]
        for drawn in rng.sample(stock, len(stock)):
            if influence.applies(pristine(drawn)):
                return drawn
    for _ in range(100):
        drawn = draw_model(rng, only, influence.flavour)
        special = drawn.kind in SPECIAL and drawn.kind != only
        if not special and influence.applies(pristine(drawn)):
            return drawn
    raise AssertionError(f"no model for {influence.name}")


def draw(seed: str, number: int, classes: Collection[str] = ()) -> RunDraw:
    """Run ``number`` of ``seed``. classes: names of the influences to choose from; by default half
    of the runs have one."""
    classes = tuple(sorted(classes))
    rng = rng_of(seed, number, *classes)
    influence = None
    if classes:
        influence = TABLE[rng.choice(classes)]
    elif rng.random() < 0.5:
        entries = list(TABLE.values())
        influence = rng.choices(entries, [entry.weight for entry in entries])[0]
    if influence is not None:
        model = _model_for(rng, seed, number, influence)
    else:
        model = rng.choice(_stock(seed, number // BLOCK))
    reference_rows = rng.choice((8, 16))
    where = rng.choice(influence.where) if influence else ""
    stepping = where in (STEPS, CODE) or rng.random() < 0.6
    enter = STAGES.get(where, 2), rng.randint(1, 8) if where in (STEPS, CODE) else 0
    return RunDraw(
        seed=seed,
        number=number,
        classes=classes,
        model=model,
        reference_rows=reference_rows,
        linear=rng.choice((*["auto"] * 6, "always")),
        threads=2 if rng.random() < 0.1 else 1,
        needles=_needles(rng, model.flavour == "poisoned", stepping),
        others=_others(rng, stepping),
        settings=_settings(rng, reference_rows)
        | {"overlap": rng_of(seed, number, "overlap").random() < 0.4},
        drafter=_drafter(rng, rng_of(seed, number, "assistant")),
        stepping=stepping,
        influence=influence,
        enter=enter,
        leave=_leave(rng, enter, stepping),
        inside=where == CODE,
    )


def _drafter(rng: random.Random, assistant: random.Random) -> str | None:
    other = rng.choice((None, None, "ngram", "liar", "half a liar"))
    return "assistant" if assistant.random() < 0.2 else other


def _leave(rng: random.Random, enter: Point, stepping: bool) -> Point:
    """Some later point; half of the time the end."""
    later = [(stage, 0) for stage in (1, 2, 3) if (stage, 0) > enter]
    if stepping:
        later += [(2, step) for step in range(1, 10) if (2, step) > enter]
    return rng.choice(later) if later and rng.random() < 0.5 else LAST


def _needles(rng: random.Random, poisoned: bool, stepping: bool) -> tuple[Asked, ...]:
    found = []
    for _ in range(rng.randint(2, 4)):
        prompt = _prompt(rng, poisoned)
        found.append(Asked(prompt, _style(rng, len(found)), *_times(rng, stepping, 0.1)))
    if len(found[-1].prompt) > 20 and rng.random() < 0.5:  # shares pages with the prefix cache
        last = found[-1]
        found.append(Asked((*last.prompt[:-3], 7), last.params, *_times(rng, stepping, 0.1)))
    return tuple(found)


def _prompt(rng: random.Random, poisoned: bool) -> tuple[int, ...]:
    """Tokens but for the poisoned one; where that is asked for it is the first, out of sight."""
    # Attention works in tiles of 128 tokens.
    length = rng.choice(
        (1, 2, 7, 17, rng.randint(3, 70), rng.randint(3, 70), rng.randint(125, 190))
    )
    if poisoned:
        length = rng.choice((60, 130, rng.randint(40, 190), rng.randint(140, 170)))
    tokens = [rng.randrange(VOCAB) for _ in range(length)]
    tokens = [POISON + 1 if token == POISON else token for token in tokens]
    if poisoned and rng.random() < 0.8:
        tokens[0] = POISON
    return tuple(tokens)


def _style(rng: random.Random, number: int) -> SamplingParams:
    """Deterministic, in every way of sampling."""
    sampled: dict[str, Any] = {}
    if rng.random() < 0.5:
        sampled = {"temperature": rng.choice((0.3, 0.8, 1.4)), "seed": rng.randrange(1 << 40)}
        sampled |= rng.choice(({}, {"top_k": 9}, {"top_p": 0.8}, {"min_p": 0.05}))
        sampled["num_return_sequences"] = rng.choice((1, 1, 2))
    more = rng.choice(
        (
            *({}, {}, {"repetition_penalty": 1.2}),
            *({"stop_token_ids": (3, 90)}, {"prompt_logprobs": True}),
        )
    )
    tokens = rng.randint(2, 14)
    return SamplingParams(
        max_new_tokens=tokens,
        min_new_tokens=rng.choice((0, 0, min(3, tokens))),
        deterministic=True,
        logprobs=True,
        top_logprobs=rng.choice((0, 2)),
        logprobs_mode=rng.choice(("processed", "raw")),
        ignore_eos=True,
        **sampled,
        **more,
    )


def _times(rng: random.Random, stepping: bool, aborted: float) -> tuple[int, int | None]:
    arrives = rng.choice((0, 0, rng.randint(0, 6))) if stepping else 0
    ends = stepping and rng.random() < aborted
    return arrives, arrives + rng.randint(1, 6) if ends else None


def _others(rng: random.Random, stepping: bool) -> tuple[Asked, ...]:
    """Plain requests of every kind."""
    found = []
    for _ in range(rng.choice((0, 1, 3, 6))):
        prompt = tuple(rng.randrange(POISON + 1, VOCAB) for _ in range(rng.randint(1, 60)))
        params = SamplingParams(
            max_new_tokens=rng.randint(1, 12),
            temperature=rng.choice((0.0, 0.9)),
            seed=rng.randrange(1000),
            num_return_sequences=rng.choice((1, 1, 2)),
        )
        found.append(Asked(prompt, params, *_times(rng, stepping, 0.2)))
    return tuple(found)


def _settings(rng: random.Random, reference_rows: int) -> dict[str, Any]:
    """Settings of an engine that must not change a bit."""
    page_size = rng.choice((8, 16, 32, 128))
    tight = rng.random() < 0.3
    return {
        "max_rows": rng.choice((reference_rows, 40)),
        "max_sequences": rng.choice((1, 3, 8, 40)),
        "page_size": page_size,
        "num_pages": -(-LENGTH // page_size) * (1 if tight else 12),
        "draft_window": rng.choice((1, 2, 5, 16)),
        "verify": rng.choice(("auto", "auto", "always", "padded")),
        "prefix_cache": rng.random() < 0.7,
        "verify_weights": rng.random() < 0.1,
    }


def drafter_of(draw: RunDraw, truths: list[list[int]]) -> Any:
    """The drafter of a run; truths: the sequences that follow in truth."""
    if draw.drafter == "liar":
        return Liar(draw.number)
    if draw.drafter == "half a liar":
        return HalfLiar(truths, draw.number)
    if draw.drafter == "assistant":  # with the same weights, or where that may not be without
        other = copy.deepcopy(pristine(draw.model))
        if isinstance(other, PreTrainedModel) and not recurrent_layers(other):
            return other
        return larger("llama", draw.number)
    return draw.drafter
