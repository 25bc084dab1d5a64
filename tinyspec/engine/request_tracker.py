"""Requests from submission to output: queue them, run steps, hand out outputs, to any thread.

Holds every unfinished request, and drops what was computed with weights that have changed since.
What a request has got so far is in its sequences. Knows no prompt text and no tensor.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from dataclasses import replace
from threading import get_ident
from typing import Any

from tqdm import tqdm

from tinyspec.determinism.contract import Contract
from tinyspec.engine.commit import Commits
from tinyspec.engine.core import EngineCore
from tinyspec.engine.lock import StepLock, between_steps, flush
from tinyspec.engine.refusals import idle, refuse_other_number
from tinyspec.engine.results import output_of
from tinyspec.errors import DeterminismError, TinyspecError, refuse
from tinyspec.outputs import RequestOutput
from tinyspec.scheduler.request import Request, Sequence

# Threads of libraries that touch no model.
HARMLESS = ("TMonitor",)  # tqdm's


def _told(error: Exception) -> str:
    known = isinstance(error, TinyspecError)
    return str(error) if known else f"{type(error).__name__}: {error}"


class RequestTracker:
    """Unfinished requests of one engine by id, and those of ``queue`` that have finished and were
    not taken. The thread that holds ``lock`` steps for all: requests of all threads share passes.
    """

    def __init__(self, core: EngineCore, contract: Contract, tokenizer: Any):
        self.requests: dict[str, Request] = {}
        self._core, self._contract, self._tokenizer = core, contract, tokenizer
        self._calls_user: set[str] = set()
        self._threads = False
        self._queued: set[str] = set()
        self._finished: deque[Request] = deque()
        self._outputs: list[RequestOutput] = []
        # To be aborted: streams that were collected, and what a step's own code asked for.
        self._dropped: list[Request] = []
        self._written = False
        self.closed: str | None = None
        self.lock = StepLock()

    def check_model(self) -> None:
        """Compare the model with what it was at the last call.

        Raises ValueError for an engine that is closed, and what keeps the model as it is now from
        being served.
        """
        self.apply_asked()
        self._refuse_idle()
        self._refuse_other_number()
        self._refresh(digest=True)

    def _refuse_idle(self) -> None:
        if self.closed is not None:
            raise idle(self.closed)

    def _refuse_other_number(self) -> None:
        if self.requests and self._contract.threads_changed:
            refuse_other_number(self.requests.values())

    def _refresh(self, digest: bool) -> None:
        try:
            with self.lock.step():  # a new copy runs the model's hooks
                what = self._contract.refresh(digest)
        except Exception as error:  # none is made of the model as it is now
            self._core.admission.forget_pages()
            self._abort_all(list(self.requests.values()), _told(error))
            raise
        if what is not None:
            self.on_change(what)

    def weights_changed(self) -> None:
        """Weights were written; within a step it takes effect at its end."""
        if self.lock.mine and self.lock.in_step:
            self._written = True
            return
        with self.lock("weights_changed"):
            self._refresh(digest=False)
            self._contract.weights_changed()
            self.on_change()

    def on_change(self, what: str = "the weights") -> None:
        """Drop everything computed with the model as it was; ``what`` changed.

        Plain requests and those without tokens continue with the model as it is. A deterministic
        one that has tokens is aborted.
        """
        contract = self._contract
        self._core.admission.forget_pages()
        if self._core.thinker is not None:
            self._core.thinker.forget_states()
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

    def add(self, requests: list[Request]) -> None:
        """Begin requests; DeterminismError if the contract cannot be kept."""
        with self.lock("generate"):
            self._refuse_idle()  # since they were prepared
            fingerprint = self._contract.known_fingerprint
            if any(request.params.deterministic for request in requests):
                with self.lock.step():
                    self._contract.ensure()
                fingerprint = self._contract.fingerprint
            for request in requests:
                request.fingerprint, request.thread = fingerprint, get_ident()
                self.requests[request.request_id] = request
                params = request.params
                if params.logits_processors or params.stopping_criteria:
                    self._calls_user.add(request.request_id)
                for sequence in {*request.sequences} - {*request.sequences[0].siblings}:
                    self._core.admission.add(sequence)

    def queue(self, request: Request) -> str:
        """Begin a request whose output ``take_finished`` returns; its id."""
        self.add([request])
        self._queued.add(request.request_id)
        return request.request_id

    def finish(self, requests: list[Request], progress: bool = False) -> list[RequestOutput]:
        """Run ``requests`` to their end; their outputs, in their order."""
        self.run(requests, progress)
        with self.lock("generate"):  # a tokenizer serves one thread at a time
            return [output_of(request, self._tokenizer) for request in requests]

    @between_steps()
    def run(
        self, requests: list[Request], progress: bool = False, until_abort: bool = False
    ) -> None:
        """Run ``requests`` to their end, or ``until_abort`` of one, which ends the others."""
        sequences = [sequence for request in requests for sequence in request.sequences]

        def done() -> bool:
            if until_abort and any(s.finish_reason == "abort" for s in sequences):
                return True
            return all(sequence.finished for sequence in sequences)

        # A bar that is not shown would all the same start tqdm's thread.
        with (
            tqdm(total=len(sequences), unit="completion", delay=2.0)
            if progress
            else (nullcontext()) as bar
        ):
            try:
                self.add(requests)
                self.run_until(done, sequences, bar)
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

    def supply(
        self, sequences: list[Sequence], tokens: list[int], logprobs: list[float] | None
    ) -> None:
        """Commit a token from outside to each of ``sequences``, which wait for theirs; to call with
        ``lock``, and ``end`` afterwards. logprobs: of the tokens, where any is wanted."""
        self._core.committer.supply(sequences, tokens, logprobs)

    def end(self, sequences: list[Sequence], reasons: list[str]) -> None:
        """After ``supply``: those of ``sequences`` that have a reason end with it."""
        self._finish(self._core.end(sequences, reasons))

    def advance(self, called: bool = True) -> None:
        """Run one step, and forget the requests that it finished; to call with ``lock``. called:
        whether the caller has run code of its own since the last step."""
        self.apply_asked()
        self._refuse_other_number()
        core = self._core
        called |= core.drafts_by_user or self._runs_user_code()
        with core.runner.torch_state(again=called):
            begun = time.perf_counter()
            with self.lock.step():
                core.propose()
            self._check_before_pass(called)
            commits, written = None, len(self._contract.written)
            try:
                with self.lock.step():
                    commits = core.step()
            finally:
                self._finish(core.recover() if commits is None else commits)
            with self.lock.step():
                if len(self._contract.written) > written:
                    self._end_asking()
                self._prove_repaid(time.perf_counter() - begun)

    def _runs_user_code(self) -> bool:
        """Whether code of the user's may have run since the last call: callbacks of requests, hooks
        and modules, other threads. Not seen are signal handlers and finalizers."""
        before, self._threads = self._threads, other_threads()  # one may have ended meanwhile
        by_request = bool(self._calls_user) or self._contract.runs_user_code
        return by_request or self._threads or before

    def _finish(self, commits: Commits) -> None:
        """After a step: forget the requests that it finished, and do what its own code asked
        for."""
        for sequence in commits.ended:
            request = sequence.request
            if self._written and request.params.deterministic:  # its last tokens are of both
                sequence.finish_reason = "abort"
                sequence.error = "the weights changed while it was running"
            if request.finished and self._unfinished(request):
                self._forget(request)
        self.apply_asked()

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

    def _forget(self, request: Request) -> None:
        """A request has finished."""
        del self.requests[request.request_id]
        self._calls_user.discard(request.request_id)
        if request.request_id in self._queued:
            self._queued.remove(request.request_id)
            self._finished.append(request)

    def take_finished(self) -> list[RequestOutput]:
        """Outputs that became ready since the last call."""
        while self._finished:  # what a tokenizer raises leaves the rest for the next call
            self._outputs.append(output_of(self._finished.popleft(), self._tokenizer))
        outputs, self._outputs = self._outputs, []
        return outputs

    def has_unfinished(self) -> bool:
        """Whether requests are unfinished or outputs not taken."""
        dropped = {request.request_id for request in tuple(self._dropped)}
        return bool(self.requests.keys() - dropped or self._finished or self._outputs)

    def abort(self, request_id: str) -> RequestOutput:
        """End one request; ValueError if none of that id is unfinished. Within a step it ends with
        that, and what is returned is what it has so far."""
        within = self.lock.mine and self.lock.in_step
        with nullcontext() if within else self.lock("abort"):
            request = self.requests.get(request_id)
            if request is None or request in self._dropped:
                raise refuse("request_id", request_id, "the id of an unfinished request")
            if not within:
                self.cancel([request])
                return output_of(request, self._tokenizer)
            self._queued.discard(request_id)
            self._dropped.append(request)
        output = output_of(request, self._tokenizer)
        ended = [replace(c, finish_reason=c.finish_reason or "abort") for c in output.completions]
        return replace(output, completions=ended)

    def cancel(self, requests: list[Request]) -> None:
        """Abort those of ``requests`` that are unfinished; nothing else reports them."""
        if not any(map(self._unfinished, requests)):
            return
        with self.lock("abort"):
            for request in filter(self._unfinished, requests):
                self._queued.discard(request.request_id)
                self._abort(request)
                self._forget(request)

    def drop(self, requests: list[Request]) -> None:
        """As ``cancel``, at any line of any thread, as finalizers are: by the next call or step."""
        self._dropped += filter(self._unfinished, requests)

    def close(self, why: str) -> None:
        """Abort all; no request can be added any more, which is refused with ``why``."""
        self.closed = why
        self._queued.clear()
        self._abort_all(list(self.requests.values()), "the engine was closed")

    def apply_asked(self) -> None:
        """Do what was asked for where it could not be done, within a step or by a finalizer; to
        call with ``lock``."""
        while self._dropped:
            self.cancel([self._dropped.pop()])
        if self._written:
            self._written = False
            self.weights_changed()

    def _unfinished(self, request: Request) -> bool:
        return self.requests.get(request.request_id) is request

    def _abort(self, request: Request, error: str | None = None) -> None:
        """End its sequences that are unfinished."""
        for sequence in [s for s in request.sequences if not s.finished]:
            sequence.finish_reason, sequence.error = "abort", error
            self._core.admission.remove(sequence)


def other_threads() -> bool:
    """Whether there is another Python thread that may run code of the user's."""
    if threading.active_count() == 1:
        return False
    own = get_ident()
    return any(
        thread.ident != own and type(thread).__name__ not in HARMLESS
        for thread in threading.enumerate()
    )
