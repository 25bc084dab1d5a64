"""Whether this engine can serve ``deterministic=True``, and the fingerprint of its outputs.

Before the first deterministic token probes find whether the reference bucket is sound. Every other
bucket of the ladder is proven whole, once requests would have used it often enough, or all by
``probe``; between the passes of a proof others may use the engine. What is found depends on
modules, shapes and device, not on the values of weights, and is kept on disk.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from threading import get_ident
from typing import Any

import torch

from tinyspec.determinism import results as disk
from tinyspec.determinism.attention_probe import MANY_ROWS
from tinyspec.determinism.environment import THREADS, ambient
from tinyspec.determinism.fingerprint import ExtraModules, digest_extra, digest_weights, fingerprint
from tinyspec.determinism.fingerprint_parts import Fingerprint
from tinyspec.determinism.ladder import Ladder
from tinyspec.determinism.linear_modes import LinearModes
from tinyspec.determinism.model_probe import needed_bytes
from tinyspec.determinism.model_state import LIBRARIES, layouts, runs_user_code, top_package
from tinyspec.determinism.proof import (
    Found,
    Subject,
    prove_buckets,
    prove_reference,
    refuse_written,
    see_to_hold,
)
from tinyspec.determinism.proving import Meanwhile, Proving
from tinyspec.determinism.results import ProbeResults
from tinyspec.errors import DeterminismError
from tinyspec.model.outline import WEIGHTS
from tinyspec.model.quantized import unprovable
from tinyspec.model.served_model import ServedModel
from tinyspec.model.torch_state import refuse_unpinnable
from tinyspec.runner.kv_cache import free_memory
from tinyspec.runner.model_runner import ModelRunner

logger = logging.getLogger("tinyspec")
OTHER_THREADS, OTHER_PROCESS = "the number of threads", "the state of the process"


class Contract:
    """Fingerprint and probe results of one engine.

    buckets: of the engine; canonical ones are marked as they become known. renew: makes another
    shadow, which is given to ``serve``.
    results: what is known; None before it is first needed and after the model changed. modes: of
    linears. extra: what runs beside the model. proving: the proof that is under way.
    """

    def __init__(self, runner: ModelRunner, extra: ExtraModules | None, renew: Callable[[], None]):
        self.results: ProbeResults | None = None
        self._weights_digest: dict[str, str] | None = None
        self._fingerprint: Fingerprint | None = None  # where there are digests, of these weights
        self._runner, self._config = runner, runner.config
        self._renew, self.buckets = renew, runner.buckets
        self._key = ""
        self.proving = Proving(runner)
        self._ambient = ambient(runner.device)
        self.serve(runner.served, extra)
        if uncounted := len(self._served.outline.uncounted):
            logger.warning(
                "%d tensors of the model were made in torch.inference_mode and count no writes: "
                "their bits are digested at every call and before a request's last output",
                uncounted,
            )

    def serve(self, served: ServedModel, extra: ExtraModules | None) -> None:
        """The model that the runner serves from now on: nothing is known of it."""
        self._served, self._model, self._extra = served, served.model, extra
        self.modes = LinearModes(self._runner)
        self._ladder = Ladder(self.buckets)
        self._runner.graphs.runs_user_code = runs_user_code(served.root)
        served.mark_parameters(lambda module: top_package(type(module)) not in LIBRARIES)
        self._layouts = layouts(self._model)
        self._forget()

    def _forget(self) -> None:
        """What was found out of the model and the process holds no more."""
        self._go_by(None)
        self._weights_digest = None

    # What changes

    @property
    def threads(self) -> int | None:
        """Torch's number of them, where bits depend on it."""
        found = self._ambient.get(THREADS)
        return found if isinstance(found, int) else None

    def refuse_other_number(self, callers: Collection[int]) -> None:
        """Raise ValueError where torch computes with another number of threads in this one than in
        those of ``callers``, of whose running requests bits depend on it, or that prove."""
        own, callers = torch.get_num_threads(), [*callers, *self.proving.threads]
        if callers and get_ident() not in callers and self.threads not in (None, own):
            raise ValueError(
                f"torch computes with {own} threads in this thread of Python, and with another "
                "number in those whose deterministic requests are unfinished; call "
                "torch.set_num_threads with the same number in all that use the engine"
            )

    @property
    def written(self) -> set[str]:
        """Names of buffers that passes were seen to write to: no deterministic request may."""
        return self._served.written

    @property
    def digests(self) -> bool:
        """Whether there is something that only digests tell of."""
        return self._config.verify_weights or bool(self._served.outline.uncounted)

    def changed(self, digest: bool = False) -> bool:
        """Whether anything may have changed since the last ``refresh``. digest: as there."""
        known = self._weights_digest if digest and self._config.verify_weights else None
        same = ambient(self._runner.device) == self._ambient
        same = same and self._served.outline.changed(digest) is None
        return not same or (known is not None and known != self._digests())

    def refresh(self, digest: bool = True) -> str | None:
        """Follow what changed of process and model since the last call, and name it.

        The fingerprint is dropped, and probe results unless only numbers changed. digest: compare
        the bits of weights that count no writes, and of all where ``EngineConfig(verify_weights=
        True)`` asks for it. Raises where the model cannot be served as it is now.
        """
        what = self._follow_process()
        change = self._served.outline.changed(digest)
        if change is not None:
            if change.structure:
                self._renew()
            else:
                self.weights_changed()
            return change.what
        if digest and self._config.verify_weights:
            before = self._weights_digest
            if before != (now := self._digest()):
                if not self.written:  # by passes, which write again
                    self.weights_changed()
                    self._weights_digest = now
                return WEIGHTS if before is not None else what
        return what

    def _follow_process(self) -> str | None:
        before, self._ambient = self._ambient, ambient(self._runner.device)
        if before == self._ambient:
            return None
        self._runner.drop_graphs()
        self._forget()
        same = before.get(THREADS) == self._ambient.get(THREADS)
        return OTHER_PROCESS if same else OTHER_THREADS

    def weights_changed(self) -> None:
        """Numbers of weights did: what was computed from them is computed again."""
        self.proving.drop()
        self._runner.drop_graphs()
        self._weights_digest = None
        if self._served.follow_weights() and (found := layouts(self._model)) != self._layouts:
            self._layouts = found
            self._forget()

    # The fingerprint

    @property
    def fingerprint(self) -> Fingerprint:
        """The fingerprint, computed when first asked for or after something changed.

        With ``linear="auto"`` the reference bucket is proven first: which modules the linear kernel
        serves is part of the fingerprint.
        """
        if self._config.linear == "auto":
            with suppress(DeterminismError):
                self.prove()
        return self.current_fingerprint()

    def current_fingerprint(self) -> Fingerprint:
        """The fingerprint with the modules that are installed now."""
        digests = self._weights_digest or self._digest()
        if self._fingerprint is None:
            counters = self._served.counters()
            self._fingerprint = fingerprint(self._model, digests, self._config, counters)
        return self._fingerprint

    @property
    def known_fingerprint(self) -> Fingerprint | None:
        """The fingerprint, unless it would have to be computed."""
        return None if self._weights_digest is None else self._fingerprint

    def _digest(self) -> dict[str, str]:
        """Digests of the weights as they are now, which go into the fingerprint."""
        if (now := self._digests()) != self._weights_digest:
            self._weights_digest, self._fingerprint = now, None
        return now

    def _digests(self) -> dict[str, str]:
        """Of weights, by the part of the fingerprint."""
        counters = self._served.counters()
        found = {"weights": digest_weights(self._model, counters)}
        if self._extra is not None:
            found["thinking"] = digest_extra(self._extra, counters)
        return found

    # The proof

    def ensure(self) -> None:
        """Raise DeterminismError unless ``deterministic=True`` can be served; proves it first."""
        results = self.prove()
        if results.unsound:
            raise DeterminismError(results.why_unsound)
        if self._config.verify == "direct":
            most = self._config.max_sequences
            largest = next((n for n in self.buckets.sizes if n >= most), self.buckets.sizes[-1])
            results = self.prove_more([rows for rows in self.buckets.sizes if rows <= largest])
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
        return self.proving.again(partial(self._prove, fresh))

    def _prove(self, fresh: bool) -> ProbeResults:
        refuse_unpinnable(self._runner.device.type)
        refuse_written(self._served.written)
        if self.results is not None and not fresh:
            return self.results
        if (reason := unprovable(self._model)) is not None:
            raise DeterminismError(
                f"{reason}, so that the bits of a row depend on other rows; deterministic=True "
                "needs weights without quantization, or quantization that does not depend on "
                "activations"
            )
        self._go_by(None)
        # Of results on disk: all that they depend on, which no value of a weight is.
        model = self._model
        rest = fingerprint(model, {"weights": ""}, self._config).digest
        others = model.get_experts_implementation(), layouts(model)
        self._key = disk.key_of(rest, *others, self.buckets.sizes, self._config.linear)
        found = None if fresh else disk.load(self._key)
        if found is None:
            logger.info("proving that deterministic=True is kept, once for this model and machine")
            return self._proven(prove_reference)
        return self._proven(see_to_hold, found)

    def probe(self, fresh: bool = False, attention_rows: int = MANY_ROWS) -> ProbeResults:
        """All probe results, found at once. attention_rows: to compare of each kind."""
        results = self.prove(fresh)
        return results if results.unsound else self.prove_more(self.buckets.sizes, attention_rows)

    def prove_repaid(self, accepted: float, meanwhile: Meanwhile | None = None) -> bool:
        """After a pass with deterministic requests: prove a further bucket, if that is worth its
        time. False where the reference bucket turns out unsound: ``ensure`` raises from then on.
        accepted: chance that a draft is. meanwhile: as of ``Proving.pausing``."""
        results, ladder = self.results, self._ladder
        if results is None or results.unsound or self._config.verify == "always":
            return True
        if self.proving.under_way:  # by another call
            return True
        rows = ladder.next(results, accepted)
        if rows is None or self.changed():  # that is looked at before the next pass
            return True
        try:
            with self.proving.pausing(meanwhile):
                results = self.prove_more([rows])
        except Exception as error:  # requests go on without it
            ladder.failed.add(rows)
            logger.warning("passes of %d rows could not be probed: %s", rows, error)
        return not results.unsound

    def prove_more(self, sizes: Collection[int], attention_rows: int | None = None) -> ProbeResults:
        """The results with these buckets; attention_rows: to compare of each kind."""
        return self.proving.again(partial(self._prove_more, sizes, attention_rows))

    def _prove_more(self, sizes: Collection[int], attention_rows: int | None) -> ProbeResults:
        results, begun = self._prove(fresh=False), time.perf_counter()
        new = [rows for rows in sizes if rows not in results.sizes and self._has_room(rows)]
        if not new and all(kind.checked >= (attention_rows or 0) for kind in results.attention):
            return results
        found = self._proven(prove_buckets, results, new, attention_rows)
        logger.info("proved passes of %s rows in %.1f s", new, time.perf_counter() - begun)
        return found

    def _has_room(self, rows: int) -> bool:
        """Whether there is memory to prove a bucket; where not, passes go on without it."""
        needed, free = needed_bytes(self._runner, rows), free_memory(self._runner.device)
        if needed > free:
            self._ladder.failed.add(rows)
            message = "passes of %d rows are not proven: that takes %d bytes of memory, %d are free"
            logger.warning(message, rows, needed, free)
        return needed <= free

    def _proven(self, proof: Callable[..., ProbeResults], *given: Any) -> ProbeResults:
        """What a proof finds, which is stored; where it raises, passes go by what was known."""
        try:
            self._refuse_changed()
            own = self._runner, self.modes, self._found
            results = self.proving.run(lambda pause: proof(Subject(*own, pause), *given))
            self._refuse_changed()
        except BaseException:
            if not self.proving.under_way:  # another call's
                self._found.clear()  # perhaps of another model, or other settings
                self._go_by(self.results)
            raise
        self._go_by(results)
        disk.store(self._key, results)
        return results

    def _refuse_changed(self) -> None:
        """Raise DeterminismError where facts that are found now may be another model's."""
        change = self._served.outline.changed(digest=False, served=True)
        now = ambient(self._runner.device)
        what = next((name for name, value in now.items() if value != self._ambient[name]), None)
        if change is not None and change.structure:
            what = change.what
        if what is not None:
            raise DeterminismError(f"{what} changed while the model was being proven: call again")

    def _go_by(self, results: ProbeResults | None) -> None:
        """Let passes go by these results; None: nothing is known."""
        self.results = results
        if results is None:
            self.proving.drop()
            self._found: Found = {}  # of other modules, threads or settings
        if results is None or results.unsound:
            self.modes.restore()
            self._fingerprint = None
            self.buckets.forget()
        else:
            self.modes.tile(results.tiles)
            always = self._config.verify == "always"
            canonical = [results.reference] if always else results.canonical
            # A proof's passes are no graphs: where passes are, theirs take a host's time to launch.
            seconds = {} if self._config.cuda_graphs else results.seconds
            self.buckets.learn(canonical, seconds, self.modes.apart(self.buckets.sizes))
        self._runner.prepacked.proven = frozenset(results.copied if results is not None else ())
