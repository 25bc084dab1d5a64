"""How many pages the pool gets: what was asked for, or what memory and the limits allow."""

from __future__ import annotations

import os

import torch

from tinyspec.config import EngineConfig
from tinyspec.errors import refuse
from tinyspec.kv_cache import KVCache, LayerShape

# Shares of the free memory: a GPU's is the engine's own, a CPU's is shared with everything else.
DEFAULT_FRACTION = {"cuda": 0.8, "cpu": 0.4}


def _free_memory(device: torch.device) -> int:
    """Bytes free on the device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def most_pages(
    config: EngineConfig, layers: list[LayerShape], dtype: torch.dtype, device: torch.device
) -> int:
    """``config.num_pages``, or what fits and max_sequences could use.

    On a CPU a page takes memory only once it is used. Raises ValueError where not one page fits.
    """
    if config.num_pages is not None:
        return config.num_pages
    assert config.page_size and config.max_model_len
    most = config.max_sequences * -(-config.max_model_len // config.page_size)
    fraction = config.memory_fraction or DEFAULT_FRACTION.get(device.type, 0.4)
    page = KVCache.page_bytes(layers, config.page_size, dtype)
    fitting = int(_free_memory(device) * fraction) // page
    if fitting < 1:
        raise refuse("memory_fraction", fraction, f"enough for a page of {page} bytes")
    return min(most, fitting)
