"""Bytes that tensors take, and the pages of a patched model.

An observer sees every operator's results, and so the storages that live at a time.
"""

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.drop_in import PAD, SMALL, random_ids
from tinyspec.model import torch_state
from tinyspec.runner.kv_cache import KVCache

PROMPTS = [random_ids(100, n) for n in range(4)]


class Watch(TorchDispatchMode):
    """Bytes of the storages that operators made while it is on, those that still live and most
    that lived at once."""

    def __init__(self):
        super().__init__()
        self.live = self.most = 0
        self._known: dict[int, weakref.finalize] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {
            t.untyped_storage()._cdata
            for t in tree_leaves((args, kwargs))
            if isinstance(t, torch.Tensor)
        }
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in given and storage._cdata not in self._known:
                    self._note(storage)
        return out

    def _note(self, storage):
        key, size = storage._cdata, storage.nbytes()

        def gone():
            self.live -= size
            del self._known[key]

        self._known[key] = weakref.finalize(storage, gone)
        self._known[key].atexit = False
        self.live += size
        self.most = max(self.most, self.live)


def watched(job: Callable[[], Any]) -> tuple[Watch, Any]:
    """What ``job`` takes, passes of an engine included, and its result."""
    gc.collect()
    # Passes set modes aside, and this one is to see them.
    with patch.object(torch_state, "without_modes", nullcontext), Watch() as watch:
        result = job()
    return watch, result


def pool_of(model) -> tuple[int, int]:
    """Pages and bytes of the pool that is there."""
    cache = model.generate._engine.runner._cache
    if cache is None:
        return 0, 0
    tensors = cache.pools
    return len(tensors[0]), sum(t.untyped_storage().nbytes() for t in tensors)


def page_bytes(model, page_size: int = SMALL.page_size) -> int:
    return KVCache.page_bytes(model.generate._engine.served, page_size, model.dtype)


def generate(model, prompts=None, tokens: int = 20, **settings):
    return model.generate(prompts or PROMPTS, max_new_tokens=tokens, pad_token_id=PAD, **settings)


def needed(prompts, tokens: int, copies: int = 1, page_size: int = SMALL.page_size) -> int:
    """Pages for all rows at their longest; copies share the full pages of their prompt."""
    pages = 0
    for prompt in prompts:
        shared = len(prompt) // page_size if copies > 1 else 0
        pages += shared + copies * (-(-(len(prompt) + tokens) // page_size) - shared)
    return pages
