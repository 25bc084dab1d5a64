"""Engine: requests in, finished outputs and streamed events out. The public face of the package."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from tinyspec import kernels
from tinyspec.buckets import Buckets
from tinyspec.capacity import size_pool
from tinyspec.commit import Committer
from tinyspec.config import EngineConfig
from tinyspec.contract import Contract
from tinyspec.drafter import Drafter, make_drafter
from tinyspec.errors import refuse
from tinyspec.intake import Intake
from tinyspec.interrupts import deferred_interrupt
from tinyspec.loop import Loop
from tinyspec.outputs import RequestOutput, StreamEvent
from tinyspec.pages import PagePool
from tinyspec.params import SamplingParams
from tinyspec.passes import EngineStats, PassRecord
from tinyspec.patch import max_positions, patch, refuse_unsupported, unpatch
from tinyspec.request import Request
from tinyspec.runner import Runner
from tinyspec.sampler import Sampler
from tinyspec.scheduler import Scheduler
from tinyspec.stream import EventStream, completion_of


class Engine:
    """Generates from a loaded causal LM, whose attention it patches until ``close``.

    model: a loaded transformers causal LM, on one device. tokenizer: for text prompts, stop strings
    and text outputs. A context manager.

    Raises UnsupportedModelError, or ValueError for a setting that does not fit and for a model that
    another engine serves.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: Any = None, config: EngineConfig | None = None
    ):
        config = config or EngineConfig()
        refuse_unsupported(model)
        config = config.resolve(device_type=model.device.type, model_positions=max_positions(model))
        reason = kernels.refusal(config.backend, model.device.type)
        if reason is not None:
            raise refuse("backend", config.backend, reason)
        drafter = make_drafter(config.drafter, model)
        self.model = model
        self.tokenizer = tokenizer
        self._patched = patch(model, config.max_model_len)
        try:
            self.config = size_pool(config, self._patched.layers, model.dtype, model.device)
            self._build(drafter)
        except BaseException:
            unpatch(model)
            raise

    def _build(self, drafter: Drafter) -> None:
        config = self.config
        assert config.max_rows and config.reference_rows and config.num_pages and config.page_size
        loaded = kernels.load(config.backend)
        buckets = Buckets(config.max_rows, config.reference_rows)
        self._pool = PagePool(config.num_pages, config.page_size)
        self._scheduler = Scheduler(config, self._pool, buckets)
        self._runner = Runner(self.model, self._patched, config, loaded, buckets)
        committer = Committer(loaded, self._scheduler, self.tokenizer, self._runner.device)
        self._loop = Loop(
            config, self._scheduler, self._runner, Sampler(loaded), committer, drafter
        )
        self._contract = Contract(self.model, self._runner, config)
        self._intake = Intake(self.model, self.tokenizer, config)
        self._requests: dict[str, Request] = {}
        self._fingerprints: dict[str, str | None] = {}
        # Where outputs of finished requests and events of streamed ones wait for their owner.
        self._finished: list[RequestOutput] = []
        self._outputs: dict[str, RequestOutput | None] = {}
        self._events: dict[str, deque[StreamEvent]] = {}
        self._closed = False

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        dtype: str | torch.dtype = "auto",
        device: str = "auto",
        config: EngineConfig | None = None,
    ) -> Engine:
        """An engine for a model on the hub or in a folder; device "auto": a GPU if there is one."""
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        model: Any = AutoModelForCausalLM.from_pretrained(name_or_path, dtype=dtype)
        return cls(model.to(device), AutoTokenizer.from_pretrained(name_or_path), config)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Abort what is unfinished, give the memory back and the model its own attention."""
        if self._closed:
            return
        self._cancel(list(self._requests.values()))
        self._runner.release()
        unpatch(self.model)
        self._closed = True

    def release(self) -> None:
        """Give the page pool's memory back; the next request takes it again.

        Raises ValueError while requests are unfinished.
        """
        if self._requests:
            raise refuse("release", f"{len(self._requests)} unfinished requests", "none")
        self._runner.release()

    @property
    def fingerprint(self) -> str:
        """Digest of all that the bits depend on; outputs are comparable where it is equal."""
        return self._contract.fingerprint

    def weights_changed(self) -> None:
        """Say that weights were written in a way that leaves no trace (through ``.data``)."""
        self._contract.forget()

    def stats(self) -> EngineStats:
        """Sums over all passes so far."""
        return self._loop.stats

    @property
    def records(self) -> list[PassRecord]:
        """Records of the latest passes; of all with ``EngineConfig(trace=True)``."""
        return list(self._loop.records)

    def generate(
        self,
        prompts: Any,
        params: SamplingParams | list[SamplingParams] | None = None,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Outputs for ``prompts``, in their order.

        prompts: a str, a list of str, a list of token-id lists, or chat messages. params: one for
        all, or as many as there are prompts. progress: show a bar of finished completions.

        Raises ValueError naming field, value and what is allowed, and DeterminismError, before
        anything runs.
        """
        requests = self._submit(prompts, params)
        mine = [request.request_id for request in requests]
        self._outputs.update(dict.fromkeys(mine))
        total = sum(len(request.sequences) for request in requests)
        with tqdm(total=total, unit="completion", disable=not progress) as bar:
            try:
                while any(request_id in self._requests for request_id in mine):
                    self._advance()
                    bar.update(sum(s.finished for r in requests for s in r.sequences) - bar.n)
            except BaseException:
                self._cancel(requests)
                raise
            finally:
                outputs = [self._outputs.pop(request_id) for request_id in mine]
        return [output for output in outputs if output is not None]

    def stream(
        self, prompts: Any, params: SamplingParams | list[SamplingParams] | None = None
    ) -> EventStream:
        """Committed tokens of ``prompts`` as they come; arguments and errors as ``generate``.

        Requests whose events are not read to the end are aborted when the stream is closed.
        """
        requests = self._submit(prompts, params)
        for request in requests:
            self._outputs[request.request_id] = None
            self._events[request.request_id] = deque()
        return EventStream(requests, self.tokenizer, self._next_event, self._drop_stream)

    def add_request(self, prompt: Any, params: SamplingParams | None = None) -> str:
        """Queue one prompt; returns the id under which ``step`` will report it.

        Raises as ``generate``.
        """
        return self._submit([prompt], params)[0].request_id

    def step(self) -> list[RequestOutput]:
        """Run one pass; the outputs of requests that finished since the last call."""
        self._advance()
        finished, self._finished = self._finished, []
        return finished

    def abort(self, request_id: str) -> RequestOutput:
        """End a request at once; what it has so far comes back with finish_reason "abort".

        Raises ValueError if no request of that id is unfinished.
        """
        request = self._requests.get(request_id)
        if request is None:
            raise refuse("request_id", request_id, "the id of an unfinished request")
        output = self._cancel([request])[0]
        if request_id in self._outputs:
            self._deliver(output)  # to the call of ``generate`` that waits for it
        return output

    def has_unfinished(self) -> bool:
        """Whether ``step`` has anything left to do or to report."""
        return bool(self._requests or self._finished)

    def _submit(self, prompts: Any, params: Any) -> list[Request]:
        """Check everything, then queue everything."""
        if self._closed:
            raise refuse("engine", "closed", "an engine that is open")
        self._contract.look()
        requests = self._intake.requests(prompts, params)
        fingerprint = self._contract.known
        if any(request.params.deterministic for request in requests):
            self._contract.prove()
            fingerprint = self._contract.fingerprint
        for request in requests:
            self._requests[request.request_id] = request
            self._fingerprints[request.request_id] = fingerprint
            self._scheduler.add(request.sequences[0])
        return requests

    def _advance(self) -> None:
        """One step; its events and the outputs of what it finished go to where they are awaited."""
        with deferred_interrupt():
            try:
                events = self._loop.step()
            except BaseException:
                self._loop.abandon()
                raise
            finally:
                for request in [r for r in self._requests.values() if r.finished]:
                    self._deliver(self._retire(request))
            for event in events:
                if event.request_id in self._events:
                    self._events[event.request_id].append(event)

    def _deliver(self, output: RequestOutput) -> None:
        if output.request_id in self._outputs:
            self._outputs[output.request_id] = output
        else:
            self._finished.append(output)

    def _next_event(self, requests: list[Request]) -> StreamEvent | None:
        """The next event of a stream's requests, None when there are no more."""
        while True:
            for request in requests:
                waiting = self._events.get(request.request_id)
                if waiting:
                    return waiting.popleft()
            if not any(request.request_id in self._requests for request in requests):
                return None
            self._advance()

    def _drop_stream(self, requests: list[Request]) -> None:
        self._cancel(requests)
        for request in requests:
            self._outputs.pop(request.request_id, None)
            self._events.pop(request.request_id, None)

    def _cancel(self, requests: list[Request]) -> list[RequestOutput]:
        """Abort those of ``requests`` that are unfinished."""
        outputs = []
        for request in requests:
            if self._requests.get(request.request_id) is request:
                for sequence in request.sequences:
                    if not sequence.finished:
                        sequence.finish_reason = "abort"
                        self._scheduler.remove(sequence)
                outputs.append(self._retire(request))
        return outputs

    def _retire(self, request: Request) -> RequestOutput:
        """Forget a request and make its output."""
        del self._requests[request.request_id]
        return RequestOutput(
            request_id=request.request_id,
            prompt_token_ids=request.prompt,
            params=request.params,
            completions=[completion_of(s, self.tokenizer) for s in request.sequences],
            fingerprint=self._fingerprints.pop(request.request_id),
            prompt_logprobs=request.prompt_logprobs or None,
        )
