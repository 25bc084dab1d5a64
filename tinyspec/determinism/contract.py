"""Whether this engine can serve ``deterministic=True``, and the fingerprint of its outputs.

Before the first deterministic token probes find whether the reference bucket is sound. Which other
buckets are canonical, and what each costs, is learnt while requests run. What is found depends on
modules, shapes and device, not on the values of weights, and is kept on disk.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import torch

from tinyspec.config import EngineConfig
from tinyspec.determinism import probe_cache
from tinyspec.determinism.beside import Beside
from tinyspec.determinism.environment import ambient
from tinyspec.determinism.fingerprint import digest_weights, fingerprint
from tinyspec.determinism.fingerprint_parts import Fingerprint
from tinyspec.determinism.learner import SLICE, Learner
from tinyspec.determinism.model_state import (
    adapter_state,
    experts,
    layouts,
    runs_user_code,
    settings,
)
from tinyspec.determinism.module_ways import ModuleWays
from tinyspec.determinism.notice import Notice
from tinyspec.determinism.probe_results import ProbeResults, unsound_message
from tinyspec.determinism.probes.autocast import refuse_autocast, refuse_written
from tinyspec.determinism.probes.reference import ReferenceProof
from tinyspec.determinism.probes.steps import Steps, finished
from tinyspec.determinism.probes.workspace import Workspace, warm_up
from tinyspec.errors import DeterminismError
from tinyspec.model.outline import WEIGHTS
from tinyspec.model.patched_model import PatchedModel, patched_of
from tinyspec.model.quantized import unprovable
from tinyspec.model.torch_state import refuse_unpinnable
from tinyspec.runner.model_runner import ModelRunner
from tinyspec.scheduler.buckets import Buckets

T = TypeVar("T")
logger = logging.getLogger("tinyspec")
THREADS, PROCESS = "the number of threads", "the state of the process"
WAITING = "proving that deterministic=True can be kept here, once for this model and machine"


class Contract:
    """Fingerprint and probe results of one engine.

    buckets: of the engine; canonical ones are marked as they become known. known_fingerprint: None
    before it is first needed and after the model changed. runs_user_code: whether passes run hooks
    or modules of no known library. renew: makes another shadow, which is given to ``serve``. pause:
    called between the steps of a proof. beside: what runs beside the model.
    """

    def __init__(
        self,
        runner: ModelRunner,
        config: EngineConfig,
        beside: Beside | None = None,
        renew: Callable[[], None] = lambda: None,
    ):
        self._learner: Learner | None = None
        self._weights_digest: dict[str, str] | None = None
        self.known_fingerprint: Fingerprint | None = None
        self._runner, self._config = runner, config
        self._beside, self._renew = beside, renew
        self.buckets: Buckets = runner.buckets
        self._on_disk = probe_cache.Growing("")
        self.pause: Callable[[], None] = lambda: None
        self._ambient = ambient(runner.device)
        self.serve(patched_of(runner.model))
        runner.graphs.runs_user_code = lambda: self.runs_user_code
        if uncounted := len(self._patched.outline.uncounted):
            logger.warning(
                "%d tensors of the model were made in torch.inference_mode and count no writes: "
                "their bits are digested at every call and after code of the user's",
                uncounted,
            )

    def serve(self, patched: PatchedModel) -> None:
        """The model that the runner serves from now on: nothing is known of it."""
        self._patched, self._model = patched, patched.model
        self._ways = ModuleWays(patched, self._runner, self._config)
        self.runs_user_code = runs_user_code(patched.root)
        self._layouts = layouts(self._model)
        self._forget()

    def _forget(self) -> None:
        """What was found out of the model and the process holds no more."""
        self._learner = None
        self.buckets.forget()
        self.drop_fingerprint()

    @property
    def results(self) -> ProbeResults | None:
        """What is known; None before it is first needed and after the model changed."""
        return None if self._learner is None else self._learner.results

    @property
    def fingerprint(self) -> Fingerprint:
        """The fingerprint, computed when first asked for or after something changed.

        With ``linear="auto"`` the reference bucket is proven first: which modules the linear kernel
        serves is part of the fingerprint.
        """
        if self._config.linear == "auto":
            with suppress(DeterminismError):
                self.prove()
        return self._current_fingerprint()

    def _current_fingerprint(self) -> Fingerprint:
        """The fingerprint with the modules that are installed now."""
        if self.known_fingerprint is None:
            if self._weights_digest is None:
                self._weights_digest = self._digests()
            counters = self._patched.counters()
            given = (self._weights_digest, self._config, self._runner.device, counters)
            self.known_fingerprint = fingerprint(self._model, *given)
        return self.known_fingerprint

    def _digests(self) -> dict[str, str]:
        """Of weights, by the part of the fingerprint."""
        counters = self._patched.counters()
        found = {"weights": digest_weights(self._model, counters)}
        if self._beside is not None:
            found[self._beside.name] = self._beside.digest(counters)
        return found

    def drop_fingerprint(self) -> None:
        """The weights changed: the next fingerprint needs a new digest of them."""
        self._weights_digest = self.known_fingerprint = None

    @property
    def threads_changed(self) -> bool:
        """Whether torch runs on another number of threads."""
        return torch.get_num_threads() != self._ambient[0]

    def changed(self) -> bool:
        """Whether anything may have changed since the last ``refresh``."""
        same = ambient(self._runner.device) == self._ambient
        return not same or self._patched.outline.changed() is not None

    def refresh(self, digest: bool = True) -> str | None:
        """Follow what changed of process and model since the last call, and name it.

        The fingerprint is dropped, and probe results unless only numbers changed. digest: compare
        the weights' bits where ``EngineConfig(verify_weights=True)`` asks for it. Raises where the
        model cannot be served as it is now.
        """
        what = self._follow_process()
        change = self._patched.outline.changed()
        if change is not None:
            self.rest()
            if change.structure:
                self._renew()
            else:
                self.weights_changed()
            return change.what
        if digest and self._config.verify_weights:
            before, self._weights_digest = self._weights_digest, self._digests()
            if before not in (None, self._weights_digest):
                self.known_fingerprint = None
                return WEIGHTS
        return what

    def _follow_process(self) -> str | None:
        before, self._ambient = self._ambient, ambient(self._runner.device)
        if before == self._ambient:
            return None
        self.rest()
        self._forget()
        return THREADS if before[0] != self._ambient[0] else PROCESS

    def marks(self) -> list[tuple[str, object]]:
        """Before a step, for ``after_step``."""
        return self._patched.marks()

    def after_step(self, marks: list[tuple[str, object]]) -> bool:
        """Whether passes of the step wrote to buffers, which deterministic requests end with."""
        return self._patched.keep_apart(marks)

    def weights_changed(self) -> None:
        """Numbers of weights did: what was computed from them is computed again."""
        self.drop_fingerprint()
        self._patched.follow_weights()
        if self._beside is not None:
            self._beside.on_change()
        if (found := layouts(self._model)) != self._layouts:
            self._layouts = found
            self._forget()

    def ensure(self) -> None:
        """Raise DeterminismError unless ``deterministic=True`` can be served; proves it first."""
        results = self.prove()
        if results.unsound:
            raise DeterminismError(unsound_message(results))
        if self._config.verify == "direct":
            largest = self.buckets.fit(self._config.max_sequences)
            self._find([rows for rows in self.buckets.sizes if rows <= largest])
            results = self.prove()
            lacking = [b.rows for b in results.buckets if b.rows <= largest and not b.canonical]
            if lacking:
                raise DeterminismError(
                    f"verify='direct' needs canonical buckets for up to max_sequences="
                    f"{self._config.max_sequences} rows, and these buckets are not canonical: "
                    f"{', '.join(map(str, lacking))}; use verify='auto', other reference_rows, or "
                    "linear='always'"
                )

    def prove(self, fresh: bool = False) -> ProbeResults:
        """What is known, the reference bucket at least: so far, on disk, or by a new proof (always
        if ``fresh``).

        Raises DeterminismError for TunableOp, kernels that no probe can prove, and own writes.
        """
        refuse_unpinnable(self._runner.device.type)
        refuse_written(self._patched.written)
        if self._learner is None or fresh:
            reason = unprovable(self._model)
            if reason is not None:
                raise DeterminismError(
                    f"{reason}, so that the bits of a row depend on other rows; deterministic=True "
                    "needs weights without quantization, or quantization that does not depend on "
                    "activations"
                )
            self._learner = None
            self._learner = self._begin(fresh)
            self._use(self._learner.results)
        return self._learner.results

    def probe(self, fresh: bool = False, attention_rows: int = 0) -> ProbeResults:
        """All probe results, found at once. attention_rows: to compare of each kind."""
        self.prove(fresh)
        self._find(None, attention_rows)
        return self.prove()

    def _find(self, sizes: list[int] | None, attention_rows: int = 0) -> None:
        assert self._learner is not None
        try:
            with self._runner.torch_state():
                self._learner.finish(sizes, attention_rows)
        finally:
            self._on_disk.save(self._learner.results)

    def learn(self, seconds: float) -> bool:
        """Between passes, which took ``seconds``: go on with what is not known. False where the
        reference bucket turns out unsound: ``ensure`` raises from then on."""
        learner = self._learner
        if learner is None or self._config.verify == "always" or not learner.earn(seconds):
            return True
        if not self.changed():  # what changed is looked at before the next pass
            with self._runner.torch_state():
                learner.learn()
            self._on_disk.keep(learner.results)
        return not learner.results.unsound

    def rest(self) -> None:
        """Store what is known, and free the memory that learning and graphs take."""
        self._runner.drop_graphs()
        if self._learner is not None:
            self._on_disk.save(self._learner.results)
            self._learner.rest()

    def _begin(self, fresh: bool) -> Learner:
        """With results from disk or of a proof of the reference bucket."""
        self._ways.restore()
        self.known_fingerprint = None
        key = self._results_key()
        self._on_disk = probe_cache.Growing(key)
        if fresh:
            probe_cache.forget(key)
        results = None if fresh else probe_cache.load(key)
        work: Workspace | None = None
        if results is None:
            with self._runner.torch_state():
                work = Workspace(self._runner, self._config, SLICE)
            try:
                results = self._prove_reference(work)
            except BaseException:
                self._ways.restore()
                raise
        else:
            if not results.unsound:
                self._ways.serve(results.kernel_linears)
            refuse_autocast(self._runner, lambda: warm_up(self._runner, self._config))
        return Learner(self._runner, self._config, results, self._use, work)

    def _prove_reference(self, work: Workspace) -> ProbeResults:
        proof = ReferenceProof(work)
        notice = Notice(WAITING, self.pause, lambda: proof.stage)

        def run(steps: Steps[T]) -> T:
            with self._runner.torch_state():
                return finished(steps, notice)

        served: tuple[str, ...] = ()
        if broken := run(proof.linears()):
            served = self._ways.serve_kinds(broken)
            if served:
                run(proof.linears())
        return run(proof.rest(served))

    def _use(self, results: ProbeResults) -> None:
        """Let passes go by these results, and store them."""
        if results.unsound:
            self._ways.restore()
            self.known_fingerprint = None
        else:
            self._ways.set(results.tiles, results.swapped)
        self._update_buckets(results)
        self._on_disk.keep(results)

    def _results_key(self) -> str:
        """Of results on disk: all that they depend on, which no value of a weight is."""
        model = self._model
        rest = fingerprint(model, {"weights": ""}, self._config, self._runner.device).digest
        found = experts(model), layouts(model), settings(model), adapter_state(model)
        return probe_cache.key_of(rest, *found, self.buckets.sizes, self._config.linear)

    def _update_buckets(self, results: ProbeResults) -> None:
        results = results.filled()
        if results.unsound:
            self.buckets.forget()
        elif self._config.verify == "always":
            self.buckets.learn([results.reference], results.seconds)
        else:
            self.buckets.learn(results.canonical, results.seconds, results.tiled)
