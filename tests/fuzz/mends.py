"""What keeps the promise against each class of influences, and how it is taken back for a test.

``MENDS`` has the controls. Names are looked up when they
are taken back: a name that is gone fails the control, not the import.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from math import gcd
from typing import Any

import pytest


@dataclass(frozen=True)
class Mend:
    """classes: influences that are found without it. patches: "module:name" and what stands there
    instead."""

    classes: tuple[str, ...]
    patches: dict[str, Any]


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _returns(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


_yes = _returns(True)


def _rows_alone(rows: int, group: int, least: int) -> int:
    """Query rows in multiples of four, whatever the group of heads."""
    unit = 4 // gcd(group, 4)
    count = max(rows, -(-least // group))
    step = max(unit, 1 << max(0, count.bit_length() - 2))
    return -(-count // step) * step * group


STATE, SETTINGS = "tinyspec.model.torch_state:", "tinyspec.model.torch_settings:"
PRINT, TWINS = "tinyspec.determinism.fingerprint:", "tinyspec.kernels.twins."
CONTRACT, PROOF = "tinyspec.determinism.contract:", "tinyspec.determinism.proof:"
TRACKER = "tinyspec.engine.request_tracker:RequestTracker."
MENDS = {
    "settings of the process": Mend(
        ("mkldnn matmul precision", "mkldnn off", "matmul precision"),
        {SETTINGS + "_of_process": _returns(())},
    ),
    "settings of a thread": Mend(
        ("flush denormal", "autocast", "rounding mode"), {SETTINGS + "_of_thread": _returns(())}
    ),
    "modes": Mend(
        ("function mode", "dispatch mode", "default device"),
        {STATE + "without_modes": nullcontext},
    ),
    "autocast in a forward": Mend(
        ("forward with autocast", "layer with autocast"),
        # The code of a forward is in the fingerprint as well, and so are hooks on all modules.
        {PROOF + "refuse_autocast": _nothing, PRINT + "functions": _returns({})},
    ),
    "hooks on all modules": Mend(
        ("hook of all modules",),
        {CONTRACT + "refuse_unpinnable": _nothing, PRINT + "functions": _returns({})},
    ),
    "threads in the fingerprint": Mend(
        ("threads",), {PRINT + "environment": _returns({}), PRINT + "canary": _returns("")}
    ),
    "threads between steps": Mend(
        ("threads",),
        {
            CONTRACT + "Contract.threads": None,
            CONTRACT + "Contract._follow_process": _nothing,
        },
    ),
    "looks between steps": Mend(
        (
            *("parameter written", "parameter's data replaced", "weights loaded"),
            *("inference weights written", "adapter merged"),
        ),
        {TRACKER + "_look": _yes, TRACKER + "_look_at_digests": _yes},
    ),
    "what an engine is told": Mend(
        ("data written and told",), {"tinyspec.engine.engine:Engine.weights_changed": _nothing}
    ),
    "the outline": Mend(("buffer written",), {"tinyspec.model.outline:Outline.changed": _nothing}),
    # What the engine's own modules have for themselves is changed between steps by nobody.
    "modules in the fingerprint": Mend(
        ("activation replaced",), {PRINT + "functions": _returns({})}
    ),
    "numbers of modules in the fingerprint": Mend(
        ("number of a module", "epsilon"),
        {PRINT + "_attention": _returns([]), PRINT + "function_settings": _returns({})},
    ),
    "the config in the fingerprint": Mend(
        ("number of the config",),
        {
            PRINT + "_config": _returns({}),
            PRINT + "_attention": _returns([]),
            PRINT + "function_settings": _returns({}),
        },
    ),
    "digest of weights": Mend(("module replaced",), {CONTRACT + "digest_weights": _returns("")}),
    # Which adapters a layer has in use, and how large, are attributes of the layer.
    "adapters in the fingerprint": Mend(
        ("adapter switched", "adapters disabled", "adapter scaled"),
        {PRINT + "function_settings": _returns({})},
    ),
    "strides in the fingerprint": Mend(
        ("weights transposed in memory",), {PRINT + "_strides": _nothing}
    ),
    "facts by layout": Mend(
        ("weights misaligned", "weights transposed in memory"),
        {CONTRACT + "layouts": _returns({})},
    ),
    "proof on weights of its own": Mend(
        ("weights loaded over zeros", "weights loaded over identities"),
        {"tinyspec.model.scratch_weights:ScratchModel.in_place": lambda _: nullcontext()},
    ),
    "what is not finite": Mend(("NaN out of sight",), {TWINS + "attention:all_finite": _yes}),
    "heights of blocks of query rows": Mend(
        ("odd groups of heads",), {TWINS + "attention_plan:padded_queries": _rows_alone}
    ),
}


# Classes that no control reports; tinyspec/determinism/README.md says why.
SILENT = {
    *("buffer replaced", "parameter replaced", "training mode", "grad mode", "default dtype"),
    "deterministic algorithms",
    *("memory full of NaN", "flash attention off", "global random state", "busy thread"),
    *("engine in another thread", "earlier allocations", "one core"),
}


def take_back(name: str, patches: pytest.MonkeyPatch) -> None:
    """Take a mend back; facts that are found without it are kept by nobody else."""
    kept: dict[str, Any] = {}
    cache = import_module("tinyspec.determinism.results")
    patches.setattr(cache, "load", kept.get)
    patches.setattr(cache, "store", kept.__setitem__)
    for place, instead in MENDS[name].patches.items():
        module, _, path = place.partition(":")
        owner: Any = import_module(module)
        *parents, own = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        patches.setattr(owner, own, instead)
