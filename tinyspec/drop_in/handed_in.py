"""Caches that callers hand in, and tinyspec serves: empty ones, and those that
a call before has returned.

A prompt whose start stands in such a cache is computed from its ids, or found among the engine's
pages; its numbers are never read. So the result is that of the same call without a cache.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from tinyspec.drop_in.returned_cache import LAYERS, empty_cache
from tinyspec.model.quantized import trace


@dataclass(frozen=True)
class _Held:
    """ids: [N, T] whose keys and values stand there. state: of its tensors and of the weights."""

    ids: Tensor
    state: list[Any]


class HandedIn:
    """Knows which caches the calls of one model returned, and what stands in them."""

    def __init__(self, model: PreTrainedModel):
        self._model = model
        self._held: weakref.WeakKeyDictionary[DynamicCache, _Held] = weakref.WeakKeyDictionary()

    def note(self, cache: DynamicCache, ids: Tensor) -> None:
        """``cache`` was returned with the sequences ``ids`` [N, T + 1 or more]."""
        if not torch.is_inference_mode_enabled():  # in which nothing tells of changes
            self._held[cache] = _Held(ids[:, : cache.get_seq_length()].clone(), self._state(cache))

    def forget(self) -> None:
        """The weights have changed."""
        self._held.clear()

    def take(self, arguments: dict[str, Any], name: str) -> DynamicCache | None:
        """The cache that is the argument ``name`` of a call, taken out where it can be served."""
        cache = arguments.get(name)
        if type(cache) is not DynamicCache or arguments.get("use_cache") is False:
            return None
        if cache.offloading or any(type(layer) not in LAYERS for layer in cache.layers):
            return None
        if cache.get_seq_length() > 0 and not self._begins(cache, arguments):
            return None
        del arguments[name]
        return cache

    def _begins(self, cache: DynamicCache, arguments: dict[str, Any]) -> bool:
        """Whether the prompts begin with what stands in ``cache``, which is as it was returned."""
        held = self._held.get(cache)
        ids = arguments.get("inputs", arguments.get("input_ids"))
        if held is None or arguments.get("inputs_embeds") is not None:
            return False
        if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.shape[1] <= held.ids.shape[1]:
            return False
        start = ids[:, : held.ids.shape[1]].to(held.ids.device)
        return torch.equal(start, held.ids) and held.state == self._state(cache)

    def _state(self, cache: DynamicCache) -> list[Any]:
        """Equal while neither the tensors of ``cache`` nor the weights are others or written to."""
        layers = [layer for layer in cache.layers if isinstance(layer, DynamicLayer)]
        kept = [t for layer in layers for t in (layer.keys, layer.values) if t is not None]
        weights = hash(tuple(map(trace, self._model.parameters())))
        return [*((weakref.ref(t), trace(t)) for t in kept), weights]


def emptied(cache: DynamicCache, model: PreTrainedModel) -> DynamicCache:
    """``cache`` with layers of the kinds that it has, which hold nothing."""
    grows = cache.layer_class_to_replicate is not None
    cache.layers = [] if grows else empty_cache(model).layers
    return cache
