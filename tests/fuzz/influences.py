"""Everything outside a request that the fuzzer may change, one row of ``TABLE`` each.

An influence is begun at some point of a run and may be ended at a later one. Nothing here knows
what must follow from it: ``runs.py`` compares bits and fingerprints.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from tests.fuzz import ambient, changes
from tests.fuzz.models import ModelDraw, pristine

Undo = Callable[[], object]


@dataclass
class Scene:
    """What an influence acts on. engine: None before there is one. rng: the same draws for each
    model that the influence of a run is begun on."""

    draw: ModelDraw
    model: Any
    rng: random.Random
    engine: Any = None

    @property
    def pristine(self) -> Any:
        """The model as it was drawn."""
        return pristine(self.draw)


# Points of a run at which an influence may begin.
BUILD, PROOF, CALLS, STEPS, CODE = "build", "proof", "calls", "steps", "code"
ANYWHERE = (BUILD, PROOF, CALLS, STEPS)
# Also within a step, by a function of the user.
EVEN_INSIDE = (*ANYWHERE, CODE)


@dataclass(frozen=True)
class Influence:
    """One influence from outside.

    begin: starts it; returns how it ends, or None: a change of the model, which lasts. where: when
    it may begin. only, flavour: which models it needs. also: kinds of models of which half of its
    runs have one. prepare: what is done to the model before an engine gets it. applies: whether a
    model has what is changed.
    """

    name: str
    begin: Callable[[Scene], Undo | None]
    where: tuple[str, ...] = ANYWHERE
    only: str = ""
    flavour: str = ""
    also: tuple[str, ...] = ()
    prepare: Callable[[Any], None] | None = None
    applies: Callable[[Any], bool] = lambda model: True
    # How often it is drawn, compared with the others.
    weight: float = 1.0


def context(name: str, make: Callable[[Scene], AbstractContextManager[Any]]) -> Influence:
    """An influence that lasts while a context manager is entered."""

    def begin(scene: Scene) -> Undo:
        manager = make(scene)
        manager.__enter__()
        return lambda: manager.__exit__(None, None, None)

    return Influence(name, begin)


def setting(name: str, **more: Any) -> Influence:
    """An influence that gives a setting one of its values; what it had before comes back."""
    put, get, values = ambient.SETTINGS[name]

    def begin(scene: Scene) -> Undo:
        before = get()
        put(scene.rng.choice(values))
        return lambda: put(before)

    return Influence(name, begin, **{"where": EVEN_INSIDE, **more})


def change(name: str, act: Callable[[Scene], object], **more: Any) -> Influence:
    """A change of the model that lasts."""

    def begin(scene: Scene) -> None:
        act(scene)

    return Influence(name, begin, **{"where": EVEN_INSIDE, **more})


def _nothing(scene: Scene) -> None:
    """The model alone is the influence."""


def _told(scene: Scene) -> None:
    changes.write_data(scene)
    if scene.engine is not None:
        scene.engine.weights_changed()


TORCH = (
    setting("default dtype", where=ANYWHERE),
    context("default device", lambda scene: torch.device("meta")),  # tensors have no data
    context("autocast", lambda scene: torch.autocast("cpu", scene.rng.choice(ambient.HALVES))),
    setting("flush denormal", flavour="denormal"),
    setting("matmul precision"),
    setting("mkldnn off"),
    setting("mkldnn matmul precision"),
    setting("deterministic algorithms"),
    setting("flash attention off"),
    setting("global random state"),
    setting("threads", only="wide"),
    setting("rounding mode", applies=lambda model: ambient.can_round()),
    context("function mode", lambda scene: ambient.OtherFunctions()),
    context("dispatch mode", lambda scene: ambient.OtherOperators()),
    context("grad mode", lambda scene: ambient.grad_mode(scene.rng)),
    Influence("hook of all modules", lambda scene: ambient.hook_all_modules()),
)
# Of weights that are loaded over others, and of how they lie.
LOAD = changes.load_own_weights
OVER: dict[str, Any] = {"where": (CALLS,), "also": ("one row",), "applies": changes.wide}
LIE: dict[str, Any] = {"where": (BUILD, CALLS, STEPS), "also": ("layout", "wide")}
MODEL = (
    change("parameter written", changes.write_parameter),
    change("parameter replaced", changes.replace_parameter),
    change("parameter's data replaced", changes.replace_data),
    change("data written and told", _told, where=(CALLS, STEPS)),
    change("inference weights written", changes.write_inference, flavour="inference"),
    change("weights loaded", changes.load_weights),
    change("weights loaded over zeros", LOAD, prepare=changes.zeros, **OVER),
    change("weights loaded over identities", LOAD, prepare=changes.identities, **OVER),
    change("weights misaligned", changes.misalign, **LIE),
    change("weights transposed in memory", changes.transpose_memory, **LIE),
    change("buffer written", changes.write_buffer, applies=changes.buffers),
    change("buffer replaced", changes.replace_buffer, applies=changes.buffers),
    change("epsilon", changes.epsilon, applies=changes.epsilons),
    change("number of a module", changes.number, applies=changes.numbers),
    change("number of the config", changes.config_number, applies=changes.config_numbers),
    change("activation replaced", changes.activation, applies=changes.activations),
    change("module replaced", changes.replace_module),
    change("training mode", lambda scene: scene.model.train()),
    change("forward with autocast", changes.autocast_forward, where=(BUILD, PROOF, CALLS)),
    change("layer with autocast", changes.autocast_layer, where=(BUILD, PROOF, CALLS)),
    change("adapter switched", lambda scene: scene.model.set_adapter("other"), only="lora"),
    change("adapters disabled", changes.disable_adapters, only="lora"),
    change("adapter merged", lambda scene: scene.model.merge_adapter(), only="lora"),
    change("adapter scaled", changes.scale_adapter, only="lora"),
)
PROCESS = (
    Influence("busy thread", lambda scene: ambient.busy_thread()),
    Influence("engine in another thread", lambda scene: ambient.engine_in_a_thread()),
    Influence("earlier allocations", lambda scene: ambient.allocate(scene.rng)),
    Influence("memory full of NaN", lambda scene: ambient.poison_memory()),
    setting("one core", where=ANYWHERE),
)
MODELS = (
    Influence("NaN out of sight", _nothing, only="windowed", flavour="poisoned", weight=4),
    Influence("odd groups of heads", _nothing, only="odd heads", weight=2),
)
TABLE = {entry.name: entry for entry in (*TORCH, *MODEL, *PROCESS, *MODELS)}


def begin(influence: Influence, scene: Scene) -> Undo:
    """Begin an influence on a scene; returns how it ends."""
    # A generator of its own: the same draws on whichever model.
    undo = influence.begin(copy.copy(scene))
    return undo or (lambda: None)
