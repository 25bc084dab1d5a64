"""Requests from submission to output: queue them, run steps, hand out outputs, to any thread.

Holds every unfinished request, and drops what was computed with weights that have changed since.
What a request has got so far is in its sequences. Knows no prompt text and no tensor.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from threading import get_ident
from typing import Any

from tqdm import tqdm

from tinyspec.determinism.contract import Contract
from tinyspec.engine.commit import Commits
from tinyspec.engine.core import EngineCore
from tinyspec.engine.interrupts import between_steps, deferred_interrupt
from tinyspec.engine.refusals import idle, refuse_other_number
from tinyspec.engine.results import output_of
from tinyspec.engine.turns import HasTurns, Turns, in_turn
from tinyspec.engine.user_code import UserCode
from tinyspec.errors import DeterminismError, TinyspecError, refuse
from tinyspec.outputs import RequestOutput
from tinyspec.scheduler.request import Request, Sequence


def _told(error: Exception) -> str:
    known = isinstance(error, TinyspecError)
    return str(error) if known else f"{type(error).__name__}: {error}"


class RequestTracker(HasTurns):
    """Unfinished requests of one engine by id, and those of ``queue`` that have finished and were
    not taken. Threads take turns; requests of all run in the same passes."""

    def __init__(self, core: EngineCore, contract: Contract, tokenizer: Any):
        self.requests: dict[str, Request] = {}
        self._core, self._contract, self._tokenizer = core, contract, tokenizer
        self._user_code = UserCode()
        self._queued: set[str] = set()
        self._finished: deque[Request] = deque()
        self._outputs: list[RequestOutput] = []
        self._dropped: list[Request] = []
        self.closed: str | None = None
        self.turns = Turns(self._cancel_dropped, lambda: bool(self._dropped))

    @in_turn
    def check_model(self) -> None:
        """Compare the model with what it was at the last call.

        Raises ValueError for an engine that is closed, and what keeps the model as it is now from
        being served.
        """
        self._refuse_idle()
        self._refuse_other_number()
        self._refresh(digest=True)

    @in_turn
    def fingerprint(self) -> str:
        """Of the model as it is. Raises as ``check_model``."""
        self.check_model()
        return self._contract.fingerprint.digest

    def _refuse_idle(self) -> None:
        if self.closed is not None:
            raise idle(self.closed)

    def _refuse_other_number(self) -> None:
        if self.requests and self._contract.threads_changed:
            refuse_other_number(self.requests.values())

    def _refresh(self, digest: bool) -> None:
        try:
            what = self._contract.refresh(digest)
        except Exception as error:  # none is made of the model as it is now
            self._core.admission.forget_pages()
            self._abort_all(list(self.requests.values()), _told(error))
            raise
        if what is not None:
            self.on_change(what)

    @in_turn
    def weights_changed(self) -> None:
        """They were written to in a way that torch does not record."""
        self._refresh(digest=False)
        self._contract.weights_changed()
        self.on_change()

    @in_turn
    def on_change(self, what: str = "the weights") -> None:
        """Drop everything computed with the model as it was; ``what`` changed.

        Plain requests and those without tokens continue with the model as it is. A deterministic
        one that has tokens is aborted.
        """
        contract = self._contract
        self._core.admission.forget_pages()
        asking = [request for request in self.requests.values() if request.params.deterministic]
        begun = [r for r in asking if any(s.num_generated for s in r.sequences)]
        self._abort_all(begun, f"{what} changed while it was running")
        for request in self.requests.values():
            request.forget_prompt()
        if len(begun) == len(asking):
            return
        try:
            contract.ensure()
            fingerprint = contract.fingerprint
        except Exception as error:  # of whatever the model is made of now
            self._abort_all(asking, _told(error))
            return
        for request in self.requests.values():
            request.fingerprint = fingerprint

    def _check_before_pass(self, called: bool = True) -> None:
        """Compare the model with what it was: all of it where code of the user's was ``called``."""
        contract = self._contract
        if contract.changed() if called else contract.threads_changed:
            with suppress(TinyspecError, ValueError):  # which every request was told
                self._refresh(digest=False)

    def _abort_all(self, requests: list[Request], error: str) -> None:
        for request in requests:
            if self._unfinished(request):
                self._abort(request, error)
                self._forget(request)

    @in_turn
    def add(self, requests: list[Request]) -> None:
        """Begin requests; DeterminismError if the contract cannot be kept."""
        self._refuse_idle()  # since they were prepared
        fingerprint = self._contract.known_fingerprint
        if any(request.params.deterministic for request in requests):
            self._contract.ensure()
            fingerprint = self._contract.fingerprint
        for request in requests:
            request.fingerprint, request.thread = fingerprint, get_ident()
            self.requests[request.request_id] = request
            self._user_code.add(request)
            for sequence in {*request.sequences} - {*request.sequences[0].siblings}:
                self._core.admission.add(sequence)

    @in_turn
    def queue(self, request: Request) -> str:
        """Begin a request whose output ``take_finished`` returns; its id."""
        self.add([request])
        self._queued.add(request.request_id)
        return request.request_id

    @between_steps()
    def finish(self, requests: list[Request], progress: bool = False) -> list[RequestOutput]:
        """Run ``requests`` to their end; their outputs, in their order."""
        self.run(requests, progress)
        with self.turns.turn():  # a tokenizer serves one thread at a time
            return [output_of(request, self._tokenizer) for request in requests]

    @between_steps()
    def run(
        self, requests: list[Request], progress: bool = False, until_abort: bool = False
    ) -> None:
        """Run ``requests`` to their end, or ``until_abort`` of one, which ends the others."""
        left = [sequence for request in requests for sequence in request.sequences]
        enough = any if until_abort else all

        def ready() -> bool:
            return enough(sequence.finished for sequence in left)

        # A bar that is not shown would all the same start tqdm's thread.
        bars = tqdm(total=len(left), unit="completion", delay=2.0) if progress else nullcontext()
        with bars as bar:
            try:
                self.add(requests)
                while left:
                    with self.turns.turn(ready), self.hold_state():
                        left = self._drive(left, bar, until_abort)
            finally:
                self.cancel(requests)

    def _drive(self, left: list[Sequence], bar: Any, until_abort: bool) -> list[Sequence]:
        """Run steps until all of ``left`` have finished, one was aborted if that ends all, or
        another thread wants the turn; those that are to be waited for."""
        while True:
            ended = [sequence for sequence in left if sequence.finished]
            if until_abort and any(s.finish_reason == "abort" for s in ended):
                return []
            if ended:
                left = [sequence for sequence in left if not sequence.finished]
                if bar is not None:
                    bar.update(len(ended))
            if not left or self.turns.wanted:
                return left
            self.advance()

    @contextmanager
    def hold_state(self) -> Iterator[None]:
        """Set torch's state and the interrupt handler once for all steps of the block, which must
        run no code of the user between them."""
        with between_steps(), self._core.runner.torch_state(), self._user_code.shut_out():
            yield

    @in_turn
    def advance(self) -> None:
        """Run one step, and forget the requests that it finished."""
        self._cancel_dropped()
        self._refuse_other_number()
        # Code of the user's that may have run since the last step: the caller's, callbacks, hooks
        # and modules, drafters.
        called, by_user = self._user_code.ran(), self._core.drafts_by_user
        called = called or by_user or self._contract.runs_user_code
        with self._core.runner.torch_state(again=called):
            if not by_user:  # where drafters may change the model, the check comes later
                self._check_before_pass(called)
            begun, marks = time.perf_counter(), self._contract.marks()
            with deferred_interrupt():
                self._step(self._check_before_pass if by_user else None)
                if self._contract.after_step(marks):
                    self._end_asking()
            self._prove_repaid(time.perf_counter() - begun)

    def _prove_repaid(self, seconds: float) -> None:
        """After a step of so many seconds: prove what makes deterministic requests faster. They end
        where that shows that none can be served."""
        if not self._core.table.any("deterministic"):
            return
        if not self._contract.prove_repaid(seconds, self._core.scheduler.accepted()):
            self._end_asking()

    def _end_asking(self) -> None:
        """Abort deterministic requests where none can be served."""
        asking = [r for r in self.requests.values() if r.params.deterministic]
        try:
            if asking:
                self._contract.ensure()
        except DeterminismError as error:
            self._abort_all(asking, str(error))

    def _step(self, check: Callable[[], None] | None) -> None:
        try:
            commits = self._core.step(check)
        except BaseException:
            self._take(self._core.recover())
            raise
        self._take(commits)

    def _take(self, commits: Commits) -> None:
        """Forget the requests that a step finished."""
        for sequence in commits.ended:
            request = sequence.request
            if request.finished and self._unfinished(request):
                self._forget(request)

    def _forget(self, request: Request) -> None:
        """A request has finished."""
        del self.requests[request.request_id]
        self._user_code.remove(request.request_id)
        if request.request_id in self._queued:
            self._queued.remove(request.request_id)
            self._finished.append(request)

    @in_turn
    def take_finished(self) -> list[RequestOutput]:
        """Outputs that became ready since the last call."""
        while self._finished:  # what a tokenizer raises leaves the rest for the next call
            self._outputs.append(output_of(self._finished.popleft(), self._tokenizer))
        outputs, self._outputs = self._outputs, []
        return outputs

    def has_unfinished(self) -> bool:
        """Whether requests are unfinished or outputs not taken."""
        return bool(self.requests or self._finished or self._outputs)

    @in_turn
    def abort(self, request_id: str) -> RequestOutput:
        """End one request; ValueError if none of that id is unfinished."""
        request = self.requests.get(request_id)
        if request is None:
            raise refuse("request_id", request_id, "the id of an unfinished request")
        self.cancel([request])
        return output_of(request, self._tokenizer)

    def cancel(self, requests: list[Request]) -> None:
        """Abort those of ``requests`` that are unfinished; nothing else reports them."""
        if not any(map(self._unfinished, requests)):
            return
        with self.turns.turn():
            for request in filter(self._unfinished, requests):
                self._queued.discard(request.request_id)
                self._abort(request)
                self._forget(request)

    def drop(self, requests: list[Request]) -> None:
        """As ``cancel``, at any line of any thread: at once, or by the thread that has the turn."""
        self._dropped += filter(self._unfinished, requests)
        if self._dropped:
            self.turns.try_turn()

    @in_turn
    def close(self, why: str) -> None:
        """Abort all; no request can be added any more, which is refused with ``why``."""
        self.closed = why
        self._queued.clear()
        self._abort_all(list(self.requests.values()), "the engine was closed")

    def _cancel_dropped(self) -> None:
        while self._dropped:
            self.cancel([self._dropped.pop()])

    def _unfinished(self, request: Request) -> bool:
        return self.requests.get(request.request_id) is request

    def _abort(self, request: Request, error: str | None = None) -> None:
        """End its sequences that are unfinished."""
        for sequence in [s for s in request.sequences if not s.finished]:
            sequence.finish_reason, sequence.error = "abort", error
            self._core.admission.remove(sequence)
