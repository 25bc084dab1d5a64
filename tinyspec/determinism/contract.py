"""Whether this engine can serve ``deterministic=True``, and the fingerprint of its outputs.

At the first deterministic request probes measure which buckets are canonical, what each costs, and
whether the reference bucket is sound. Their results depend on modules, shapes and device, not on
the values of weights, and are kept on disk.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from transformers import PreTrainedModel

from tinyspec.config import EngineConfig
from tinyspec.determinism import probe_cache
from tinyspec.determinism.fingerprint import digest_weights, fingerprint
from tinyspec.determinism.model_state import LAYOUT, adapter_state, experts, layouts, settings
from tinyspec.determinism.model_watch import OBJECT, ModelWatch
from tinyspec.determinism.probe_results import ProbeResults
from tinyspec.determinism.probes.attention import probe_attention, summary
from tinyspec.determinism.probes.autocast import refuse_autocast
from tinyspec.determinism.probes.buckets import probe_buckets, warm_up
from tinyspec.determinism.probes.linears import probe_linears, set_direct, set_tiles
from tinyspec.determinism.probes.row_functions import BucketInvariance
from tinyspec.errors import DeterminismError
from tinyspec.kernels import backend
from tinyspec.model.install import patched_of
from tinyspec.model.linear_kinds import linear_kinds
from tinyspec.model.linears import kernel_stand_ins
from tinyspec.model.quantized import repack_weights, unprovable
from tinyspec.model.scratch_model import ScratchModel
from tinyspec.model.torch_state import refuse_unpinnable
from tinyspec.runner.capacity import refuse_shortage
from tinyspec.runner.model_runner import ModelRunner
from tinyspec.scheduler.buckets import Buckets


class Contract:
    """Fingerprint and probe results of one engine.

    buckets: of the engine; canonical ones are marked once they are probed. known_fingerprint,
    results: None before they are first needed and after the model changed. watch: the model as it
    was at the last ``refresh``. stale: what of the model changed that the engine took from it when
    it was made, or None.
    """

    def __init__(self, model: PreTrainedModel, runner: ModelRunner, config: EngineConfig):
        self._model = model
        self._runner = runner
        self._config = config
        self._patched = patched_of(model)
        self.buckets: Buckets = runner.buckets
        self._num_swapped = len(self._patched.swapped)
        self._weights_digest: str | None = None
        self.known_fingerprint: str | None = None
        self.results: ProbeResults | None = None
        self._probed_structure: object = None
        self._key_on_disk = ""
        self._patched.experts.serve(config.linear)
        repack_weights(self._model, self._model.dtype)
        self.watch = ModelWatch(self._patched, runner.torch_state)
        self._taken_over = self.watch.taken_over
        self.stale: str | None = None
        runner.after_pass = self.watch.absorb

    @property
    def outdated(self) -> bool:
        """Whether the model changed since it was probed, so that it must be probed again."""
        return self._probed_structure is not None and self.results is None

    @property
    def fingerprint(self) -> str:
        """The fingerprint, computed when first asked for or after something changed.

        With ``linear="auto"`` the model is probed first: which modules the linear kernel serves is
        part of the fingerprint.
        """
        if self._config.linear == "auto":
            with suppress(DeterminismError):
                self.probe()
        return self._current_fingerprint()

    def _current_fingerprint(self) -> str:
        """The fingerprint with the modules that are installed now."""
        if self.known_fingerprint is None:
            if self._weights_digest is None:
                self._weights_digest = digest_weights(self._model, self.watch.counters)
            self.known_fingerprint = fingerprint(
                self._model,
                self._weights_digest,
                self._config,
                self._runner.device,
                self.watch.counters,
            )
        return self.known_fingerprint

    def drop_fingerprint(self) -> None:
        """The weights changed: the next fingerprint needs a new digest of them."""
        self._weights_digest = self.known_fingerprint = None

    def refresh(self, digest: bool = True) -> list[str]:
        """Names of the weights, modules, settings and so on that changed since the last call.

        If there are any the fingerprint is dropped, and the probe results as well unless only
        weights changed. digest: compare the weights' bits as ``EngineConfig(verify_weights=True)``
        asks for.
        """
        changes = self.watch.update()
        before = self._weights_digest
        if changes:
            self.drop_fingerprint()
            self.stale = self._changed_since_load()
        elif digest and self._config.verify_weights:
            self._weights_digest = digest_weights(self._model, self.watch.counters)
            if before is not None and before != self._weights_digest:
                self.known_fingerprint = None
                changes = list(self.watch.weights)
        if self.results is not None and self.watch.structure != self._probed_structure:
            self.results = None
            self.buckets.forget()
        return changes

    def _changed_since_load(self) -> str | None:
        """The first thing that the engine took from the model and that is not so any more."""
        now, then = self.watch.taken_over, self._taken_over
        return next((n for n in {**then, **now} if n not in now or now[n] != then.get(n)), None)

    def summary(self, changes: list[str]) -> str:
        """What changed, in a few words."""
        told = [n for n in changes if n not in self.watch.weights and not n.startswith(LAYOUT)]
        named = [n for n in told if not n.startswith(OBJECT)]
        if not told or (not named and len(told) < len(changes)):
            return "the weights"  # and perhaps the objects that hold them
        shown = list(dict.fromkeys(n.removeprefix(OBJECT) for n in named or told))
        return ", ".join(shown[:3]) + (" and more" if len(shown) > 3 else "")

    def ensure(self) -> None:
        """Raise DeterminismError, with the reason and the remedy, unless ``deterministic=True`` can
        be served; probes the model if it has not been probed."""
        results = self.probe()
        if results.unsound:
            raise DeterminismError(_unsound_message(results))
        if self._config.verify == "direct":
            largest = self.buckets.fit(self._config.max_sequences)
            lacking = [b.rows for b in results.buckets if b.rows <= largest and not b.canonical]
            if lacking:
                raise DeterminismError(
                    f"verify='direct' needs canonical buckets for up to max_sequences="
                    f"{self._config.max_sequences} rows, and these buckets are not canonical: "
                    f"{', '.join(map(str, lacking))}; use verify='auto', other reference_rows, or "
                    "linear='always'"
                )

    def probe(self, fresh: bool = False) -> ProbeResults:
        """The probe results: those known or on disk, or of a new probe (always if ``fresh``).

        Raises DeterminismError where TunableOp is on, and for kernels that no probe can prove.
        """
        refuse_unpinnable(self._runner.device.type)
        if self.results is None or fresh:
            reason = unprovable(self._model)
            if reason is not None:
                raise DeterminismError(
                    f"{reason}, so that the bits of a row depend on other rows; deterministic=True "
                    "needs weights without quantization, or quantization that does not depend on "
                    "activations"
                )
            self.results = None
            refuse_autocast(self._runner, self._config)
            self.results = self._load_or_probe(fresh)
            known = len(self.watch.counters)
            self.watch.absorb(everything=True)
            if len(self.watch.counters) > known:
                self.drop_fingerprint()
            self.watch.record()
            self._probed_structure = self.watch.structure
            self._update_buckets(self.results)
        return self.results

    def probe_attention(self, rows: int) -> None:
        """Compare at least so many rows of each kind of attention, unless that was done before."""
        results = self.probe()
        if all(kind.checked >= rows or kind.differing for kind in results.attention):
            return
        with self._runner.torch_state():
            found = probe_attention(self._runner, rows, seconds=None)
        self.results = results.with_attention(*summary(found))
        if self.results.unsound:
            self._restore_modules()
        self._update_buckets(self.results)
        probe_cache.store(self._key_on_disk, self.results)

    def _load_or_probe(self, fresh: bool) -> ProbeResults:
        """Results from disk or of a probe; afterwards modules run as these say."""
        self._restore_modules()
        buckets = self.buckets
        key = self._key_on_disk = self._results_key()
        results = None if fresh else probe_cache.load(key)
        if results is not None and results.sizes == buckets.sizes:
            if not results.unsound:
                self._swap_in_kernel(results.kernel_linears)
                set_tiles(self._runner, results.tiles)
                set_direct(self._runner, results.direct)
            with self._runner.torch_state():
                warm_up(self._runner, self._config)
            return results
        scratch = ScratchModel(self._model)
        refuse_shortage(scratch.nbytes, self._runner.device)
        with self._runner.torch_state():
            linears = probe_linears(self._runner, scratch)
        swapped: tuple[str, ...] = ()
        if self._config.linear == "auto":
            swapped = self._swap_in_kernel(self._unsound_linears(linears))
        with self._runner.torch_state():
            if swapped:
                linears = probe_linears(self._runner, scratch)
            results = probe_buckets(self._runner, scratch, linears, self._config)
        if results.unsound:
            self._restore_modules()
        else:
            results = replace(results, kernel_linears=swapped)
        probe_cache.store(key, results)
        return results

    def _results_key(self) -> str:
        """Of results on disk: all that they depend on, which no value of a weight is."""
        model = self._model
        rest = fingerprint(model, "", self._config, self._runner.device)
        found = experts(model), layouts(model), settings(model), adapter_state(model)
        return probe_cache.key_of(rest, *found, self.buckets.sizes, self._config.linear)

    def _unsound_linears(self, linears: list[BucketInvariance]) -> tuple[str, ...]:
        """Every linear of a kind that is unsound in the reference bucket."""
        kinds = linear_kinds(self._model)
        return tuple(name for c in linears if not c.position for name in kinds[c.name])

    def _swap_in_kernel(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Let the linear kernel serve the plain linears among ``names``; the names of those."""
        if not names:
            return ()
        before = {name: self._model.get_submodule(name) for name in names}
        linear = backend.load(self._config.backend).linear
        for parent, name, module in kernel_stand_ins(self._model, linear, only=names):
            self._patched.swap(parent, name, module)
        self._modules_changed()
        return tuple(n for n in names if self._model.get_submodule(n) is not before[n])

    def _restore_modules(self) -> None:
        """Undo what earlier results changed: the linear kernel, tiles of rows, direct products."""
        self._runner.tiles.unbind()
        self._patched.undo(self._num_swapped)
        set_direct(self._runner, {})
        self._modules_changed()

    def _modules_changed(self) -> None:
        self.known_fingerprint = None
        self._runner.torch_state.refresh_modules()

    def _update_buckets(self, results: ProbeResults) -> None:
        if results.unsound:
            self.buckets.forget()
        elif self._config.verify == "always":
            self.buckets.learn([results.reference], results.seconds)
        else:
            self.buckets.learn(results.canonical, results.seconds, results.tiled)


def _unsound_message(results: ProbeResults) -> str:
    """Why the reference bucket is unsound, and what may help."""
    first = results.unsound[0]
    if first.remedy:
        return f"{first.why}; {first.remedy}"
    others = [rows for a in results.alternatives for rows in a.reference_rows][:3]
    hint = f" ({', '.join(map(str, others))} may work)" if others else ""
    return (
        f"{first.why}; with reference_rows={results.reference} a row's bits must not depend on its "
        f"place in the pass: try other reference_rows{hint} or another dtype"
    )
