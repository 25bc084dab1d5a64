"""Whether this engine can keep the contract, and the fingerprint that its outputs carry.

Facts are probed, never assumed, at the first deterministic request: which buckets are canonical,
what each costs, and whether the reference bucket is sound at all. They are kept on disk under the
fingerprint. Facts depend on modules, shapes and device, not on the values of weights.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from tinyspec.config import EngineConfig
from tinyspec.determinism import probe_cache
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
from tinyspec.determinism.probes.buckets import probe_buckets, warm_up
from tinyspec.determinism.probes.linears import probe_linears, run_direct, run_in_tiles
from tinyspec.determinism.probes.row_functions import BucketClasses
from tinyspec.errors import DeterminismError
from tinyspec.kernels import backend
from tinyspec.model.install import patched_of
from tinyspec.model.linear_kinds import linear_kinds
from tinyspec.model.linears import kernel_stand_ins
from tinyspec.model.quantized import repack_weights, trace, unprovable
from tinyspec.model.torch_state import refuse_tunable_op
from tinyspec.runner.model_runner import ModelRunner
from tinyspec.scheduler.buckets import Buckets


class Contract:
    """Fingerprint and proof of one engine."""

    def __init__(self, model: PreTrainedModel, runner: ModelRunner, config: EngineConfig):
        self._model = model
        self._runner = runner
        self._config = config
        self._patched = patched_of(model)
        self._swaps = len(self._patched.swapped)
        self._weights: str | None = None
        self._fingerprint: str | None = None
        self._facts: ProbeResults | None = None
        self._proven_for: object = None
        self._patched.experts.serve(config.linear)
        repack_weights(self._model, self._model.dtype)
        self._note()

    @property
    def known(self) -> str | None:
        """The fingerprint, if it has been computed."""
        return self._fingerprint

    @property
    def buckets(self) -> Buckets:
        """The buckets, with what was learnt of them."""
        return self._runner.buckets

    @property
    def lost(self) -> bool:
        """Whether what was proven no longer holds, and nothing has been proven since."""
        return self._proven_for is not None and self._facts is None

    @property
    def facts(self) -> ProbeResults | None:
        """What was found, if anything was."""
        return self._facts

    @property
    def fingerprint(self) -> str:
        """The fingerprint, computed when first asked for or after something changed.

        Which modules the linear kernel serves is part of it, and only the proof tells.
        """
        if self._config.linear == "auto":
            with suppress(DeterminismError):
                self.examine()
        return self._digest()

    def _digest(self) -> str:
        """The fingerprint with the modules as they stand."""
        if self._fingerprint is None:
            if self._weights is None:
                with torch.no_grad():
                    self._weights = digest_weights(self._model)
            device = self._runner.device
            self._fingerprint = fingerprint(self._model, self._weights, self._config, device)
        return self._fingerprint

    def forget(self) -> None:
        """The weights changed in a way that leaves no trace: a new digest is due."""
        self._weights = self._fingerprint = None

    def changed(self) -> bool:
        """Whether a parameter was written to since the last look; quick enough for every step."""
        parameters, before = self._traces
        return list(map(trace, parameters)) != before

    def look(self) -> bool:
        """Take note of weights, adapters, modules and threads; whether any of them changed.

        Then what was computed before is of another fingerprint. The proof is lost only if modules
        or threads changed, not with the values of weights.
        """
        self._runner.torch_state.refresh_modules()
        repack_weights(self._model, self._model.dtype)
        before, digest = self._seen, self._weights
        self._note()
        changed = self._seen != before
        if self._config.verify_weights and not changed:
            with torch.no_grad():
                self._weights = digest_weights(self._model)
            changed = digest is not None and digest != self._weights
            self._fingerprint = None if changed else self._fingerprint
        elif changed:
            self.forget()
        if self._facts is not None and self._structure != self._proven_for:
            self._facts = None
            self.buckets.forget()
        return changed

    def _note(self) -> None:
        parameters = list(self._model.parameters())
        self._traces = parameters, list(map(trace, parameters))
        adapters = adapter_state(self._model)
        self._structure = structure(self._model), adapters, torch.get_num_threads()
        self._seen = weight_state(self._model), function_settings(self._model), self._structure

    def prove(self) -> None:
        """Raise DeterminismError, naming what is in the way, unless the contract can be kept.

        What holds is probed, or read from disk, when first needed.
        """
        facts = self.examine()
        if facts.unsound:
            raise DeterminismError(_unsound(facts))
        if self._config.verify == "direct":
            most = self.buckets.fit(self._config.max_sequences)
            lacking = [f.rows for f in facts.buckets if f.rows <= most and not f.canonical]
            if lacking:
                raise DeterminismError(
                    "verify='direct' needs every bucket that max_sequences="
                    f"{self._config.max_sequences} rows can take to be canonical, and these are "
                    f"not: {', '.join(map(str, lacking))}; use verify='auto', another "
                    "reference_rows, or linear='always'"
                )

    def examine(self, fresh: bool = False) -> ProbeResults:
        """The facts, found now if need be; ``fresh``: probed anew, whatever is known or on disk.

        Raises DeterminismError where TunableOp is on, and for kernels that no probe can prove.
        """
        refuse_tunable_op()
        if self._facts is None or fresh:
            why = unprovable(self._model)
            if why is not None:
                raise DeterminismError(
                    f"{why}, which no probe can prove harmless; deterministic=True needs weights "
                    "that are not quantized, or quantized without looking at activations"
                )
            self._facts = None
            self._facts = self._find(fresh)
            self._note()
            self._proven_for = self._structure
            self._learn(self._facts)
        return self._facts

    def _find(self, fresh: bool) -> ProbeResults:
        """Facts from disk or from probes; afterwards the linear kernel serves what they say."""
        self._take_back()
        buckets = self.buckets
        modules = structure(self._model), settings(self._model)
        key = probe_cache.key_of(self._digest(), *modules, buckets.sizes, self._config.linear)
        facts = None if fresh else probe_cache.load(key)
        if facts is not None and facts.sizes == buckets.sizes:
            if not facts.unsound:
                self._serve_by_kernel(facts.kernel_linears)
                run_in_tiles(self._runner, facts.tiles)
                run_direct(self._runner, facts.direct)
            with self._runner.torch_state():
                warm_up(self._runner, self._config)
            return facts
        with self._runner.torch_state():
            linears = probe_linears(self._runner)
        served: tuple[str, ...] = ()
        if self._config.linear == "auto":
            served = self._serve_by_kernel(self._kinds_of(linears))
        with self._runner.torch_state():
            if served:
                linears = probe_linears(self._runner)
            facts = probe_buckets(self._runner, linears, self._config)
        if facts.unsound:
            self._take_back()
        else:
            facts = replace(facts, kernel_linears=served)
        probe_cache.store(key, facts)
        return facts

    def _kinds_of(self, linears: list[BucketClasses]) -> tuple[str, ...]:
        """Every linear of a kind that is unsound in the reference bucket."""
        kinds = linear_kinds(self._model)
        return tuple(name for c in linears if not c.position for name in kinds[c.name])

    def _serve_by_kernel(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Let the linear kernel serve the plain linears among ``names``; which these are."""
        if not names:
            return ()
        before = {name: self._model.get_submodule(name) for name in names}
        linear = backend.load(self._config.backend).linear
        for parent, name, module in kernel_stand_ins(self._model, linear, only=names):
            self._patched.swap(parent, name, module)
        self._relist()
        return tuple(n for n in names if self._model.get_submodule(n) is not before[n])

    def _take_back(self) -> None:
        """Undo what the proof did to the modules: the linear kernel, tiles, and straight ways."""
        self._runner.tiles.unbind()
        self._patched.undo(self._swaps)
        run_direct(self._runner, {})
        self._relist()

    def _relist(self) -> None:
        self._fingerprint = None
        self._runner.torch_state.refresh_modules()

    def _learn(self, facts: ProbeResults) -> None:
        buckets = self.buckets
        if facts.unsound:
            buckets.forget()
        elif self._config.verify == "always":
            buckets.learn([facts.reference], facts.seconds)
        else:
            buckets.learn(facts.canonical, facts.seconds, facts.tiled)


def _unsound(facts: ProbeResults) -> str:
    """What is in the way, and what may help."""
    if facts.unsound[0].remedy:
        return f"{facts.unsound[0].why}; {facts.unsound[0].remedy}"
    others = [rows for a in facts.alternatives for rows in a.reference_rows][:3]
    hint = f" ({', '.join(map(str, others))} may do)" if others else ""
    return (
        f"{facts.unsound[0].why}; deterministic=True needs passes of reference_rows="
        f"{facts.reference} in which a row's place does not matter: try another reference_rows"
        f"{hint}, or another dtype"
    )
