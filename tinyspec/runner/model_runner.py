"""Runs passes through a served model. Knows rows and pages, not requests nor sampling."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tinyspec.config import EngineConfig
from tinyspec.kernels.backend import Kernels
from tinyspec.model.gradients import Tape
from tinyspec.model.introspection import accepted
from tinyspec.model.one_dnn import PrepackedWeights
from tinyspec.model.served_model import ServedModel
from tinyspec.model.supported import vocab_size
from tinyspec.model.torch_state import TorchState
from tinyspec.runner.batch import Batch, PassMemory
from tinyspec.runner.graphs import PassGraphs
from tinyspec.runner.kv_cache import (
    KVCache,
    dtype_of,
    free_memory,
    keep_freed_memory,
    most_pages,
)
from tinyspec.scheduler.buckets import Buckets
from tinyspec.scheduler.page_pool import PagePool
from tinyspec.scheduler.step import Step

Hooks = AbstractContextManager[None]


class ModelRunner:
    """A model, its KV pool and the state of the pass that is running.

    served: the model, a shadow of the user's. dtype: of its products, queries, keys and values.
    graphs: of passes by the Triton kernels, which run at fixed addresses. prepacked: copies of
    weights, for passes on the engine's own pages. states: how many sequences have states of
    recurrent layers, and places of their rings. beside: a second model on the same pages. hidden:
    where passes keep their last hidden states, if they do.
    """

    beside: ServedModel | None = None
    hidden: Tensor | None = None

    def __init__(
        self,
        served: ServedModel,
        pool: PagePool,
        kernels: Kernels,
        buckets: Buckets,
        config: EngineConfig,
        states: tuple[int, int] = (0, 0),
    ):
        self.device = device = served.model.device
        self.torch_state = TorchState(device)
        self.buckets = buckets
        if device.type == "cpu":
            keep_freed_memory()
        self._pool, self._kernels, self.config, self._states = pool, kernels, config, states
        self._cache: KVCache | None = None
        self._context = served.context
        self.graphs = PassGraphs(self.torch_state.stream, bool(config.cuda_graphs))
        room = partial(free_memory, device) if config.prepack == "auto" else int
        self.prepacked = PrepackedWeights(room)
        self.memory = PassMemory(config, buckets, device, fixed=kernels.backend == "triton")
        self.serve(served)

    def serve(self, served: ServedModel) -> None:
        """Run this model from now on, on new pages; no pass may be running."""
        model, self._cache = served.model, None
        self._hold(None)  # the model of before is collected late
        self.graphs.clear()
        self.memory.kept.clear()
        self.served, self.model, self.layers = served, model, served.layers
        self.vocab_size = vocab_size(model)
        self._always = accepted(model, use_cache=False, return_dict=True)
        self._takes_positions = "position_ids" in accepted(model, position_ids=None)
        self._context = served.context
        self._context.kernels = self._kernels
        self.dtype = served.dtype
        self.memory.ring = self._states[1] if served.recurrent else 0
        self.kv_dtype = dtype_of(self.config.kv_dtype, self.dtype)

    def _hold(self, cache: KVCache | None) -> None:
        """Let passes read and write these pages."""
        self._context.hold(*(() if cache is None else cache.held))
        self.hidden = None if cache is None else cache.hidden

    @property
    def cache(self) -> KVCache:
        """The KV pool; allocated when first needed and again after ``release``."""
        if self._cache is None:
            self._cache = cache = self.pages(self._pool.num_pages)
            self._hold(cache)
        return self._cache

    @property
    def kernels(self) -> Kernels:
        """Those that passes call."""
        return self._context.kernels

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self._pool.page_size

    def pages(
        self,
        num_pages: int,
        dtype: torch.dtype | None = None,
        states: tuple[int, int] | None = None,
    ) -> KVCache:
        """New pages and states, of another ``dtype`` or number than the engine's where one is
        given."""
        counts = self._states if states is None else states
        return KVCache(self.served, num_pages, self.page_size, dtype or self.kv_dtype, counts)

    def drop_graphs(self, canonical: bool = False) -> None:
        """To call where what graphs hold may have changed, of ``canonical`` passes alone or of all,
        or its memory is wanted; the twins run without. No pass may be running."""
        if self.kernels.backend == "triton":
            self.graphs.clear(canonical)

    @property
    def holds_memory(self) -> bool:
        """Whether the KV pool is allocated."""
        return self._cache is not None

    def most_pages(self, held: int = 0) -> int:
        """As ``most_pages`` of ``kv_cache``, for its model and that beside it."""
        return most_pages(self.config, self.served, self._states, held, self.beside)

    @property
    def pages_taken(self) -> int:
        """How many pages' memory the KV pool has taken; a CPU's is taken when it is first used."""
        if self._cache is None:
            return 0
        return self._pool.most_used if self.device.type == "cpu" else self._pool.num_pages

    def release(self) -> None:
        """Free the pool's memory; no pass may be running."""
        self.drop_graphs()
        self._cache = None
        self.memory.kept.clear()
        self._hold(None)
        self.torch_state.stream.give_back()

    @contextmanager
    def on_pages(self, cache: KVCache) -> Iterator[KVCache]:
        """Passes of the ``with`` block read and write ``cache`` instead of the engine's pool."""
        context = self._context
        before, hidden = (context.k, context.v, context.rows, context.states), self.hidden
        self._hold(cache)
        try:
            yield cache
        finally:
            context.hold(*before)
            self.hidden = hidden

    def run(self, step: Step, before: Tensor | None = None, hooks: Hooks | None = None) -> Tensor:
        """Run a pass that is packed and return logits [N, V], as ``forward``.

        before [n]: tokens of the pass before, where some are among its own. hooks: in place while
        it runs; no graph has them.
        """
        marks, written = self.served.marks(), len(self.served.written)
        shape, cache = step.shape, self.cache
        assert self._context.k is cache.k, "passes of probes know no fixed addresses"
        self.memory.send(step, before)

        def forward() -> Tensor:
            batch, keep = self.memory.batch(step)
            self.use_prepacked()
            return self.forward(batch, keep, shape.canonical, hooks)

        fixed = self.kernels.backend == "triton" and hooks is None and not step.embeds
        addresses = (*self.memory.addresses, *cache.addresses) if fixed else None
        logits = self.graphs.run(shape, shape.canonical, addresses, forward)
        self.served.keep_apart(marks)
        if len(self.served.written) > written:  # these buffers have other addresses now
            self.drop_graphs()
        return logits[: step.num_logits]

    def use_prepacked(self) -> None:
        """Let the linears of the next pass use the weights that are prepacked."""
        self._context.prepacked = self.prepacked

    def forward(
        self, batch: Batch, keep: Tensor | None, canonical: bool, hooks: Hooks | None = None
    ) -> Tensor:
        """One forward of the served model over packed rows; logits of the rows ``keep``, or of
        all: in fp32 for the twins, as they are for Triton.

        canonical: linears run in tiles where the pass would not be canonical without them;
        otherwise everything runs in the fastest way.
        """
        logits, _ = self.output(batch, keep, canonical, hooks)
        return logits if self.kernels.backend == "triton" else logits.float()

    def output(
        self,
        batch: Batch,
        keep: Tensor | None,
        canonical: bool,
        hooks: Hooks | None = None,
        tape: Tape | None = None,
    ) -> tuple[Tensor, Any]:
        """As ``forward``: logits as the model computed them, and its output. tape: of a pass that
        is differentiated."""
        batch.metadata.exact = canonical
        context = self._context
        context.begin(batch.metadata, batch.slot_mapping, batch.positions, tape)
        more: dict[str, Any] = {}
        if self._takes_positions:
            more["position_ids"] = batch.positions[None]
        if self.served.keeps_logits:
            more["logits_to_keep"] = 0 if keep is None else keep
        look = self.kernels.backend == "triton" and not batch.embeds and hooks is None
        look &= tape is None
        try:
            with (
                self.served.autocast.on(),
                self.graphs.looking(canonical) if look else nullcontext(),
                hooks or nullcontext(),
            ):
                # Hooks of the model itself run around the call that a differentiable pass is of.
                run = self.model if tape is None else self.model.forward
                output = run(**self._inputs(batch), **more, **self._always)
            context.check()
            if context.hidden is not None:
                self.keep(context.hidden.detach(), batch, keep)
        finally:
            context.end()
        logits = output.logits.squeeze(0)
        gathered = keep is None or self.served.keeps_logits
        return logits if gathered else logits[keep], output

    def keep(self, hidden: Tensor, batch: Batch, keep: Tensor | None) -> None:
        """Keep the last hidden states [N, H] of a pass whose rows ``keep`` give logits."""
        if self.hidden is not None:
            rows = hidden.to(self.hidden.dtype), batch.slot_mapping
            self.kernels.keep_rows(self.hidden.flatten(2), *rows, batch.metadata)

    def resumed(self) -> Callable[[], AbstractContextManager[None]]:
        """Of this moment of a canonical pass: what makes a block that goes on from here, also after
        the pass has ended."""
        resumed = self._context.resumed()

        @contextmanager
        def block() -> Iterator[None]:
            with self.torch_state(gradients=True), resumed(), self.served.autocast.on():
                yield

        return block

    def _inputs(self, batch: Batch) -> dict[str, Tensor]:
        """Token ids, or embeddings of all rows if some are given as embeddings."""
        if not batch.embeds:
            return {"input_ids": batch.input_ids[None]}
        embeds = self.model.get_input_embeddings()(batch.input_ids)
        for first, given in batch.embeds:
            self.torch_state.stream.take(given)
            embeds[first : first + len(given)] = given
        return {"inputs_embeds": embeds[None]}
