"""Whether this engine can keep the contract, and the fingerprint that its outputs carry.

Facts are probed, never assumed: at the first deterministic request every distinct linear is tried
by itself in the reference bucket, then the model end to end.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tinyspec.ambient import refuse_tunable_op
from tinyspec.batch import Batch
from tinyspec.config import EngineConfig
from tinyspec.errors import DeterminismError
from tinyspec.fingerprint import digest_weights, fingerprint, weight_state
from tinyspec.invariance import PositionProbe, position_invariant, probe_positions
from tinyspec.kernels.segments import Segments
from tinyspec.runner import Runner

# Passes of the end-to-end probe; every linear by itself is probed at every row index.
MODEL_PASSES = 8


class Contract:
    """Fingerprint and proof of one engine."""

    def __init__(self, model: PreTrainedModel, runner: Runner, config: EngineConfig):
        self._model = model
        self._runner = runner
        self._config = config
        self._fingerprint: str | None = None
        self._seen: object = None
        self._proven = False

    @property
    def known(self) -> str | None:
        """The fingerprint, if it has been computed."""
        return self._fingerprint

    @property
    def fingerprint(self) -> str:
        """The fingerprint, computed when first asked for or after the weights changed."""
        if self._fingerprint is None:
            with torch.no_grad():
                weights = digest_weights(self._model)
            self._seen = self._state()
            self._fingerprint = fingerprint(self._model, weights, self._config, self._runner.device)
        return self._fingerprint

    def forget(self) -> None:
        """The weights changed: a new digest is due."""
        self._fingerprint = None

    def changed(self) -> bool:
        return False

    def look(self) -> bool:
        """Forget fingerprint and proof if a weight or the number of threads has changed."""
        self._runner.ambient.look()
        if self._fingerprint is None:
            return False
        if self._config.verify_weights or self._seen != self._state():
            self._fingerprint = None
            self._proven = False
            return True
        return False

    def _state(self) -> object:
        return weight_state(self._model), torch.get_num_threads()

    def prove(self) -> None:
        """Raise DeterminismError, naming what is in the way, unless the contract can be kept."""
        refuse_tunable_op()
        if self._config.verify == "direct":
            raise DeterminismError(
                "verify='direct' needs a canonical bucket smaller than reference_rows="
                f"{self._config.reference_rows}, and none is known; use verify='auto'"
            )
        if self._proven:
            return
        with self._runner.ambient():
            for probe in self._probes():
                if not probe:
                    raise DeterminismError(
                        f"{probe}; deterministic=True needs passes of reference_rows="
                        f"{self._config.reference_rows} in which a row's place does not matter: "
                        "try another reference_rows, or another dtype"
                    )
        self._proven = True
        buckets = self._runner.buckets
        buckets.learn([buckets.reference], {})

    def _probes(self) -> Iterator[PositionProbe]:
        """What the contract rests on, in the order of cost; linears first, as they can be named."""
        rows = self._config.reference_rows
        assert rows is not None
        model, device = self._model, self._runner.device
        yield from probe_positions(model, rows, model.dtype, device)
        yield from self._runner.probe_attention()
        yield self._probe_model(rows)

    def _probe_model(self, rows: int) -> PositionProbe:
        """The patched model end to end: embeddings in, logits out, no row writing to the pool."""
        model, device = self._model, self._runner.device
        # Rows attend to the first page, which is zero or somebody's: finite, and left alone.
        _ = self._runner.cache
        zeros = torch.zeros(rows, dtype=torch.long, device=device)
        segments = Segments(
            page_table=torch.zeros(rows, 1, dtype=torch.int32, device=device),
            cu_seqlens_q=torch.arange(rows + 1, dtype=torch.int32, device=device),
            seq_lens=torch.ones(rows, dtype=torch.int32, device=device),
            page_size=self._runner.cache.page_size,
            max_seqlen_q=1,
            max_seqlen_k=1,
        )
        batch = Batch(zeros, zeros, zeros - 1, segments, [])
        keep = torch.arange(rows, device=device)

        def passes(embeddings: Tensor) -> Tensor:
            return self._runner.forward(batch, keep, inputs_embeds=embeddings)

        weight = next(model.get_input_embeddings().parameters())
        needles = weight[torch.linspace(0, len(weight) - 1, rows, device=device).long()]
        return position_invariant(passes, needles, rows, name="model", passes=MODEL_PASSES)
