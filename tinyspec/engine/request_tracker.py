"""Requests from submission to their end: queue them, run passes for them, look at the model.

Holds every unfinished request, and drops what was computed with a model that has changed since.
What a request has got so far is in its sequences. Knows no text and no tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from threading import get_ident
from typing import TypeVar

import numpy as np
import torch
from tqdm import tqdm

from tinyspec.determinism.contract import Contract
from tinyspec.determinism.proving import Meanwhile
from tinyspec.engine.core import EngineCore
from tinyspec.engine.driver import Driver
from tinyspec.errors import TinyspecError, named, refuse
from tinyspec.interrupts import between_steps, flush
from tinyspec.scheduler.passes import DRAFT
from tinyspec.scheduler.request import Request, Sequence
from tinyspec.scheduler.step import Step

ASKED = "engine.abort was called for it"
# Passes in a row during which the model or a setting may change.
MOST_UNSOUND = 100
T = TypeVar("T")


class RequestTracker:
    """Unfinished requests of one engine by id; the thread with the turn of ``driver`` runs passes
    for all. queued: those that ``step`` reports at their end. closed: why nothing runs any more.
    All but ``drive``, ``run``, ``cancel``, ``drop``, ``abort`` and ``weights_changed`` is to be
    called in a turn. meanwhile: as of ``Proving.pausing``.
    """

    def __init__(self, core: EngineCore, contract: Contract):
        self.requests: dict[str, Request] = {}
        self.queued: dict[str, Request] = {}
        self.closed: str | None = None
        self.driver = Driver()
        self._core, self._contract = core, contract
        self._dropped: set[str] = set()  # whose end was posted
        self._changes = self._unsound = 0

    def refuse_closed(self) -> None:
        """Raise ValueError for an engine that runs nothing."""
        if self.closed is not None:
            raise refuse("engine", self.closed, "an engine that is open")

    def pause(self, aside: AbstractContextManager[object]) -> None:
        """As ``Driver.pause``. Raises ValueError where the engine was closed meanwhile."""
        self.driver.pause(aside)
        self.refuse_closed()

    def check_model(self) -> None:
        """The look with which a submit begins, digests too. Raises ValueError for an engine that is
        closed, or another number of threads than running requests of others have, and what keeps
        the model as it is now from being served."""
        self.refuse_closed()
        self._contract.refuse_other_number([request.thread for request in self._asking])
        self._refresh(digest=True)

    def _look(self) -> bool:
        """Whether the model is as it was at the last look, and nobody has said otherwise; where
        not, what was computed is dropped."""
        before = self._changes
        self.driver.apply_posts()
        if self._contract.changed():
            with suppress(Exception):  # every request was told
                self._refresh(digest=False)
        return self._changes == before

    def _refresh(self, digest: bool) -> None:
        unseen = digest and self._contract.digests and not self._contract.changed()
        try:
            what = self._contract.refresh(digest)
        except Exception as error:  # there is no copy of the model as it is now
            self._changes += 1
            self._abort(self.requests.values(), _told(error))
            self._core.admission.forget_pages()
            raise
        if what is not None:
            self._start_again(what, unseen)

    def _start_again(self, what: str, unseen: bool = False) -> None:
        """``what`` changed: drop what was computed before. A deterministic request that has begun
        is aborted, and keeps nothing where the change was ``unseen``; the others go on."""
        self._changes += 1
        begun = [request for request in self._asking if request.begun]
        self._abort(begun, f"{what} changed while it was running", unseen)
        self._core.admission.forget_pages()
        self._core.runner.prepacked.forget()
        if self._core.thinker is not None:
            self._core.thinker.forget_states()
        for request in self.requests.values():
            request.forget_prompt()
        self._ensure()

    @property
    def _asking(self) -> list[Request]:
        """The deterministic ones."""
        return [r for r in self.requests.values() if r.params.deterministic]

    def _ensure(self) -> None:
        """After a change: abort deterministic requests where none can be served."""
        if not self._asking:
            return
        try:
            self._contract.ensure()
            fingerprint = self._contract.fingerprint
        except BaseException as error:  # of whatever the model is made of now
            self._abort(self._asking, _told(error))
            if isinstance(error, Exception):
                return
            raise
        for request in self.requests.values():
            request.fingerprint = fingerprint.with_tokenizer(request.tokenizer)

    def weights_changed(self) -> None:
        """Weights were written: drop what was computed with them. ValueError if it is closed."""
        self.driver.check_process()
        self.refuse_closed()
        self.driver.post(self._written)

    def _written(self) -> None:
        if self.closed is None:
            with suppress(Exception):  # every request was told
                self._refresh(digest=False)
                self._contract.weights_changed()
            self._start_again("the weights")

    def add(self, requests: list[Request], meanwhile: Meanwhile | None = None) -> None:
        """Queue requests, after a look in this turn; or DeterminismError, and none is queued."""
        self.refuse_closed()
        fingerprint = self._contract.known_fingerprint
        if any(request.params.deterministic for request in requests):
            with self._contract.proving.pausing(meanwhile):
                self._contract.ensure()
                fingerprint = self._contract.fingerprint
        with self._core.runner.torch_state.stream():
            pass  # passes of any thread come after what the caller's stream computes of inputs
        for request in requests:
            request.fingerprint = fingerprint and fingerprint.with_tokenizer(request.tokenizer)
            request.thread = get_ident()
            self.requests[request.request_id] = request
            self.driver.news += 1
            for sequence in request.sequences:
                self._core.admission.add(sequence)

    def submit(self, requests: list[Request]) -> None:
        """Queue requests that were made in another turn; as ``check_model`` and ``add``."""
        with self.driver.turn("generate"):
            self.check_model()
            self.add(requests)

    @between_steps()
    def run(
        self,
        requests: list[Request],
        then: Callable[[], T],
        progress: bool = False,
        until_abort: bool = False,
    ) -> T:
        """Run requests that were queued to their end, or ``until_abort`` of one, which ends the
        others; what ``then`` returns in the same turn. progress: show a bar of finished
        completions."""
        sequences = [sequence for request in requests for sequence in request.sequences]

        def done() -> bool:
            aborted = until_abort and any(s.finish_reason == "abort" for s in sequences)
            return aborted or all(sequence.finished for sequence in sequences)

        # A bar that is not shown would all the same start tqdm's thread.
        shown = tqdm(total=len(sequences), unit="completion", delay=2.0) if progress else None

        def show() -> None:
            if shown is not None:
                shown.update(sum(s.finished for s in sequences) - shown.n)

        try:
            with shown or nullcontext():
                return self.drive("generate", done, then, show)
        finally:
            self.cancel(requests)

    def drive(
        self,
        what: str,
        done: Callable[[], bool],
        then: Callable[[], T],
        after_pass: Callable[[], object] = lambda: None,
    ) -> T:
        """Run passes for all until ``done``; what ``then`` returns in the same turn."""
        asleep_at = None
        while True:
            with self.driver.turn(what, done, asleep_at), self._passes():
                asleep_at = None
                while not done():
                    idle = not self.run_pass()
                    after_pass()
                    flush()
                    if idle or self.driver.wanted:
                        asleep_at = self.driver.news if idle else None
                        break
                if done():
                    return then()

    @contextmanager
    def _passes(self) -> Iterator[None]:
        """A block of passes in one turn: on as many of torch's threads as the deterministic
        requests were, or are being, submitted under, and after a look."""
        own, threads = torch.get_num_threads(), self._contract.threads
        other = threads not in (None, own) and bool(self._asking or self._contract.proving.threads)
        if threads is not None and other:
            torch.set_num_threads(threads)
        try:
            if self.closed is None:
                self._look()
            with self._core.runner.torch_state():
                yield
        finally:
            if other and threads == torch.get_num_threads():
                torch.set_num_threads(own)

    def step(self, meanwhile: Meanwhile | None = None) -> bool:
        """One pass, in a turn; whether there was one."""
        with self._passes():
            return self.run_pass(meanwhile)

    def run_pass(self, meanwhile: Meanwhile | None = None) -> bool:
        """Run one pass, commit what it found, and forget the requests that it finished; whether
        there was one. Raises exits and interrupts of the caller's own code."""
        core = self._core
        try:
            written = len(self._contract.written)
            core.propose()
            if (step := core.begin()) is None:
                return False
            core.finish(step, self._is_sound(step, written))
        except BaseException:  # all running sequences are computed again
            core.admission.preempt_all()
            raise
        finally:
            self._finish()
        self.driver.news += 1
        asked = core.table.any("deterministic")
        if asked and not self._contract.prove_repaid(core.scheduler.accepted(), meanwhile):
            self._ensure()
        return True

    def _is_sound(self, step: Step, written: int) -> bool:
        """Whether what a pass found may be committed, or its error blamed; where something that
        bits depend on has changed, it is computed again. written: how many buffers passes had been
        seen to write to before."""
        core = self._core
        self._drop([self.requests[name] for name in self._dropped & self.requests.keys()])
        if asks := core.table.any("deterministic"):
            final = step.rows[step.alive & (step.kinds != DRAFT)]
            asks = bool(np.count_nonzero(core.table.deterministic[final]))
        # Pages of a canonical pass may be found by deterministic requests.
        if not (asks or step.raised or (step.moved and step.canonical)):
            return True
        what, rows = None, step.rows[step.alive & (step.yields > 0)]
        rows = rows[core.table.places("special_sampling", rows)]
        special = [core.table.sequences[row].request for row in rows.tolist()]
        if not self._look():
            what = "the model"
        elif len(self._contract.written) > written:
            self._ensure()
            what = "a buffer"
        elif step.moved is not None:
            what = f"torch's {step.moved}"
        self._unsound = 0 if what is None else self._unsound + 1
        if what is None:
            return True
        if self._unsound > MOST_UNSOUND:  # others are to go on
            self._abort(self._asking, f"{what} changed in each of {MOST_UNSOUND} passes")
            self._unsound = 0
            if step.raised is not None:
                return True
        # Processors may count the calls.
        called = (r for r in special if r.params.logits_processors and r.params.deterministic)
        why = f"{what} changed while its logits processors ran"
        self._abort([request for request in called if not request.supplied], why)
        core.admission.forget_pages()
        return False

    def end(self, sequences: list[Sequence], reasons: list[str]) -> None:
        """After ``core.committer.supply``: those of ``sequences`` that have a reason end."""
        for sequence, reason in zip(sequences, reasons, strict=True):
            if reason:
                self._core.committer.end(sequence, reason)
        self._finish()

    def _finish(self) -> None:
        """After a pass: forget the requests that it finished, and do what was posted."""
        committer = self._core.committer
        ended, committer.ended = committer.ended, []
        sound = self._look_at_digests([sequence.request for sequence in ended])
        for sequence in ended:
            if sequence.deterministic and not sound:
                sequence.finish_reason = "abort"
                sequence.error = "the weights changed while it was running"
                sequence.forget()
            if sequence.request.finished:
                self._remove(sequence.request)
        self.driver.apply_posts()

    def _look_at_digests(self, requests: Iterable[Request]) -> bool:
        """The look before the last output of ``requests``, where there are digests; whether the
        model is as it was."""
        before = self._changes
        if self._contract.digests and any(r.params.deterministic for r in requests):
            with suppress(Exception):  # every request was told
                self._refresh(digest=True)
        return self._changes == before

    def has_unfinished(self) -> bool:
        """Whether requests are unfinished, or finished and not reported."""
        return bool(self.queued or self.requests.keys() - self._dropped)

    def abort(self, request_id: str, then: Callable[[Request], T]) -> T:
        """End one request, and nothing more of it is committed; what ``then`` makes of it.
        ValueError if none of that id is unfinished."""
        within = self.driver.in_turn
        with nullcontext() if within else self.driver.turn("abort"):
            request = self.requests.get(request_id)
            if request is None or request_id in self._dropped:
                raise refuse("request_id", request_id, "the id of an unfinished request")
            self.queued.pop(request_id, None)
            if within:
                self.drop([request])
            else:
                self._look_at_digests([request])
                self._abort([request], ASKED)
            return then(request)

    def cancel(self, requests: list[Request]) -> None:
        """Abort those of ``requests`` that are unfinished."""
        if self.driver.in_turn:
            self.drop(requests)
        elif any(map(self._unfinished, requests)):
            with self.driver.turn("abort"):
                self._abort(requests)

    def drop(self, requests: list[Request]) -> None:
        """As ``cancel``, at any line of any thread, as finalizers are: by a post."""
        if unfinished := list(filter(self._unfinished, requests)):
            self._dropped.update(request.request_id for request in unfinished)
            self.driver.post(partial(self._drop, unfinished))

    def _drop(self, requests: list[Request]) -> None:
        self._abort(requests, ASKED)
        self._dropped.difference_update(request.request_id for request in requests)

    def close(self) -> None:
        """Abort all; no request can be added any more."""
        self._look_at_digests(self.requests.values())
        self.closed = "closed"
        self.queued.clear()
        self._abort(self.requests.values(), "the engine was closed")

    def _unfinished(self, request: Request) -> bool:
        return self.requests.get(request.request_id) is request

    def _abort(
        self, requests: Iterable[Request], error: str | None = None, forget: bool = False
    ) -> None:
        """End those of ``requests`` that are unfinished."""
        for request in list(filter(self._unfinished, requests)):
            for sequence in [s for s in request.sequences if not s.finished]:
                sequence.finish_reason, sequence.error = "abort", error
                self._core.admission.remove(sequence)
                if forget:
                    sequence.forget()
            self._remove(request)

    def _remove(self, request: Request) -> None:
        self.requests.pop(request.request_id, None)
        self.driver.news += 1
        if not self.requests:
            self._core.runner.prepacked.forget()


def _told(error: BaseException) -> str:
    return str(error) if isinstance(error, TinyspecError) else named(error)
