"""The KV pool's tensors, one pair per layer. Knows slots and pages, not their owners."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tinyspec.kernels.twins.layers import CODES
from tinyspec.model.attention_calls import LayerShape
from tinyspec.runner.device_queue import to_device


def dtype_of(kv_dtype: str, model_dtype: torch.dtype) -> torch.dtype:
    """The type of a cache's numbers by ``EngineConfig.kv_dtype``."""
    return model_dtype if kv_dtype == "auto" else CODES


class KVCache:
    """Per layer k and v [num_pages, page_size, num_kv_heads, head_dim], as ``dtype_of`` says.

    For the twins every page is zeroed when it is handed out: masked keys may hold anything, but
    their attention takes longer where they are not finite. written: pages up to the last that was.
    """

    def __init__(
        self,
        layers: list[LayerShape],
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        def pool(layer: LayerShape) -> Tensor:
            shape = (num_pages, page_size, layer.num_kv_heads, layer.head_dim)
            return torch.empty(shape, dtype=dtype, device=device)

        self.layers, self.dtype = layers, dtype
        self.k = [pool(layer) for layer in layers]
        self.v = [pool(layer) for layer in layers]
        self.page_size = page_size
        self.written = 0
        # The probes read the first page without owning it.
        self.zero([0])

    def extend(self, num_pages: int, kept: list[int]) -> None:
        """Grow every pool to ``num_pages``; the first page and those in ``kept`` keep their values.

        One pool after the other, so that at most one is in memory twice. If memory runs out midway,
        the next call continues with the rest.
        """
        for pools in (self.k, self.v):
            for layer, before in enumerate(pools):
                if len(before) < num_pages:
                    after = before.new_empty(num_pages, *before.shape[1:])
                    after[[0, *kept]] = before[[0, *kept]]
                    pools[layer] = after

    @staticmethod
    def page_bytes(layers: list[LayerShape], page_size: int, dtype: torch.dtype) -> int:
        """Bytes of one page over all layers, k and v."""
        width = sum(layer.num_kv_heads * layer.head_dim for layer in layers)
        return 2 * width * page_size * dtype.itemsize

    def zero(self, pages: list[int]) -> None:
        """Zero whole pages."""
        if pages:
            self.written = max(self.written, max(pages) + 1)
            index = to_device(np.array(pages, np.int64), self.k[0].device)
            for pool in (*self.k, *self.v):
                pool.index_fill_(0, index, 0)

    def zero_tail(self, pages: list[int], tokens: int) -> None:
        """Zero the last of a sequence's pages after its first ``tokens`` tokens."""
        assert len(pages) == -(-tokens // self.page_size), (pages, tokens)
        offset = tokens % self.page_size
        if offset:
            for pool in (*self.k, *self.v):
                pool[pages[-1], offset:].zero_()

    def copy_page(self, source: int, target: int) -> None:
        """Copy one page in every layer."""
        for pool in (*self.k, *self.v):
            pool[target].copy_(pool[source])
