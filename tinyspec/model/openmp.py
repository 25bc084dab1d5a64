"""The OpenMP threads that torch computes with: how many run, how they round and treat subnormals.

Asks the library that torch is linked with, by GNU's names (GCC's and LLVM's OpenMP have them).
Where it is another one, torch's own number of threads is all that is known. Knows no passes.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch

# Bytes that hold C's ``fenv_t`` and ``sem_t``, and FE_DFL_ENV: nothing taken for zero, rounding to
# nearest.
_ROOM, _DEFAULT = 256, ctypes.c_void_p(-1)
_SMALLEST, _ONE = 5e-324, 1.0


def flushes() -> bool:
    """Whether the calling thread takes subnormal numbers for zero: ``torch.set_flush_denormal``,
    which has no getter."""
    return _SMALLEST * _ONE == 0.0


@cache
def _function(name: str) -> Any:
    """A C function of the libraries that torch is linked with; None where there is none."""
    folder = Path(torch.__file__).parent / "lib"
    for library in folder.glob("libtorch_cpu.*"):
        # Loaded already: its names and those of what it is linked with are looked up.
        return getattr(ctypes.PyDLL(str(library)), name, None)
    return None


def rounding_mode() -> int:
    """How the calling thread rounds, as C's ``fegetround``: 0 to nearest, where it can be asked."""
    asked = _function("fegetround")
    return 0 if asked is None else asked()


def set_rounding_mode(mode: int) -> None:
    """Set it, where ``rounding_mode`` can tell."""
    if (function := _function("fesetround")) is not None:
        function(mode)


def is_dynamic() -> bool:
    """Whether OpenMP chooses the number of the calling thread's workers by load (OMP_DYNAMIC)."""
    asked = _function("omp_get_dynamic")
    return asked is not None and bool(asked())


def set_dynamic(dynamic: bool) -> None:
    """Set it, where ``is_dynamic`` can tell."""
    if (function := _function("omp_set_dynamic")) is not None:
        function(int(dynamic))


def settle() -> int:
    """How many threads run torch's parallel loops that the calling thread begins, itself included:
    a limit (OMP_THREAD_LIMIT, OMP_MAX_ACTIVE_LEVELS) may leave fewer than torch asks for.

    Workers that take subnormal numbers for zero, or round otherwise than to nearest, because the
    thread that began them did, no longer do afterwards. Takes 10 microseconds with two threads, as
    they run functions of C alone: one of Python would wait until no other thread runs Python.
    """
    names = "GOMP_parallel", "sem_init", "sem_post", "sem_getvalue", "fegetenv", "fesetenv"
    asked, functions = torch.get_num_threads(), [_function(name) for name in names]
    if asked == 1 or not all(functions):
        return asked
    parallel, init, post, value, get, set_ = functions
    counter, own = (ctypes.create_string_buffer(_ROOM) for _ in range(2))
    running, dynamic = ctypes.c_int(), is_dynamic()
    if dynamic:
        set_dynamic(False)
    init(counter, 0, 0)
    get(own)
    parallel(post, counter, 0, 0)  # each thread counts itself
    parallel(set_, _DEFAULT, 0, 0)
    set_(own)
    value(counter, ctypes.byref(running))
    if dynamic:
        set_dynamic(True)
    return running.value


def release() -> None:
    """End the workers that the calling thread has begun; its next parallel loop begins others.

    For a thread that leaves the passes to another one: GNU's workers go to sleep at once after
    every loop while all threads together have more of them than there are processors.
    """
    soft = 1  # what OpenMP knows of the thread stays
    if (pause := _function("omp_pause_resource_all")) is not None:
        pause(soft)


def shortage() -> str | None:
    """Why products on a CPU would be wrong here; None where they are not.

    oneDNN cuts its work for as many threads as torch asks for, and what the missing ones would
    compute is left out (seen with torch 2.13: NaN).
    """
    asked, running = torch.get_num_threads(), settle()
    if running == asked:
        return None
    return (
        f"OpenMP runs {running} of the {asked} threads that torch asks for (OMP_THREAD_LIMIT, "
        "OMP_MAX_ACTIVE_LEVELS), and oneDNN leaves out what the others would compute; call "
        f"torch.set_num_threads({running})"
    )
