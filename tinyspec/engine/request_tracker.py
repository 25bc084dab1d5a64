"""Requests from submission to their end: queue them, and run steps for any thread.

Holds every unfinished request, and drops what was computed with weights that have changed since.
What a request has got so far is in its sequences. Knows no text and no tensor.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from threading import get_ident
from typing import Any

import torch
from tqdm import tqdm

from tinyspec.determinism.contract import Contract
from tinyspec.engine.core import EngineCore
from tinyspec.engine.lock import StepLock
from tinyspec.errors import TinyspecError, named, refuse
from tinyspec.interrupts import between_steps, flush
from tinyspec.scheduler.request import Request, Sequence

# Threads of libraries that touch no model.
HARMLESS = ("TMonitor",)  # tqdm's
ASKED = "engine.abort was called for it"


class RequestTracker:
    """Unfinished requests of one engine by id. The thread that holds ``lock`` steps for all:
    requests of all threads share passes. queued: those that ``step`` reports at their end, by id.
    closed: why nothing runs any more.
    """

    def __init__(self, core: EngineCore, contract: Contract):
        self.requests: dict[str, Request] = {}
        self.queued: dict[str, Request] = {}
        self.closed: str | None = None
        self.lock = StepLock()
        self._core, self._contract = core, contract
        self._calls_user: set[str] = set()
        self._threads = False
        # To be aborted: streams that were collected, and what a step's own code asked for.
        self._dropped: list[Request] = []
        self._written = False

    @property
    def _in_step(self) -> bool:
        """Whether the calling thread is within a step."""
        return self.lock.mine and self.lock.in_step

    def refuse_closed(self) -> None:
        """Raise ValueError for an engine that runs nothing."""
        if self.closed is not None:
            raise refuse("engine", self.closed, "an engine that is open")

    def check_model(self) -> None:
        """Compare the model with what it was at the last call.

        Raises ValueError for an engine that is closed, and what keeps the model as it is now from
        being served.
        """
        self.apply_asked()
        self.refuse_closed()
        self._refuse_other_number()
        self._refresh(digest=True)

    def _refuse_other_number(self) -> None:
        """In a thread for which torch computes with another number of threads than before: raise
        ValueError where it is not the caller of requests whose bits depend on that number."""
        if not (self.requests and self._contract.threads_changed):
            return
        threads = [request.thread for request in self._asking]
        if threads and get_ident() not in threads:
            raise ValueError(
                f"torch computes with {torch.get_num_threads()} threads in this thread of Python, "
                "and with another number in those whose deterministic requests are unfinished; "
                "call torch.set_num_threads with the same number in all that use the engine"
            )

    def _refresh(self, digest: bool) -> None:
        try:
            with self.lock.step():  # a new copy runs the model's hooks
                what = self._contract.refresh(digest)
        except Exception as error:  # none is made of the model as it is now
            self._core.admission.forget_pages()
            self._abort(self.requests.values(), _told(error))
            raise
        if what is not None:
            self._start_again(what)

    def weights_changed(self) -> None:
        """Weights were written; within a step it takes effect at its end."""
        if self._in_step:
            self._written = True
            return
        with self.lock("weights_changed"):
            self._refresh(digest=False)
            self._contract.weights_changed()
            self._start_again("the weights")

    def _start_again(self, what: str) -> None:
        """Drop everything computed with the model as it was; ``what`` changed.

        Plain requests and those without tokens continue with the model as it is. A deterministic
        one that has tokens is aborted.
        """
        self._core.admission.forget_pages()
        self._core.runner.prepacked.forget()
        if self._core.committer.thinker is not None:
            self._core.committer.thinker.forget_states()
        begun = [r for r in self._asking if any(s.num_generated for s in r.sequences)]
        self._abort(begun, f"{what} changed while it was running")
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
        except Exception as error:  # of whatever the model is made of now
            self._abort(self._asking, _told(error))
            return
        for request in self.requests.values():
            request.fingerprint = fingerprint.with_tokenizer(request.tokenizer)

    def _check_before_pass(self, called: bool = True) -> None:
        """Compare the model with what it was: all of it where code of the user's was ``called``."""
        contract = self._contract
        if contract.changed() if called else contract.threads_changed:
            with suppress(TinyspecError, ValueError):  # which every request was told
                self._refresh(digest=False)

    def add(self, requests: list[Request]) -> None:
        """Begin requests; DeterminismError if the contract cannot be kept."""
        with self.lock("generate"):
            self.refuse_closed()  # since they were prepared
            fingerprint = self._contract.known_fingerprint
            if any(request.params.deterministic for request in requests):
                with self.lock.step():
                    self._contract.ensure()
                fingerprint = self._contract.fingerprint
            for request in requests:
                known = fingerprint and fingerprint.with_tokenizer(request.tokenizer)
                request.fingerprint, request.thread = known, get_ident()
                self.requests[request.request_id] = request
                if request.params.logits_processors or request.params.stopping_criteria:
                    self._calls_user.add(request.request_id)
                for sequence in {*request.sequences} - {*request.sequences[0].siblings}:
                    self._core.admission.add(sequence)

    @between_steps()
    def run(
        self, requests: list[Request], progress: bool = False, until_abort: bool = False
    ) -> None:
        """Run ``requests`` to their end, or ``until_abort`` of one, which ends the others.
        progress: show a bar of finished completions."""
        sequences = [sequence for request in requests for sequence in request.sequences]

        def done() -> bool:
            if until_abort and any(s.finish_reason == "abort" for s in sequences):
                return True
            return all(sequence.finished for sequence in sequences)

        # A bar that is not shown would all the same start tqdm's thread.
        shown = tqdm(total=len(sequences), unit="completion", delay=2.0) if progress else None
        with shown or nullcontext():
            try:
                self.add(requests)
                self.run_until(done, sequences, shown)
            finally:
                self.cancel(requests)

    def run_until(
        self, done: Callable[[], bool], sequences: Iterable[Sequence] = (), bar: Any = None
    ) -> None:
        """Run steps until ``done``, for all threads; one that has something else to do gets in
        between. bar: shows how many of ``sequences`` have finished."""
        while not done():
            # The state is set once for all steps: none of the caller's code runs between them.
            with self.lock("generate", done), self._core.runner.torch_state():
                called = True
                while not (done() or (self.lock.wanted and not called)):
                    self.advance(called)
                    called = False
                    if bar is not None:
                        bar.update(sum(s.finished for s in sequences) - bar.n)
                    flush()

    def advance(self, called: bool = True) -> None:
        """Run one step, and forget the requests that it finished; to call with ``lock``. called:
        whether the caller has run code of its own since the last step."""
        self.apply_asked()
        self._refuse_other_number()
        core, contract = self._core, self._contract
        called |= core.drafts_by_user or self._runs_user_code()
        with core.runner.torch_state(again=called):
            begun = time.perf_counter()
            with self.lock.step():
                core.propose()
            self._check_before_pass(called)
            written = len(contract.written)
            try:
                with self.lock.step():
                    core.step()
            except BaseException:  # all running sequences are computed again
                core.admission.preempt_all()
                raise
            finally:
                self._finish()
            with self.lock.step():
                sound = len(contract.written) == written
                if sound and core.table.any("deterministic"):  # prove what makes them faster
                    seconds = time.perf_counter() - begun
                    sound = contract.prove_repaid(seconds, core.scheduler.accepted())
                if not sound:
                    self._ensure()

    def _runs_user_code(self) -> bool:
        """Whether code of the user's may have run since the last call: callbacks of requests, hooks
        and modules, other threads. Not seen are signal handlers and finalizers."""
        before, self._threads = self._threads, other_threads()  # one may have ended meanwhile
        self._calls_user &= self.requests.keys()
        return bool(self._calls_user) or self._contract.runs_user_code or self._threads or before

    def end(self, sequences: list[Sequence], reasons: list[str]) -> None:
        """After ``core.committer.supply``, with ``lock``: those of ``sequences`` that have a reason
        end with it."""
        for sequence, reason in zip(sequences, reasons, strict=True):
            if reason:
                self._core.committer.end(sequence, reason)
        self._finish()

    def _finish(self) -> None:
        """After a step: forget the requests that it finished, and do what its own code asked
        for."""
        for sequence in self._core.committer.take_ended():
            request = sequence.request
            if self._written and request.params.deterministic:  # its last tokens are of both
                sequence.finish_reason = "abort"
                sequence.error = "the weights changed while it was running"
            if request.finished:
                self._remove(request)
        self.apply_asked()

    def has_unfinished(self) -> bool:
        """Whether requests are unfinished, or finished and not reported."""
        dropped = {request.request_id for request in tuple(self._dropped)}
        return bool(self.queued or self.requests.keys() - dropped)

    def abort(self, request_id: str) -> Request:
        """End one request; ValueError if none of that id is unfinished. Within a step it ends with
        that."""
        within = self._in_step
        with nullcontext() if within else self.lock("abort"):
            request = self.requests.get(request_id)
            if request is None or request in self._dropped:
                raise refuse("request_id", request_id, "the id of an unfinished request")
            self.queued.pop(request_id, None)
            if within:
                self._dropped.append(request)
            else:
                self._abort([request], ASKED)
            return request

    def cancel(self, requests: list[Request]) -> None:
        """Abort those of ``requests`` that are unfinished; nothing else reports them."""
        if any(map(self._unfinished, requests)):
            with self.lock("abort"):
                self._abort(requests)

    def drop(self, requests: list[Request]) -> None:
        """As ``cancel``, at any line of any thread, as finalizers are: by the next call or step."""
        self._dropped += filter(self._unfinished, requests)

    def close(self) -> None:
        """Abort all; no request can be added any more."""
        self.closed = "closed"
        self.queued.clear()
        self._abort(self.requests.values(), "the engine was closed")

    def apply_asked(self) -> None:
        """Do what was asked for where it could not be done, within a step or by a finalizer; to
        call with ``lock``."""
        while self._dropped:
            self._abort([self._dropped.pop()], ASKED)
        if self._written:
            self._written = False
            self.weights_changed()

    def _unfinished(self, request: Request) -> bool:
        return self.requests.get(request.request_id) is request

    def _abort(self, requests: Iterable[Request], error: str | None = None) -> None:
        """End those of ``requests`` that are unfinished."""
        for request in list(filter(self._unfinished, requests)):
            for sequence in [s for s in request.sequences if not s.finished]:
                sequence.finish_reason, sequence.error = "abort", error
                self._core.admission.remove(sequence)
            self._remove(request)

    def _remove(self, request: Request) -> None:
        self.requests.pop(request.request_id, None)
        if not self.requests:
            self._core.runner.prepacked.forget()


def _told(error: Exception) -> str:
    known = isinstance(error, TinyspecError)
    return str(error) if known else named(error)


def other_threads() -> bool:
    """Whether there is another Python thread that may run code of the user's."""
    if threading.active_count() == 1:
        return False
    own = get_ident()
    return any(
        thread.ident != own and type(thread).__name__ not in HARMLESS
        for thread in threading.enumerate()
    )
