"""The caches that calls of one model leave, in transformers' forms; compared with the model's own
once. Knows no engine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from transformers import Cache, DynamicCache, PreTrainedModel

from tinyspec.drop_in.call import Call
from tinyspec.drop_in.handed_in import HandedIn, emptied
from tinyspec.drop_in.prepare import Generate
from tinyspec.drop_in.returned_cache import empty_cache, filled_cache, keeps_alike
from tinyspec.model.private_names import CACHE
from tinyspec.scheduler.request import Sequence

logger = logging.getLogger("tinyspec")


class KeptStates:
    """Of ``model``, whose own ``generate`` runs inside ``locked``. kv_dtype: of the engine."""

    def __init__(
        self,
        model: PreTrainedModel,
        generate: Generate,
        locked: Callable[[], AbstractContextManager[None]],
        kv_dtype: str,
    ):
        self._model, self._generate, self._locked = model, generate, locked
        self._kv_dtype = kv_dtype
        self._handed_in = HandedIn(model)
        # Whether it is the model's own; None: not compared yet.
        self._cache_alike: bool | None = None

    def forget(self) -> None:
        """The weights have changed."""
        self._handed_in.forget()

    def take(self, arguments: dict[str, Any], name: str) -> DynamicCache | None:
        """The cache that a call hands in as ``name``, taken out of its arguments where it can be
        served."""
        return None if self._cache_alike is False else self._handed_in.take(arguments, name)

    def prepare(self, call: Call) -> None:
        """Before a call is run: what cannot be kept for it makes it one for the model's own."""
        several = any(params.num_return_sequences > 1 for params in call.params)
        if call.cache is not None and call.cache.get_seq_length() > 0 and several:
            call.unserved.append(f"{CACHE} with num_return_sequences > 1")

    def of(self, call: Call, sequences: list[Sequence]) -> dict[str, Any]:
        """Parts of the returned dict, by name. What cannot be given makes the call one for the
        model's own ``generate`` after all."""
        parts: dict[str, Any] = {}
        if "kv" in call.keeps:
            cache = self._cache(call, sequences)
            if cache is not None:
                parts[CACHE] = cache
            elif call.cache is not None:
                call.unserved.append(f"{CACHE} of another form than keys and values")
        return parts

    def _cache(self, call: Call, sequences: list[Sequence]) -> Cache | None:
        """The cache that ``sequences`` leave, where the model's own is such a one; that which was
        handed in."""
        if self._cache_alike is None:
            with self._locked():
                given = call.prompts[0], sequences[0].kv, self._kv_dtype
                self._cache_alike = keeps_alike(self._model, self._generate, *given)
            if not self._cache_alike:
                logger.warning(
                    "generate: the model's own cache has another form than keys and values, so "
                    "past_key_values of returned dicts are None"
                )
        if not self._cache_alike:
            return None
        counts = [params.num_return_sequences for params in call.params]
        if call.cache is not None:
            cache: Cache = emptied(call.cache, self._model)
        else:
            static = call.config.cache_implementation == "static"
            most = call.given.width + max(params.max_new_tokens for params in call.params)
            cache = empty_cache(self._model, most - 1 if static else None)
        filled_cache(cache, call.given, counts, [s.kv for s in sequences])
        if isinstance(cache, DynamicCache) and call.prompts[0].embeds is None:
            self._handed_in.note(cache, call.ids(sequences))
        return cache
