"""Number of pages of the KV pool: as configured, or as memory and the limits allow."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from transformers import PreTrainedModel

from tinyspec.config import EngineConfig
from tinyspec.errors import DeterminismError, refuse
from tinyspec.model.attention_calls import LayerShape
from tinyspec.runner.kv_cache import KVCache

# Shares of the free memory: a CPU's is shared with every other process.
DEFAULT_FRACTION = {"cuda": 0.8, "cpu": 0.4}
# Statistics of torch's allocator: all of its memory, and what of that no other segment can be.
SEGMENTS = ("reserved", "allocated", "inactive_split")


def _free_memory(device: torch.device) -> int:
    """Bytes free on the device."""
    if device.type == "cuda":
        # What torch's allocator keeps of freed memory is free for a pool as well: on whichever
        # stream it was used, it goes back to the device before an allocation fails. Not so the
        # rest of segments of which a part is in use.
        stats = torch.cuda.memory_stats(device)
        kept, *taken = (stats.get(f"{name}_bytes.all.current", 0) for name in SEGMENTS)
        return torch.cuda.mem_get_info(device)[0] + kept - sum(taken)
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def most_pages(
    config: EngineConfig, layers: list[LayerShape], model: PreTrainedModel, held: int = 0
) -> int:
    """``config.num_pages``, or what fits beside ``model`` and max_sequences could use.

    held: pages that are allocated already; their memory counts as free. On a CPU a page takes
    memory only once it is used. Raises ValueError if no page fits.
    """
    if config.num_pages is not None:
        return config.num_pages
    assert config.page_size and config.max_model_len
    most = config.max_sequences * -(-config.max_model_len // config.page_size)
    fraction = config.memory_fraction or DEFAULT_FRACTION.get(model.device.type, 0.4)
    page = KVCache.page_bytes(layers, config.page_size, model.dtype)
    fitting = int((_free_memory(model.device) + held * page) * fraction) // page
    if fitting < 1:
        raise refuse("memory_fraction", fraction, f"enough for a page of {page} bytes")
    return min(most, fitting)


def _available(device: torch.device) -> int:
    """Bytes that can be allocated: on a CPU also those that hold files which can be read again."""
    info = Path("/proc/meminfo")
    if device.type == "cpu" and info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return _free_memory(device)


def refuse_shortage(needed: int, device: torch.device) -> None:
    """Raise DeterminismError if a proof, which takes ``needed`` bytes, finds less memory."""
    free = _available(device)
    if needed > free:
        raise DeterminismError(
            f"a proof takes {needed} bytes for weights of its own making, as much as the largest "
            f"layer, and {free} bytes of {device.type} memory are available; free some, or prove "
            "a model of this structure on this machine once while there is enough"
        )
