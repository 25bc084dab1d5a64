"""What keeps the promise against each class of influences, and how it is taken back for a test.

Names are looked up when they are taken back: a name that is gone fails the control, not the import.
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


def _rows_alone(rows: int, group: int, least: int) -> int:
    """Query rows in multiples of four, whatever the group of heads."""
    unit = 4 // gcd(group, 4)
    count = max(rows, -(-least // group))
    step = max(unit, 1 << max(0, count.bit_length() - 2))
    return -(-count // step) * step * group


STATE, SETTINGS = "tinyspec.model.torch_state:", "tinyspec.model.torch_settings:"
PRINT, TWINS = "tinyspec.determinism.fingerprint:", "tinyspec.kernels.twins."
MENDS = {
    # The default dtype changes nothing by itself any more: new tensors name theirs.
    "settings of the process": Mend(
        ("mkldnn matmul precision", "mkldnn off", "default dtype"),
        {SETTINGS + "_of_process": _returns(())},
    ),
    "settings of a thread": Mend(("flush denormal",), {SETTINGS + "_of_thread": _returns(())}),
    "modes": Mend(
        ("function mode", "dispatch mode", "default device"),
        {STATE + "without_modes": nullcontext},
    ),
    "autocast in a forward": Mend(
        ("forward with autocast", "layer with autocast"),
        # The code of a forward is in the fingerprint as well.
        {
            "tinyspec.determinism.contract:refuse_autocast": _nothing,
            PRINT + "functions": _returns({}),
        },
    ),
    "canary": Mend(
        ("ONEDNN_DEFAULT_FPMATH_MODE=BF16", "MKL_CBWR=COMPATIBLE"),
        {PRINT + "canary": _returns("")},
    ),
    "looks between steps": Mend(
        ("parameter replaced", "epsilon", "activation replaced", "inference weights written"),
        {"tinyspec.engine.request_tracker:RequestTracker._check_before_pass": _nothing},
    ),
    "adapters between steps": Mend(
        ("adapter switched", "adapters disabled", "adapter scaled"),
        {"tinyspec.engine.request_tracker:RequestTracker._check_before_pass": _nothing},
    ),
    "modules in the fingerprint": Mend(
        ("activation replaced",), {PRINT + "functions": _returns({})}
    ),
    "numbers of modules in the fingerprint": Mend(
        ("number of a module",),
        {PRINT + "_attention": _returns([]), PRINT + "function_settings": _returns({})},
    ),
    "what is not finite": Mend(
        ("NaN out of sight",), {TWINS + "attention_tiles:all_finite": _returns(True)}
    ),
    "heights of blocks of query rows": Mend(
        ("odd groups of heads",), {TWINS + "attention_plan:padded_queries": _rows_alone}
    ),
}


def take_back(name: str, patches: pytest.MonkeyPatch) -> None:
    """Take a mend back; facts that are found without it are kept by nobody else."""
    kept: dict[str, Any] = {}
    cache = import_module("tinyspec.determinism.probe_cache")
    patches.setattr(cache, "load", kept.get)
    patches.setattr(cache, "store", kept.__setitem__)
    for place, instead in MENDS[name].patches.items():
        module, _, path = place.partition(":")
        owner: Any = import_module(module)
        *parents, own = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        patches.setattr(owner, own, instead)
