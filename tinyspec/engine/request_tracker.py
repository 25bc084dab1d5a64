"""Requests from submission to output: queue them, run steps, hand out outputs and stream events.

Holds every unfinished request and the fingerprint it runs under, and drops what was computed with
weights that have changed since. Knows no prompt text and no tensor.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

from tinyspec.determinism.contract import Contract
from tinyspec.engine.commit import CommitResult
from tinyspec.engine.core import EngineCore
from tinyspec.engine.interrupts import between_steps, deferred_interrupt
from tinyspec.engine.stream import completion_of, event_of
from tinyspec.engine.user_code import UserCode
from tinyspec.errors import DeterminismError, refuse
from tinyspec.outputs import RequestOutput, StreamEvent
from tinyspec.scheduler.request import Request


@dataclass
class _Subscription:
    """Events of the requests of one stream; aborts_only: leave out all but aborts."""

    aborts_only: bool
    events: deque[StreamEvent] = field(default_factory=deque)


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
        self._subscriptions: dict[str, _Subscription] = {}
        self._user_code = UserCode()

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
        self._core.scheduler.forget_pages()
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

    def _check_before_pass(self) -> None:
        """Compare the model with what it was at the last pass: all of it where code of the user's
        may have run in between, otherwise the number of threads."""
        contract = self._contract
        watch = contract.watch
        called = self._user_code.ran() or watch.runs_user_code or self._core.drafts_by_user
        if watch.changed() if called else watch.threads_changed:
            self._refresh(digest=False)
        if contract.outdated and any(r.params.deterministic for r in self.requests.values()):
            self.on_change()

    def _abort_all(self, requests: list[Request], error: str) -> None:
        for output in self.cancel(requests, error):
            self._deliver(output)

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
            self._core.scheduler.add(request.sequences[0])
        return [request.request_id for request in requests]

    def subscribe(self, requests: list[Request], aborts_only: bool) -> None:
        """Queue requests whose events ``next_event`` returns."""
        subscription = _Subscription(aborts_only)
        self._subscriptions.update(dict.fromkeys(self.add(requests), subscription))

    def finish(self, requests: list[Request], progress: bool = False) -> list[RequestOutput]:
        """Run ``requests`` to their end; their outputs, in their order."""
        ids = self.add(requests)
        self._awaited.update(dict.fromkeys(ids))
        sequences = [sequence for request in requests for sequence in request.sequences]
        bar = tqdm(total=len(sequences), unit="completion", disable=not progress)
        with bar, self.hold_state():
            try:
                while any(request_id in self.requests for request_id in ids):
                    self.advance()
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
        by_user = self._core.drafts_by_user
        with self._core.runner.torch_state():
            if not by_user:  # where drafters may change the model, the check comes later
                self._check_before_pass()
            begun = time.perf_counter()
            with deferred_interrupt():
                self._step(self._check_before_pass if by_user else None)
                self._learn(time.perf_counter() - begun)

    def _learn(self, seconds: float) -> None:
        """After a step of so many seconds: learn what makes deterministic requests faster. They end
        where that shows that none can be served."""
        asking = [r for r in self.requests.values() if r.params.deterministic]
        if asking and not self._contract.learn(seconds):
            try:
                self._contract.ensure()
            except DeterminismError as error:
                self._abort_all(asking, str(error))

    def _step(self, check: Callable[[], None] | None) -> None:
        try:
            results = self._core.step(check)
        except BaseException:
            self._queue_events(self._core.recover())
            raise
        finally:
            for request in [r for r in self.requests.values() if r.finished]:
                self._deliver(self._retire(request))
        self._queue_events(results)

    def _deliver(self, output: RequestOutput) -> None:
        """Keep an output for the ``finish`` that waits for it, or else for ``take_finished``."""
        if output.request_id in self._awaited:
            self._awaited[output.request_id] = output
        elif output.request_id not in self._subscriptions:
            self._finished.append(output)

    def take_finished(self) -> list[RequestOutput]:
        """Outputs that became ready since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def has_unfinished(self) -> bool:
        """Whether requests are unfinished or outputs not taken."""
        return bool(self.requests or self._finished)

    def _queue_events(self, results: list[CommitResult]) -> None:
        for result in results:
            sequence = result.sequence
            subscription = self._subscriptions.get(sequence.request.request_id)
            if subscription is None or not (result.committed or sequence.finished):
                continue
            if sequence.finish_reason == "abort" or not subscription.aborts_only:
                subscription.events.append(event_of(sequence, result.committed))

    def next_event(self, requests: list[Request]) -> StreamEvent | None:
        """The next event of a stream's requests, None when there are no more."""
        while requests:
            subscription = self._subscriptions.get(requests[0].request_id)
            if subscription is not None and subscription.events:
                return subscription.events.popleft()
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
        output = self.cancel([request])[0]
        if request_id in self._awaited:
            self._awaited[request_id] = output
        return output

    def cancel(self, requests: list[Request], error: str | None = None) -> list[RequestOutput]:
        """Abort those of ``requests`` that are unfinished; their outputs."""
        unfinished = [r for r in requests if self.requests.get(r.request_id) is r]
        for request in unfinished:
            for sequence in [s for s in request.sequences if not s.finished]:
                sequence.finish_reason, sequence.error = "abort", error
                self._core.scheduler.remove(sequence)
                self._queue_events([CommitResult(sequence)])
        return [self._retire(request) for request in unfinished]

    def _retire(self, request: Request) -> RequestOutput:
        """Forget a request and make its output."""
        del self.requests[request.request_id]
        self._user_code.remove(request.request_id)
        return RequestOutput(
            request_id=request.request_id,
            prompt_token_ids=request.prompt,
            params=request.params,
            completions=[completion_of(s, self._tokenizer) for s in request.sequences],
            fingerprint=self._fingerprints.pop(request.request_id),
            prompt_logprobs=request.prompt_logprobs or None,
        )


def _not_followed(what: str) -> str:
    return (
        f"{what} of the model changed, which the engine took from it when it was made: change it "
        "back, or close the engine and make a new one"
    )
