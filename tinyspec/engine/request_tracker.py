"""The engine's desk: requests in, steps of the loop, outputs to whoever waits for them.

Keeps every unfinished request and the fingerprint it runs under; sees to it that nothing computed
with other weights is used. Knows no prompt text and no tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

from tinyspec.determinism.contract import Contract
from tinyspec.engine.commit import Verdict
from tinyspec.engine.core import EngineCore
from tinyspec.engine.interrupts import between_steps, deferred_interrupt
from tinyspec.engine.output_collector import OutputCollector
from tinyspec.engine.stream import completion_of, event_of
from tinyspec.errors import DeterminismError, refuse
from tinyspec.outputs import RequestOutput, StreamEvent
from tinyspec.scheduler.request import Request


class RequestTracker:
    """Unfinished requests of one engine, and what became of the others."""

    def __init__(self, loop: EngineCore, contract: Contract, tokenizer: Any):
        self.requests: dict[str, Request] = {}
        self.collector = OutputCollector()
        self._core = loop
        self._contract = contract
        self._tokenizer = tokenizer
        self._fingerprints: dict[str, str | None] = {}

    def look(self) -> None:
        """Before anything new: are the weights those of before?"""
        if self._contract.look():
            self.new_weights()

    def new_weights(self) -> None:
        """Nothing computed with the old weights is used again.

        Requests without tokens start anew and plain ones go on, both with the new weights; a
        deterministic one that has tokens of the old would be neither's and is aborted.
        """
        self._core.scheduler.forget_pages()
        asking = [request for request in self.requests.values() if request.params.deterministic]
        begun = [r for r in asking if any(s.num_generated for s in r.sequences)]
        self._give_up(begun, "the weights changed while it was running")
        if len(begun) == len(asking):
            return
        try:
            self._contract.prove()
        except DeterminismError as error:
            self._give_up(asking, str(error))
            return
        self._fingerprints = dict.fromkeys(self.requests, self._contract.fingerprint)

    def _give_up(self, requests: list[Request], why: str) -> None:
        for output in self.cancel(requests, why):
            self.collector.put(output)

    def submit(self, requests: list[Request]) -> list[str]:
        """Queue requests, once it is sure that what they ask can be kept; their ids."""
        fingerprint = self._contract.known
        if any(request.params.deterministic for request in requests):
            self._contract.prove()
            fingerprint = self._contract.fingerprint
        for request in requests:
            self.requests[request.request_id] = request
            self._fingerprints[request.request_id] = fingerprint
            self._core.scheduler.add(request.sequences[0])
        return [request.request_id for request in requests]

    def finish(self, requests: list[Request], progress: bool = False) -> list[RequestOutput]:
        """Run ``requests`` to their end; their outputs, in their order."""
        mine = self.submit(requests)
        self.collector.wait_for(mine)
        total = sum(len(request.sequences) for request in requests)
        with tqdm(total=total, unit="completion", disable=not progress) as bar, self.steady():
            try:
                while any(request_id in self.requests for request_id in mine):
                    self.advance()
                    bar.update(sum(s.finished for r in requests for s in r.sequences) - bar.n)
            except BaseException:
                self.cancel(requests)
                raise
            finally:
                outputs = self.collector.take(mine)
        return outputs

    @contextmanager
    def steady(self) -> Iterator[None]:
        """For steps with nothing of the user's between them: what each would set and set back is
        set for all."""
        with between_steps(), self._core.runner.torch_state():
            yield

    def advance(self) -> None:
        """One step; its events and the outputs of what it finished go to where they are awaited."""
        if self._contract.changed():
            self.look()
        if self._contract.lost and any(r.params.deterministic for r in self.requests.values()):
            self.new_weights()
        with deferred_interrupt():
            try:
                verdicts = self._core.step()
            except BaseException:
                self._tell(self._core.abandon())
                raise
            finally:
                for request in [r for r in self.requests.values() if r.finished]:
                    self.collector.put(self._retire(request))
            self._tell(verdicts)

    def _tell(self, verdicts: list[Verdict]) -> None:
        """Events of what was decided, for the streams that wait for them."""
        for verdict in verdicts:
            sequence = verdict.sequence
            known = sequence.request.request_id, sequence.finish_reason == "abort"
            if (verdict.committed or sequence.finished) and self.collector.wants(*known):
                self.collector.put_events([event_of(sequence, verdict.committed)])

    def next_event(self, requests: list[Request]) -> StreamEvent | None:
        """The next event of a stream's requests, None when there are no more."""
        if not requests:
            return None
        while (event := self.collector.next_event(requests[0].request_id)) is None:
            if not any(request.request_id in self.requests for request in requests):
                return None
            self.advance()
        return event

    def drop(self, requests: list[Request]) -> None:
        """A stream's requests are wanted no longer."""
        self.cancel(requests)
        self.collector.take([request.request_id for request in requests])

    def abort(self, request_id: str) -> RequestOutput:
        """End one request; ValueError if none of that id is unfinished."""
        request = self.requests.get(request_id)
        if request is None:
            raise refuse("request_id", request_id, "the id of an unfinished request")
        output = self.cancel([request])[0]
        if self.collector.is_awaited(request_id):
            self.collector.put(output)  # for the call of ``generate`` that waits for it
        return output

    def cancel(self, requests: list[Request], why: str | None = None) -> list[RequestOutput]:
        """Abort those of ``requests`` that are unfinished."""
        outputs = []
        for request in requests:
            if self.requests.get(request.request_id) is request:
                for sequence in request.sequences:
                    if not sequence.finished:
                        sequence.finish_reason, sequence.error = "abort", why
                        self._core.scheduler.remove(sequence)
                        last = StreamEvent(request.request_id, sequence.index, [])
                        last.finish_reason = "abort"
                        last.logprobs = [] if request.params.logprobs else None
                        self.collector.put_events([last])
                outputs.append(self._retire(request))
        return outputs

    def _retire(self, request: Request) -> RequestOutput:
        """Forget a request and make its output."""
        del self.requests[request.request_id]
        return RequestOutput(
            request_id=request.request_id,
            prompt_token_ids=request.prompt,
            params=request.params,
            completions=[completion_of(s, self._tokenizer) for s in request.sequences],
            fingerprint=self._fingerprints.pop(request.request_id),
            prompt_logprobs=request.prompt_logprobs or None,
        )
