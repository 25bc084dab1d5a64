"""A proof that is under way: others may use the engine between its passes, and where they change
what it is of it is made again. Knows no requests, and nothing of what is proven.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import get_ident
from typing import TypeVar

from tinyspec.errors import DeterminismError
from tinyspec.interrupts import flush
from tinyspec.model.torch_settings import moved, moves, pin_process
from tinyspec.runner.model_runner import ModelRunner

# Of one during which others change what it is of.
MOST_PROOFS = 10
# What is called between two passes of a proof, with a block in which it has put its things aside.
Meanwhile = Callable[[AbstractContextManager[None]], object]
T = TypeVar("T")


class _Stale(Exception):
    """What a proof finds is not what holds now."""


class _Ended(Exception):
    """Of what was raised between two passes, which is no fault of the proof's."""


class Proving:
    """Of one engine, of which one proof is under way at a time.

    others: lets them use the engine. threads: of calls that may have a proof under way, or wait for
    one.
    """

    def __init__(self, runner: ModelRunner):
        self._runner = runner
        self.others: Meanwhile | None = None
        self.threads: list[int] = []
        self._meanwhile: Meanwhile | None = None
        self._own: object | None = None  # the proof

    @property
    def under_way(self) -> bool:
        return self._own is not None

    def drop(self) -> None:
        """What it is of has changed."""
        self._own = None

    @contextmanager
    def pausing(self, meanwhile: Meanwhile | None = None) -> Iterator[None]:
        """A block, where nothing is half done, between the passes of whose proofs others use the
        engine, by ``meanwhile``."""
        self._meanwhile = meanwhile or self.others
        self.threads.append(own := get_ident())
        try:
            yield
        finally:
            self.threads.remove(own)
            self._meanwhile = None

    def wait(self) -> None:
        """Let other calls prove what they need to begin; in a turn."""
        while self.threads and self.others is not None:
            self.others(nullcontext())
            flush()

    def again(self, proof: Callable[[], T]) -> T:
        """What a proof finds; one during which others changed what it is of means nothing, and is
        made again. Another one that is under way is waited for."""
        for _ in range(MOST_PROOFS):
            while self.under_way and self._meanwhile is not None:
                self._let(self._meanwhile, nullcontext())
                flush()
            try:
                return proof()
            except _Stale as error:
                what = error
            except _Ended as ended:
                raise ended.args[0] from None
        raise DeterminismError(
            f"{what} during each of {MOST_PROOFS} proofs, by another thread or by the model's own "
            "forward; deterministic=True needs it left alone"
        )

    def run(self, proof: Callable[[Meanwhile], T]) -> T:
        """What ``proof`` finds, called with what is to be called between its passes; within
        ``again``."""
        own = self._own = object()
        settings = 0

        def refuse_stale() -> None:
            if self._own is not own:
                raise _Stale("the model or the process changed")
            if (setting := moved(settings)) is not None:
                raise _Stale(f"torch's {setting} was set")

        def pause(aside: AbstractContextManager[None]) -> None:
            nonlocal settings
            if self._meanwhile is not None:
                refuse_stale()
                try:
                    self._let(self._meanwhile, aside)
                except Exception as error:
                    raise _Ended(error) from None
                pin_process()
                settings = moves()
                refuse_stale()

        try:
            with self._runner.torch_state():
                settings = moves()
                try:
                    found = proof(pause)
                except Exception:
                    refuse_stale()  # which it may follow from
                    raise
                refuse_stale()
            return found
        finally:
            if self._own is own:
                self._own = None

    def _let(self, meanwhile: Meanwhile, aside: AbstractContextManager[None]) -> None:
        """Let others use the engine, and prove, where they may not wait for this one."""
        self._meanwhile = None
        try:
            meanwhile(aside)
        finally:
            self._meanwhile = meanwhile
