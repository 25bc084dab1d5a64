"""Why an engine does not go on: itself, or the thread that calls, is not what it was."""

from __future__ import annotations

from collections.abc import Iterable
from threading import get_ident

import torch

from tinyspec.errors import refuse
from tinyspec.scheduler.request import Request


def refuse_other_number(requests: Iterable[Request]) -> None:
    """In a thread for which torch computes with another number of threads than before: raise
    ValueError where it is not the caller of ``requests``, whose bits depend on that number."""
    asking = [request.thread for request in requests if request.params.deterministic]
    if asking and get_ident() not in asking:
        raise ValueError(
            f"torch computes with {torch.get_num_threads()} threads in this thread of Python, and "
            "with another number in those whose deterministic requests are unfinished; call "
            "torch.set_num_threads with the same number in all that use the engine"
        )


def idle(closed: str) -> ValueError:
    """Of an engine that runs nothing; closed: why."""
    return refuse("engine", closed, "an engine that is open")
