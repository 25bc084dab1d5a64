"""Engine: requests in, finished outputs and streamed events out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from tinyspec.config import EngineConfig
from tinyspec.determinism.contract import Contract
from tinyspec.determinism.fingerprint import ExtraModules
from tinyspec.drafts.drafter import in_order, make_drafter
from tinyspec.engine.core import EngineCore
from tinyspec.engine.driver import not_copied
from tinyspec.engine.input_processor import InputProcessor, checked_priority, loaded
from tinyspec.engine.request_tracker import ASKED, RequestTracker
from tinyspec.engine.results import EventStream, output_of, scores_of
from tinyspec.engine.trace import Trace
from tinyspec.errors import refuse, unsupported
from tinyspec.interrupts import between_steps, flush
from tinyspec.kernels import backend
from tinyspec.model.install import install
from tinyspec.model.served_model import ServedModel
from tinyspec.model.supported import max_positions
from tinyspec.model.wrappers import autocast_of
from tinyspec.outputs import RequestOutput
from tinyspec.runner.model_runner import ModelRunner
from tinyspec.runner.parity_check import check_parity
from tinyspec.sampling_params import SamplingParams
from tinyspec.scheduler.admission import Admission
from tinyspec.scheduler.buckets import Buckets, ladder
from tinyspec.scheduler.page_pool import PagePool
from tinyspec.scheduler.passes import EngineStats, PassRecord
from tinyspec.scheduler.request import Request
from tinyspec.thinking.model import ThinkingModel
from tinyspec.thinking.thinker import Thinker, unwrapped

Params = SamplingParams | list[SamplingParams] | None
Make = Callable[[InputProcessor], list[Request]]


class Engine:
    """Generates from a loaded causal LM, by a copy of its modules over the same weights.

    model: a transformers causal LM on one device; of PEFT's or torch.compile's wrapper the model
    inside is served. tokenizer: for text prompts, stop strings and text outputs. grows: start with
    one page, ``reserve`` makes room (not where ``config`` sets ``num_pages``). A context manager.

    Threads may share one: requests of all, and the user's code in them, run in the same passes in
    any thread that waits, and any thread's ``step`` returns what ``add_request`` of all gave.
    For tests and tools to look at, and free to change: ``core`` (one step), ``admission`` (waiting
    and running sequences), ``pool`` (pages), ``runner`` (one pass), ``served`` (the copy that
    runs), ``tracker`` (unfinished requests), ``contract`` (fingerprint and proof).

    The model is never touched: it can be run, trained, changed, saved and copied at any time, and
    several engines may serve it. Every call follows what changed of it since the last one; plain
    requests that are running then start again, deterministic ones with tokens are aborted.

    Made under torch.autocast, or of a model whose forward turns that on (accelerate's ``prepare``),
    it serves in that precision for good: ``autocast``, a dtype or None.
    Raises UnsupportedModelError, or ValueError for a setting that does not fit.
    """

    @between_steps()
    def __init__(
        self,
        model: PreTrainedModel | ThinkingModel,
        tokenizer: Any = None,
        config: EngineConfig | None = None,
        *,
        grows: bool = False,
    ):
        if not isinstance(config, EngineConfig | None):
            raise refuse("config", config, "None or an EngineConfig")
        config = config or EngineConfig()
        own, thinking = unwrapped(model)
        device = own.device.type
        config = config.resolve(device_type=device, model_positions=max_positions(own))
        assert config.page_size and config.max_rows and config.reference_rows
        if (reason := backend.refusal(config.backend, device)) is not None:
            raise refuse("backend", config.backend, reason)
        self.drafter = drafter = make_drafter(config.drafter, own)
        self.model, self.tokenizer, self.config = own, tokenizer, config
        self.autocast = autocast_of(model, device)
        if self.autocast is not None and thinking is not None:
            raise unsupported(model, "thinking is not served under autocast")
        self._grows, self._thinking = grows and config.num_pages is None, thinking
        self._thinker = None if thinking is None else Thinker(thinking, config)
        kernels = backend.load(config.backend)
        self.served = served = install(own, config, thinking, self.autocast)
        sizes = ladder(config, device)
        buckets = Buckets(config.max_rows, config.reference_rows, sizes, one_list=device == "cpu")
        self.pool = pool = PagePool(1, config.page_size)
        self.admission = admission = Admission(config, pool)
        states = admission.checkpoints.count, admission.checkpoints.ring
        self.runner = runner = ModelRunner(served, pool, kernels, buckets, config, states)
        admission.checkpoints.on = bool(served.recurrent)
        check_parity(served, runner)
        self.core = EngineCore(config, admission, runner, tokenizer, self._thinker)
        if isinstance(assistant := in_order(drafter)[-1], PreTrainedModel):
            self.core.assistant.serve(assistant)
        if not self._grows:
            pool.resize(runner.most_pages())
        self.contract = Contract(runner, self._served_blocks(served), self._renew)
        self.tracker = RequestTracker(self.core, self.contract)
        self.driver = self.tracker.driver
        self.contract.proving.others = self.tracker.pause
        self._inputs = InputProcessor(own, tokenizer, config, pool, self._thinker, drafter)
        self._outputs: list[RequestOutput] = []
        flush()

    def _renew(self) -> None:
        """Serve the model as it is now, which has another structure."""
        if (device := self.model.device) != (own := self.runner.device):
            raise refuse("model.device", str(device), f"{own}, where this engine was made")
        served = install(self.model, self.config, self._thinking, self.autocast)
        extra = self._served_blocks(served)
        self.core.drain()
        self.served.outline.release()
        self.served = served
        self.admission.checkpoints.on = bool(served.recurrent)
        self.runner.serve(served)
        self.contract.serve(served, extra)

    def _served_blocks(self, served: ServedModel) -> ExtraModules | None:
        """Let the thinker, if there is one, run this shadow's blocks; what they are."""
        if self._thinker is None:
            return None
        self._thinker.serve(served.root, self.runner.torch_state)
        return self._thinker.extra_modules

    __reduce__ = not_copied

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def closed(self) -> str | None:
        """Why it runs nothing any more."""
        return self.tracker.closed

    def close(self) -> None:
        """Abort what is unfinished and give the memory back.

        Raises RuntimeError where code of the user's that a step calls asks for it.
        """
        if self.closed is None:
            with self.driver.turn("close"):
                self.tracker.close()
                self.core.drain()
                self.runner.release()
                self.core.assistant.release()
                self.served.outline.release()

    def _refuse_unfinished(self, what: str) -> None:
        """Raise ValueError for ``what`` neither a closed nor a running engine does."""
        self.contract.proving.wait()
        self.tracker.refuse_closed()
        if unfinished := len(self.tracker.requests):
            raise refuse(what, f"{unfinished} unfinished requests", "none")
        self.core.drain()

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto",
        config: EngineConfig | None = None,
        **given: Any,
    ) -> Engine:
        """An engine for a model on the hub or in a folder; device "auto": a GPU if there is one.

        given: transformers' ``revision, trust_remote_code, token, cache_dir, local_files_only,
        subfolder`` (of the tokenizer too), ``variant, use_safetensors, quantization_config,
        attn_implementation``; lora: PEFT's adapter; drafter: see ``loaded``. Where no tokenizer was
        saved, prompts are token ids. Raises ValueError naming what cannot be served.
        """
        return cls(*loaded(name_or_path, dtype, device, config, **given))

    def stats(self) -> EngineStats:
        """Sums over all passes so far."""
        self.core.stats.prepacked_bytes = self.runner.prepacked.most_bytes
        return self.core.stats

    @property
    def records(self) -> list[PassRecord]:
        """Records of the latest passes: 1000, or as many as ``EngineConfig(trace=...)`` says."""
        return list(self.core.records)

    @property
    def trace(self) -> Trace:
        """What every row of the latest passes was for, and what became of it. Raises ValueError
        unless ``EngineConfig(trace=True)`` keeps it."""
        if self.core.trace is None:
            raise refuse("trace", False, "an engine with EngineConfig(trace=True)")
        return self.core.trace

    def forget_plain(self) -> None:
        """Between calls whose plain outputs must not depend on earlier ones: the prefix cache keeps
        only pages of deterministic requests.

        Raises ValueError while requests are unfinished.
        """
        with self.driver.turn("forget_plain"):
            self._refuse_unfinished("forget_plain")
            self.admission.prefix.drop_plain()

    def end_call(self, releases: bool) -> None:
        """Where nothing is unfinished: ``forget_plain``, and ``release`` if ``releases``."""
        with self.driver.turn("end_call"):
            self.contract.proving.wait()
            if self.closed is None and not self.has_unfinished():
                self.core.drain()
                if releases:
                    self._give_back()
                self.admission.prefix.drop_plain()

    def reserve(self, num_pages: int) -> None:
        """Have a page pool of ``num_pages``, or as large as memory allows. A larger one is larger
        by a quarter at least, and new: what runs is computed again."""
        with self.driver.turn("reserve"):
            self.tracker.refuse_closed()
            self._reserve(num_pages)

    def _reserve(self, num_pages: int) -> None:
        there = self.pool.num_pages
        if num_pages > there and self.config.num_pages is None:
            most = self.runner.most_pages(self.runner.pages_taken)
            if (pages := min(max(num_pages, there + there // 4), most)) > there:
                self.core.drain()
                self._give_back(pages)

    def _give_back(self, num_pages: int | None = None) -> None:
        """Free the page pool's memory; the next pass takes that of ``num_pages``."""
        self.admission.forget_pages()
        self.runner.release()
        self.pool.resize(num_pages or (1 if self._grows else self.pool.num_pages))

    def release(self) -> None:
        """Give the page pool's memory back; the next request takes it again.

        Raises ValueError while requests are unfinished.
        """
        with self.driver.turn("release"):
            self._refuse_unfinished("release")
            self._give_back()

    @property
    def fingerprint(self) -> str:
        """Digest of everything that bits depend on; outputs with equal digests are comparable."""
        with self.driver.turn("fingerprint"):
            self.tracker.check_model()
            with self.contract.proving.pausing():
                return self.contract.fingerprint.digest

    def warm_up(self) -> None:
        """Prove now what requests would prove once it repays its time: every bucket that
        deterministic requests may use. Results are kept on disk.

        Raises ValueError while requests are unfinished, DeterminismError where none can be served.
        """
        with self.driver.turn("warm_up"):
            self._refuse_unfinished("warm_up")
            self.tracker.check_model()
            with self.contract.proving.pausing():
                self.contract.probe()
                self.contract.ensure()

    def check_model(self) -> None:
        """Compare weights, modules and threads with those of the last call; after a change, drop
        what was computed before. Raises ValueError for a closed engine, and what keeps the model as
        it is now from being served."""
        with self.driver.turn("check_model"):
            self.tracker.check_model()

    def weights_changed(self) -> None:
        """To call after writing to weights through ``.data``, which torch does not record."""
        self.tracker.weights_changed()

    def generate(
        self, prompts: Any, params: Params = None, progress: bool = False
    ) -> list[RequestOutput]:
        """Outputs for ``prompts``, in their order.

        prompts: text, token ids (tensors or what a tokenizer returns, too), chat messages; lists.
        params: one for all, or one a prompt. progress: show a bar of those finished.

        Raises ValueError naming the field, and DeterminismError, before anything runs.
        """
        return self.outputs("generate", lambda inputs: inputs.requests(prompts, params), progress)

    @between_steps()
    def outputs(self, what: str, make: Make, progress: bool = False) -> list[RequestOutput]:
        """Outputs of the requests that ``make`` makes in a turn of the call ``what``, in their
        order; progress and errors as of ``generate``."""
        requests = self._queued(what, make)
        each = partial(output_of, tokenizer=self.tokenizer)
        return self.tracker.run(requests, lambda: [*map(each, requests)], progress)

    @between_steps()
    def events(self, what: str, make: Make) -> EventStream:
        """As ``outputs``, committed tokens as they come."""
        return EventStream(self._queued(what, make), self.tokenizer, self.tracker, self)

    def _queued(self, what: str, make: Make) -> list[Request]:
        with self.driver.turn(what):
            requests = make(self.ready())
            self.tracker.add(requests)
        return requests

    def score(
        self, prompts: Any, continuations: Any, params: Params = None, progress: bool = False
    ) -> list[list[float]]:
        """Log-probability of every token of each continuation of its prompt.

        The bits are those that ``generate`` gives the same tokens under the same ``params``
        (default: greedy); prompts share canonical passes. continuations: one a prompt, token ids or
        text (taken without special tokens); nothing stops one early. progress: as for ``generate``.

        Raises as ``generate``, and RuntimeError where a pass failed or logits were not finite.
        """
        given = prompts, continuations, params
        return scores_of(self.outputs("score", lambda inputs: inputs.scored(*given), progress))

    def replay(
        self, outputs: Sequence[RequestOutput], progress: bool = False
    ) -> list[RequestOutput]:
        """Finished requests computed again, with their tokens as drafts.

        A completion ends with the first token that differs from the given output's, with
        finish_reason "abort". ``tinyspec.audit`` compares the two. progress: as for ``generate``.
        """
        return self.outputs("replay", lambda inputs: inputs.replayed(outputs), progress)

    def stream(self, prompts: Any, params: Params = None) -> EventStream:
        """Committed tokens of ``prompts`` as they come; arguments and errors as ``generate``.

        Closing the stream aborts what is unfinished.
        """
        return self.events("stream", lambda inputs: inputs.requests(prompts, params))

    def add_request(
        self, prompt: Any, params: SamplingParams | None = None, priority: int = 0
    ) -> str:
        """Queue one prompt; the id under which ``step`` will report it. priority: the lowest of
        those that wait begin first. Raises as ``generate``."""
        order = checked_priority(priority)
        with self.driver.turn("add_request"):
            (request,) = self.ready().requests([prompt], params)
            request.priority = order
            self.tracker.add([request])
            self.tracker.queued[request.request_id] = request
            return request.request_id

    def step(self) -> list[RequestOutput]:
        """Run one pass; the outputs of requests that finished since the last call."""
        with self.driver.turn("step"):
            self.tracker.refuse_closed()
            self.tracker.step()
            queued, unfinished = self.tracker.queued, self.tracker.requests
            for name in [each for each in queued if each not in unfinished]:
                request = queued.pop(name)  # what a tokenizer raises leaves the rest
                self._outputs.append(output_of(request, self.tokenizer))
            outputs, self._outputs = self._outputs, []
            return outputs

    def abort(self, request_id: str) -> RequestOutput:
        """End a request, within a step with that; its output so far, with finish_reason "abort".
        Raises ValueError if no request of that id is unfinished."""

        def ended(request: Request) -> RequestOutput:
            output = output_of(request, self.tokenizer)
            for completion in output.completions:
                if completion.finish_reason is None:  # the pass that this is called in ends it
                    completion.finish_reason, completion.error = "abort", ASKED
            return output

        return self.tracker.abort(request_id, ended)

    def has_unfinished(self) -> bool:
        """Whether ``step`` has anything left to run or to return."""
        return self.tracker.has_unfinished() or bool(self._outputs)

    def ready(self, num_pages: int = 0) -> InputProcessor:
        """The maker of requests, in a turn, after the look with which a submit begins; with room
        for ``num_pages`` more, where memory allows."""
        self.tracker.check_model()
        if num_pages:
            self._reserve(num_pages + self.pool.num_held)  # by calls of other threads
        elif not (self._grows or self.runner.holds_memory or self.tracker.requests):
            self.pool.resize(self.runner.most_pages())
        return self._inputs
