"""Requests from submission to output: queue them, run steps, hand out outputs and stream events.

Holds every unfinished request and the fingerprint it runs under, and drops what was computed with
weights that have changed since. Knows no prompt text and no tensor.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

from tinyspec.determinism.contract import Contract
from tinyspec.engine.commit import Commits
from tinyspec.engine.core import EngineCore
from tinyspec.engine.interrupts import between_steps, deferred_interrupt
from tinyspec.engine.stream import completion_of, event_of
from tinyspec.engine.user_code import UserCode
from tinyspec.errors import DeterminismError, refuse
from tinyspec.outputs import RequestOutput, StreamEvent
from tinyspec.scheduler.request import Request, Sequence


class RequestTracker:
    """Unfinished requests of one engine by id, and what has not been taken of the finished ones.

    Outputs of ``finish`` go to its caller, those of ``add`` to ``take_finished``; requests of
    ``subscribe`` leave events alone.
    """

    def __init__(self, core: EngineCore, contract: Contract, tokenizer: Any):
        self.requests: dict[str, Request] = {}
        self._core = core
        self._contract = contract
        self._tokenizer = tokenizer
        self._fingerprints: dict[str, str | None] = {}
        self._finished: list[RequestOutput] = []
        self._awaited: dict[str, RequestOutput | None] = {}
        self._subscriptions: dict[str, deque[StreamEvent]] = {}
        self._user_code = UserCode()
        self._ended: deque[Request] = deque()

    def check_model(self) -> None:
        """Compare the model with what it was at the last call.

        Raises ValueError where it changed in a way that takes a new engine.
        """
        self._refresh(digest=True)
        if self._contract.stale is not None:
            raise ValueError(_not_followed(self._contract.stale))

    def _refresh(self, digest: bool) -> None:
        if changes := self._contract.refresh(digest):
            self.on_change(self._contract.summary(changes))

    def on_change(self, what: str = "the weights") -> None:
        """Drop everything computed with the model as it was; ``what`` changed.

        Plain requests and those without tokens continue with the model as it is. A deterministic
        request that has tokens is aborted: its output would belong to neither. All are aborted
        where the model cannot be served any more.
        """
        contract = self._contract
        self._core.admission.forget_pages()
        if contract.stale is not None:
            self._abort_all(list(self.requests.values()), _not_followed(contract.stale))
            return
        asking = [request for request in self.requests.values() if request.params.deterministic]
        begun = [r for r in asking if any(s.num_generated for s in r.sequences)]
        self._abort_all(begun, f"{what} changed while it was running")
        for request in self.requests.values():
            request.forget_prompt_logprobs()
        if len(begun) == len(asking):
            return
        try:
            contract.ensure()
            fingerprint = contract.fingerprint
        except Exception as error:  # of whatever the model is made of now
            known = isinstance(error, DeterminismError)
            self._abort_all(asking, str(error) if known else f"{type(error).__name__}: {error}")
            return
        self._fingerprints = dict.fromkeys(self.requests, fingerprint)

    def _users_code_ran(self) -> bool:
        """Whether code of the user's may have run since the last call: the caller's, callbacks,
        hooks and modules, drafters."""
        called, watch = self._user_code.ran(), self._contract.watch
        return called or watch.runs_user_code or self._core.drafts_by_user

    def _check_before_pass(self, called: bool = True) -> None:
        """Compare the model with what it was at the last pass: all of it where code of the user's
        was ``called`` in between, otherwise the number of threads."""
        contract = self._contract
        watch = contract.watch
        if watch.changed() if called else watch.threads_changed:
            self._refresh(digest=False)
        if contract.outdated and any(r.params.deterministic for r in self.requests.values()):
            self.on_change()

    def _abort_all(self, requests: list[Request], error: str) -> None:
        for request in requests:
            if self.requests.get(request.request_id) is request:
                self._abort(request, error)
                self._deliver(request)

    def add(self, requests: list[Request]) -> list[str]:
        """Queue requests and return their ids; DeterminismError if the contract cannot be kept."""
        fingerprint = self._contract.known_fingerprint
        if any(request.params.deterministic for request in requests):
            self._contract.ensure()
            fingerprint = self._contract.fingerprint
        for request in requests:
            self.requests[request.request_id] = request
            self._fingerprints[request.request_id] = fingerprint
            self._user_code.add(request.request_id, request.params)
            self._core.admission.add(request.sequences[0])
        return [request.request_id for request in requests]

    def subscribe(self, requests: list[Request], aborts_only: bool) -> None:
        """Queue requests whose events ``next_event`` returns; aborts_only: leave out all others."""
        events: deque[StreamEvent] = deque()
        for request in requests:
            request.reported = not aborts_only
        self._subscriptions.update(dict.fromkeys(self.add(requests), events))

    def finish(self, requests: list[Request], progress: bool = False) -> list[RequestOutput]:
        """Run ``requests`` to their end; their outputs, in their order."""
        ids = self.add(requests)
        self._awaited.update(dict.fromkeys(ids))
        sequences = [sequence for request in requests for sequence in request.sequences]
        bar = tqdm(total=len(sequences), unit="completion", disable=not progress)
        with bar, self.hold_state():
            try:
                for request in requests:
                    while request.request_id in self.requests:
                        self.advance()
                        if progress:
                            bar.update(len([s for s in sequences if s.finished]) - bar.n)
            except BaseException:
                self.cancel(requests)
                raise
            finally:
                outputs = [self._awaited.pop(request_id) for request_id in ids]
        return [output for output in outputs if output is not None]

    @contextmanager
    def hold_state(self) -> Iterator[None]:
        """Set torch's state and the interrupt handler once for all steps of the block, which must
        run no code of the user between them."""
        with between_steps(), self._core.runner.torch_state(), self._user_code.shut_out():
            yield

    def advance(self) -> None:
        """Run one step; queue its events and deliver the outputs that it finished."""
        called, by_user = self._users_code_ran(), self._core.drafts_by_user
        with self._core.runner.torch_state(again=called):
            if not by_user:  # where drafters may change the model, the check comes later
                self._check_before_pass(called)
            begun = time.perf_counter()
            with deferred_interrupt():
                self._step(self._check_before_pass if by_user else None)
                self._learn(time.perf_counter() - begun)

    def _learn(self, seconds: float) -> None:
        """After a step of so many seconds: learn what makes deterministic requests faster. They end
        where that shows that none can be served."""
        if not self._core.table.any("deterministic") or self._contract.learn(seconds):
            return
        try:
            self._contract.ensure()
        except DeterminismError as error:
            asking = [r for r in self.requests.values() if r.params.deterministic]
            self._abort_all(asking, str(error))

    def _step(self, check: Callable[[], None] | None) -> None:
        try:
            commits = self._core.step(check)
        except BaseException:
            self._take(self._core.recover())
            raise
        self._take(commits)

    def _take(self, commits: Commits) -> None:
        """Queue the events of a step and deliver the outputs that it finished."""
        for sequence, count in commits.grown:
            self._queue_event(sequence, count)
        told = {id(sequence) for sequence, _ in commits.grown}
        for sequence in commits.ended:
            if id(sequence) not in told:
                self._queue_event(sequence, 0)
        self._ended += [sequence.request for sequence in commits.ended]
        while self._ended:  # what a tokenizer raises leaves the rest for the next step
            request = self._ended.popleft()
            if request.request_id in self.requests and request.finished:
                self._deliver(request)

    def _deliver(self, request: Request) -> None:
        """Forget a finished request; its output is for the ``finish`` that waits for it, or else
        for ``take_finished``."""
        output = self._forget(request)
        if request.request_id in self._awaited:
            self._awaited[request.request_id] = output
        elif output is not None:
            self._finished.append(output)

    def _forget(self, request: Request, wanted: bool = False) -> RequestOutput | None:
        """Its output; None of a stream's requests, unless it is ``wanted``."""
        del self.requests[request.request_id]
        self._user_code.remove(request.request_id)
        fingerprint = self._fingerprints.pop(request.request_id)
        if request.request_id in self._subscriptions and not wanted:
            return None
        return RequestOutput(
            request_id=request.request_id,
            prompt_token_ids=request.prompt,
            params=request.params,
            completions=[completion_of(s, self._tokenizer) for s in request.sequences],
            fingerprint=fingerprint,
            prompt_logprobs=request.prompt_logprobs or None,
        )

    def take_finished(self) -> list[RequestOutput]:
        """Outputs that became ready since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def has_unfinished(self) -> bool:
        """Whether requests are unfinished or outputs not taken."""
        return bool(self.requests or self._finished)

    def _queue_event(self, sequence: Sequence, count: int) -> None:
        """Tell a stream of the newest ``count`` tokens of a sequence, or of its end; one that
        reports no tokens, of aborts alone."""
        events = self._subscriptions.get(sequence.request.request_id)
        if events is not None and (sequence.request.reported or sequence.finish_reason == "abort"):
            events.append(event_of(sequence, count))

    def next_event(self, requests: list[Request]) -> StreamEvent | None:
        """The next event of a stream's requests, None when there are no more."""
        while requests:
            if events := self._subscriptions.get(requests[0].request_id):
                return events.popleft()
            if not any(request.request_id in self.requests for request in requests):
                break
            self.advance()
        return None

    def unsubscribe(self, requests: list[Request]) -> None:
        """Abort what is unfinished of a stream's requests and drop their events."""
        self.cancel(requests)
        for request in requests:
            self._subscriptions.pop(request.request_id, None)

    def abort(self, request_id: str) -> RequestOutput:
        """End one request; ValueError if none of that id is unfinished."""
        request = self.requests.get(request_id)
        if request is None:
            raise refuse("request_id", request_id, "the id of an unfinished request")
        self._abort(request)
        output = self._forget(request, wanted=True)
        assert output is not None
        if request_id in self._awaited:
            self._awaited[request_id] = output
        return output

    def cancel(self, requests: list[Request]) -> None:
        """Abort those of ``requests`` that are unfinished."""
        for request in requests:
            if self.requests.get(request.request_id) is request:
                self._abort(request)
                self._forget(request)

    def _abort(self, request: Request, error: str | None = None) -> None:
        """End its sequences that are unfinished."""
        for sequence in [s for s in request.sequences if not s.finished]:
            sequence.finish_reason, sequence.error = "abort", error
            self._core.admission.remove(sequence)
            self._queue_event(sequence, 0)


def _not_followed(what: str) -> str:
    return (
        f"{what} of the model changed, which the engine took from it when it was made: change it "
        "back, or close the engine and make a new one"
    )
