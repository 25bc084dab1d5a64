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
from tinyspec.determinism.environment import ambient
from tinyspec.determinism.fingerprint import (
    adapter_state,
    digest_weights,
    fingerprint,
    function_settings,
    settings,
    structure,
    weight_state,
)
from tinyspec.determinism.probe_results import ProbeResults
from tinyspec.determinism.probes.autocast import refuse_autocast
from tinyspec.determinism.probes.buckets import probe_buckets, warm_up
from tinyspec.determinism.probes.linears import probe_linears, set_direct, set_tiles
from tinyspec.determinism.probes.row_functions import BucketInvariance
from tinyspec.errors import DeterminismError
from tinyspec.kernels import backend
from tinyspec.model.install import patched_of
from tinyspec.model.linear_kinds import linear_kinds
from tinyspec.model.linears import kernel_stand_ins
from tinyspec.model.quantized import repack_weights, trace, unprovable
from tinyspec.model.torch_state import refuse_unpinnable
from tinyspec.runner.model_runner import ModelRunner
from tinyspec.scheduler.buckets import Buckets


class Contract:
    """Fingerprint and probe results of one engine.

    buckets: of the engine; canonical ones are marked once they are probed. known_fingerprint,
    results: None before they are first needed and after the model changed.
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
        self._patched.experts.serve(config.linear)
        repack_weights(self._model, self._model.dtype)
        self._record_state()

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
                self._weights_digest = digest_weights(self._model)
            device = self._runner.device
            self.known_fingerprint = fingerprint(
                self._model, self._weights_digest, self._config, device
            )
        return self.known_fingerprint

    def drop_fingerprint(self) -> None:
        """The weights changed: the next fingerprint needs a new digest of them."""
        self._weights_digest = self.known_fingerprint = None

    def parameters_written(self) -> bool:
        """Whether a parameter was written to since ``refresh``; quick enough for every step."""
        parameters, before = self._versions
        return list(map(trace, parameters)) != before

    def refresh(self) -> bool:
        """Whether weights, adapters, modules or threads changed since the last call.

        If so the fingerprint is dropped. Probe results are dropped only if modules or threads
        changed: they do not depend on the values of weights.
        """
        self._runner.torch_state.refresh_modules()
        repack_weights(self._model, self._model.dtype)
        before, digest = self._state, self._weights_digest
        self._record_state()
        changed = self._state != before
        if self._config.verify_weights and not changed:
            self._weights_digest = digest_weights(self._model)
            changed = digest is not None and digest != self._weights_digest
            self.known_fingerprint = None if changed else self.known_fingerprint
        elif changed:
            self.drop_fingerprint()
        if self.results is not None and self._structure != self._probed_structure:
            self.results = None
            self.buckets.forget()
        return changed

    def _record_state(self) -> None:
        """What ``refresh`` and ``parameters_written`` compare with."""
        parameters = list(self._model.parameters())
        self._versions = parameters, list(map(trace, parameters))
        adapters = adapter_state(self._model)
        self._structure = structure(self._model), adapters, ambient(self._runner.device)
        self._state = weight_state(self._model), function_settings(self._model), self._structure

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
            self._record_state()
            self._probed_structure = self._structure
            self._update_buckets(self.results)
        return self.results

    def _load_or_probe(self, fresh: bool) -> ProbeResults:
        """Results from disk or of a probe; afterwards modules run as these say."""
        self._restore_modules()
        buckets = self.buckets
        modules = structure(self._model), settings(self._model)
        fingerprint = self._current_fingerprint()
        key = probe_cache.key_of(fingerprint, *modules, buckets.sizes, self._config.linear)
        results = None if fresh else probe_cache.load(key)
        if results is not None and results.sizes == buckets.sizes:
            if not results.unsound:
                self._swap_in_kernel(results.kernel_linears)
                set_tiles(self._runner, results.tiles)
                set_direct(self._runner, results.direct)
            with self._runner.torch_state():
                warm_up(self._runner, self._config)
            return results
        with self._runner.torch_state():
            linears = probe_linears(self._runner)
        swapped: tuple[str, ...] = ()
        if self._config.linear == "auto":
            swapped = self._swap_in_kernel(self._unsound_linears(linears))
        with self._runner.torch_state():
            if swapped:
                linears = probe_linears(self._runner)
            results = probe_buckets(self._runner, linears, self._config)
        if results.unsound:
            self._restore_modules()
        else:
            results = replace(results, kernel_linears=swapped)
        probe_cache.store(key, results)
        return results

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
