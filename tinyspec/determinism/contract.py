"""Whether this engine can serve ``deterministic=True``, and the fingerprint of its outputs.

Before the first deterministic token probes find whether the reference bucket is sound. Every other
bucket of the ladder is proven whole, in one go, once requests would have used it often enough, or
all by ``probe``. What is found depends on modules, shapes and device, not on the values of weights,
and is kept on disk.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace

import torch

from tinyspec.config import EngineConfig
from tinyspec.determinism import probe_cache
from tinyspec.determinism.beside import Beside
from tinyspec.determinism.environment import ambient
from tinyspec.determinism.fingerprint import digest_weights, fingerprint
from tinyspec.determinism.fingerprint_parts import Fingerprint
from tinyspec.determinism.ladder import Ladder
from tinyspec.determinism.model_state import (
    LIBRARIES,
    adapter_state,
    experts,
    layouts,
    runs_user_code,
    settings,
    top_package,
)
from tinyspec.determinism.probe_results import ProbeResults, unsound_message
from tinyspec.determinism.probes.attention import MANY_ROWS
from tinyspec.determinism.probes.autocast import refuse_autocast, refuse_written
from tinyspec.determinism.probes.model import ModelProbe
from tinyspec.determinism.probes.prober import Prober
from tinyspec.determinism.probes.proof import ReferenceProof, prove, set_tiles
from tinyspec.errors import DeterminismError
from tinyspec.kernels import backend
from tinyspec.model.linear_kinds import linear_kinds
from tinyspec.model.linears import kernel_stand_ins
from tinyspec.model.outline import WEIGHTS
from tinyspec.model.quantized import unprovable
from tinyspec.model.served_model import ServedModel, served_of
from tinyspec.model.torch_state import refuse_unpinnable
from tinyspec.runner.model_runner import ModelRunner
from tinyspec.scheduler.buckets import Buckets

logger = logging.getLogger("tinyspec")
THREADS, PROCESS = "the number of threads", "the state of the process"


class LinearModes:
    """How the linears of one engine's model run so that results hold: by the linear kernel, or in
    tiles of rows."""

    def __init__(self, served: ServedModel, runner: ModelRunner, config: EngineConfig):
        self._served, self._runner, self._config = served, runner, config
        self._num_swapped = len(served.swapped)
        self._tiled: tuple[str, ...] = ()

    def serve_kinds(self, kinds: Collection[str]) -> tuple[str, ...]:
        """Let the linear kernel serve all plain linears of these kinds, unless the config fixes
        whom it serves; their names."""
        if self._config.linear != "auto":
            return ()
        every = linear_kinds(self._served.model)
        return self.serve([name for kind in kinds for name in every[kind]])

    def serve(self, names: Collection[str]) -> tuple[str, ...]:
        """Let the linear kernel serve the plain linears among ``names``; the names of those."""
        if not names:
            return ()
        model = self._served.model
        before = {name: model.get_submodule(name) for name in names}
        linear = backend.load(self._config.backend).linear
        for parent, name, module in kernel_stand_ins(model, linear, only=names):
            self._served.swap(parent, name, module)
        self._runner.drop_graphs()
        return tuple(n for n in names if model.get_submodule(n) is not before[n])

    def tile(self, names: tuple[str, ...]) -> None:
        """Run linears of these kinds in tiles of rows in large canonical passes."""
        if self._tiled != names:
            set_tiles(self._runner, names)
            self._tiled = names
            self._runner.drop_graphs()

    def restore(self) -> None:
        """Every linear as it was when the engine was made."""
        self._runner.tiles.unbind()
        self._served.undo(self._num_swapped)
        self._tiled = ()
        self._runner.drop_graphs()


class Contract:
    """Fingerprint and probe results of one engine.

    buckets: of the engine; canonical ones are marked as they become known. known_fingerprint: None
    before it is first needed and after the model changed. runs_user_code: whether passes run hooks
    or modules of no known library. renew: makes another shadow, which is given to ``serve``. pause:
    called between the passes of a proof. results: what is known; None before it is first needed and
    after the model changed. beside: what runs beside the model.
    """

    def __init__(
        self,
        runner: ModelRunner,
        config: EngineConfig,
        beside: Beside | None = None,
        renew: Callable[[], None] = lambda: None,
    ):
        self.results: ProbeResults | None = None
        self._weights_digest: dict[str, str] | None = None
        self.known_fingerprint: Fingerprint | None = None
        self._runner, self._config = runner, config
        self._beside, self._renew = beside, renew
        self.buckets: Buckets = runner.buckets
        self._key = ""
        self.pause: Callable[[], None] = lambda: None
        self._ambient = ambient(runner.device)
        self.serve(served_of(runner.model))
        runner.graphs.runs_user_code = lambda: self.runs_user_code
        if uncounted := len(self._served.outline.uncounted):
            logger.warning(
                "%d tensors of the model were made in torch.inference_mode and count no writes: "
                "their bits are digested at every call and after code of the user's",
                uncounted,
            )

    def serve(self, served: ServedModel) -> None:
        """The model that the runner serves from now on: nothing is known of it."""
        self._served, self._model = served, served.model
        self._modes = LinearModes(served, self._runner, self._config)
        self._ladder = Ladder(self.buckets, self._config)
        self.runs_user_code = runs_user_code(served.root)
        served.mark_parameters(lambda module: top_package(type(module)) not in LIBRARIES)
        self._layouts = layouts(self._model)
        self._forget()

    def _forget(self) -> None:
        """What was found out of the model and the process holds no more."""
        self.results = None
        self.buckets.forget()
        self.drop_fingerprint()

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
            counters = self._served.counters()
            if self._weights_digest is None:
                self._weights_digest = self._digests(counters)
            given = (self._weights_digest, self._config, self._runner.device, counters)
            self.known_fingerprint = fingerprint(self._model, *given)
        return self.known_fingerprint

    def _digests(self, counters: set[str]) -> dict[str, str]:
        """Of weights, by the part of the fingerprint; counters: names of what passes changed."""
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
        return not same or self._served.outline.changed() is not None

    def refresh(self, digest: bool = True) -> str | None:
        """Follow what changed of process and model since the last call, and name it.

        The fingerprint is dropped, and probe results unless only numbers changed. digest: compare
        the weights' bits where ``EngineConfig(verify_weights=True)`` asks for it. Raises where the
        model cannot be served as it is now.
        """
        what = self._follow_process()
        change = self._served.outline.changed()
        if change is not None:
            self._runner.drop_graphs()
            if change.structure:
                self._renew()
            else:
                self.weights_changed()
            return change.what
        if digest and self._config.verify_weights:
            before = self._weights_digest
            self._weights_digest = self._digests(self._served.counters())
            if before not in (None, self._weights_digest):
                self.known_fingerprint = None
                return WEIGHTS
        return what

    def _follow_process(self) -> str | None:
        before, self._ambient = self._ambient, ambient(self._runner.device)
        if before == self._ambient:
            return None
        self._runner.drop_graphs()
        self._forget()
        return THREADS if before[0] != self._ambient[0] else PROCESS

    @property
    def written(self) -> set[str]:
        """Names of buffers that passes were seen to write to: no deterministic request may."""
        return self._served.written

    def weights_changed(self) -> None:
        """Numbers of weights did: what was computed from them is computed again."""
        self.drop_fingerprint()
        self._served.follow_weights()
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
            most = self._config.max_sequences
            largest = next((n for n in self.buckets.sizes if n >= most), self.buckets.sizes[-1])
            results = self._prove_more([rows for rows in self.buckets.sizes if rows <= largest])
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
        refuse_written(self._served.written)
        if self.results is None or fresh:
            reason = unprovable(self._model)
            if reason is not None:
                raise DeterminismError(
                    f"{reason}, so that the bits of a row depend on other rows; deterministic=True "
                    "needs weights without quantization, or quantization that does not depend on "
                    "activations"
                )
            self.results = None
            self._use(self._begin(fresh))
        assert self.results is not None
        return self.results

    def probe(self, fresh: bool = False, attention_rows: int = MANY_ROWS) -> ProbeResults:
        """All probe results, found at once. attention_rows: to compare of each kind."""
        if self.prove(fresh).unsound:
            return self.prove()
        return self._prove_more(self.buckets.sizes, attention_rows)

    def _prove_more(
        self, sizes: Collection[int], attention_rows: int | None = None
    ) -> ProbeResults:
        """The results with these buckets; attention_rows: as for ``prove``."""
        results, begun = self.prove(), time.perf_counter()
        new = [rows for rows in sizes if rows not in results.sizes]
        if not new and all(kind.checked >= (attention_rows or 0) for kind in results.attention):
            return results
        try:
            with self._runner.torch_state():
                prober = Prober(self._runner, self._config, self.pause)
                found = prove(prober, results, new, attention_rows)
        except BaseException:
            self._modes.tile(results.tiled)
            raise
        logger.info("proved passes of %s rows in %.1f s", new, time.perf_counter() - begun)
        self._use(found)
        return found

    def prove_repaid(self, seconds: float, accepted: float) -> bool:
        """After a pass of so many seconds with deterministic requests: prove a further bucket, if
        that is worth its time. False where the reference bucket turns out unsound: ``ensure``
        raises from then on. accepted: chance that a draft is."""
        results = self.results
        if results is None or results.unsound or self._config.verify == "always":
            return True
        rows = self._ladder.next(results, seconds, accepted)
        if rows is None or self.changed():  # that is looked at before the next pass
            return True
        try:
            results = self._prove_more([rows])
        except Exception as error:  # requests go on without it
            self._ladder.failed.add(rows)
            logger.warning("passes of %d rows could not be probed: %s", rows, error)
        return not results.unsound

    def _begin(self, fresh: bool) -> ProbeResults:
        """From disk, or of a proof of the reference bucket."""
        self._modes.restore()
        self.known_fingerprint = None
        self._key = self._results_key()
        if fresh:
            probe_cache.forget(self._key)
        results = None if fresh else probe_cache.load(self._key)
        if results is None:
            try:
                return self._prove_reference()
            except BaseException:
                self._modes.restore()
                raise
        if not results.unsound:
            self._modes.serve(results.kernel_linears)
        refuse_autocast(self._runner, self._warm_up)
        return results

    def _prove_reference(self) -> ProbeResults:
        logger.info("proving that deterministic=True can be kept, once for this model and machine")
        begun = time.perf_counter()
        state = self._runner.torch_state
        with state():
            proof = ReferenceProof(Prober(self._runner, self._config, self.pause))
            broken = proof.linears()
        served = self._modes.serve_kinds(broken)
        with state():
            if served:
                proof.linears()
            results = proof.rest(served)
        (bucket,) = results.buckets
        return results.with_bucket(replace(bucket, proof=time.perf_counter() - begun))

    def _warm_up(self) -> None:
        """Compiles and loads what a first pass needs, before a request."""
        sizes = self.buckets.sizes
        sizes = sizes if self._runner.device.type == "cuda" else [self.buckets.reference]
        ModelProbe(self._runner, self._config, sizes[-1]).warm_up(sizes)

    def _use(self, results: ProbeResults) -> None:
        """Let passes go by these results, and store them."""
        self.results = results
        if results.unsound:
            self._modes.restore()
            self.known_fingerprint = None
            self.buckets.forget()
        else:
            self._modes.tile(results.tiled)
            always = self._config.verify == "always"
            canonical = [results.reference] if always else results.canonical
            self.buckets.learn(canonical, results.seconds, results.own_way)
        probe_cache.store(self._key, results)

    def _results_key(self) -> str:
        """Of results on disk: all that they depend on, which no value of a weight is."""
        model = self._model
        rest = fingerprint(model, {"weights": ""}, self._config, self._runner.device).digest
        found = experts(model), layouts(model), settings(model), adapter_state(model)
        return probe_cache.key_of(rest, *found, self.buckets.sizes, self._config.linear)
