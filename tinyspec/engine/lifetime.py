"""How long an engine has its model: until it is closed, taken over or collected.

The model keeps a record of what was done to it (``PatchedModel``), which outlives an engine that
was dropped or whose closing was cut off; from it the model is restored. Knows no request but how
many are unfinished.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self
from weakref import finalize, ref

from transformers import PreTrainedModel

from tinyspec.determinism.contract import Contract
from tinyspec.engine.core import EngineCore
from tinyspec.engine.lock import OneProcess, between_steps
from tinyspec.engine.refusals import idle
from tinyspec.engine.request_tracker import RequestTracker
from tinyspec.errors import refuse
from tinyspec.model.install import record_of, refuse_served, uninstall
from tinyspec.model.patched_model import PatchedModel
from tinyspec.runner.model_runner import ModelRunner

logger = logging.getLogger("tinyspec")


class Lifetime(OneProcess):
    """Base of an engine.

    closed: why the engine is no more, None while it is open. suspended: the model is its own until
    ``resume``. exclusive: no other engine takes the model over.
    """

    model: PreTrainedModel
    patched: PatchedModel
    runner: ModelRunner
    contract: Contract
    core: EngineCore
    tracker: RequestTracker
    closed: str | None = "not finished"
    exclusive = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def suspended(self) -> bool:
        return self.tracker.suspended

    def close(self) -> None:
        """Abort what is unfinished, give the memory back and the model its own attention. Where it
        was cut off, another call, ``unpatch`` or another Engine does the rest.

        Raises RuntimeError where code of the user's that a step calls asks for it.
        """
        self._end("closed")

    def _keep(self, patched: PatchedModel) -> None:
        """Give the model back when the engine is collected."""
        self.patched = patched
        # Only what the model keeps anyway may be kept by this.
        finalize(self, _give_back, ref(patched)).atexit = False

    @between_steps()
    def _end(self, why: str) -> None:
        if self.closed is None:
            with self.lock("close"):
                self._end_locked(why)
        elif record_of(self.model) is self.patched:  # it was cut off
            uninstall(self.model, self.patched)

    def _end_locked(self, why: str) -> None:
        if self.closed is not None:  # by another thread
            return
        try:
            self.tracker.close(why)
            self.core.drain()
            self.runner.release()
            self.contract.rest()
        finally:
            self.closed = why
            uninstall(self.model, self.patched)

    def _refuse_closed(self) -> None:
        if self.closed is not None:
            raise idle(self.closed)

    def _refuse_unfinished(self, what: str) -> None:
        """Raise ValueError for ``what`` neither a closed nor a running engine does."""
        self._refuse_closed()
        self.tracker.apply_asked()
        if unfinished := len(self.tracker.requests):
            raise refuse(what, f"{unfinished} unfinished requests", "none")
        self.core.drain()


def _give_back(record: ref[PatchedModel]) -> None:
    if (patched := record()) is not None:
        uninstall(patched.model, patched)


@contextmanager
def taken_over(model: PreTrainedModel) -> Iterator[None]:
    """Close the engine that serves ``model``, if there is one, or undo what is left of it, before
    the block, which makes another one. Where that fails, the one that is closed says so.

    Raises ValueError where it has unfinished requests, and for a patched model.
    """
    before = _take_over(model)
    try:
        yield
    except BaseException:
        if before is not None:
            why = "closed for another Engine, which could not be made"
            before.closed = before.tracker.closed = why
            logger.warning("no other Engine could be made: none serves %s", type(model).__name__)
        raise


def _take_over(model: PreTrainedModel) -> Lifetime | None:
    """The engine that was closed."""
    record = record_of(model)
    owner: Any = None if record is None or record.owner is None else record.owner()
    if owner is None:  # ``install`` undoes or refuses what there is
        return None
    if owner.exclusive:
        refuse_served(model)
    if owner.closed is not None:  # it was interrupted while it was made, or closed
        uninstall(model, record)
        return None
    with owner.lock("Engine"):
        if unfinished := len(owner.tracker.requests):
            raise ValueError(
                f"model is not allowed: another Engine serves it and has {unfinished} unfinished "
                "requests; finish them, or call tinyspec.unpatch(model), first"
            )
        name = type(model).__name__
        logger.warning("another Engine takes over %s; the one before is closed", name)
        owner._end("closed: another Engine took over its model")
    return owner  # type: ignore[no-any-return]


def restore(model: PreTrainedModel) -> None:
    """Close whichever engine serves ``model``; undo what is left where there is none."""
    record = record_of(model)
    owner: Any = None if record is None or record.owner is None else record.owner()
    if owner is not None and owner.closed is None:
        owner._end("closed: its model was unpatched")
    uninstall(model)
