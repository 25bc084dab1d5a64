"""Number of pages of the KV pool: as configured, or as memory and the limits allow.

Memory of a CPU is what the machine and the control groups of the process (containers) leave.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import PreTrainedModel

from tinyspec.config import EngineConfig
from tinyspec.errors import DeterminismError, refuse
from tinyspec.model.attention import LayerShape
from tinyspec.runner.kv_cache import KVCache, dtype_of

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
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([free, *group_memory()])


def most_pages(
    config: EngineConfig, layers: list[LayerShape], model: PreTrainedModel, held: int = 0
) -> int:
    """``config.num_pages``, or what fits beside ``model`` and max_sequences could use.

    held: pages whose memory the pool has taken already; it counts as free. Raises ValueError if no
    page fits, or not as many as configured.
    """
    assert config.page_size and config.max_model_len
    dtype = dtype_of(config.kv_dtype, model.dtype)
    page = KVCache.page_bytes(layers, config.page_size, dtype)
    if config.num_pages is not None:
        there = _available(model.device)
        if config.num_pages * page > there:
            allowed = f"they take {config.num_pages * page} bytes, and {there} are available, "
            raise refuse("num_pages", config.num_pages, f"{allowed}enough for {there // page}")
        return config.num_pages
    most = config.max_sequences * -(-config.max_model_len // config.page_size)
    fraction = config.memory_fraction or DEFAULT_FRACTION.get(model.device.type, 0.4)
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
                return min([int(line.split()[1]) * 1024, *group_memory()])
    return _free_memory(device)


def group_memory(root: Path = Path("/")) -> list[int]:
    """Bytes that each control group of the process with a limit leaves it; files that can be read
    again count as free. root: of the file system."""
    found = []
    for folder, most, used, files in _groups(root):
        try:
            limit, taken = (int((folder / name).read_text()) for name in (most, used))
            lines = (folder / "memory.stat").read_text().splitlines()
            counts = dict(line.split() for line in lines)
        except (OSError, ValueError):  # none, or "max"
            continue
        found.append(max(0, limit - taken + int(counts.get(files, 0))))
    return found


def _groups(root: Path) -> Iterator[tuple[Path, str, str, str]]:
    """Folders of the memory groups of the process and of those around them, as version 2 and 1 have
    them; and names there: of the limit, of what is used, and of what of that is files."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, kinds, path = line.split(":", 2)
        own = Path(path.lstrip("/"))
        for group in (own, *own.parents):
            if kinds == "":
                folder = root / "sys/fs/cgroup" / group
                yield folder, "memory.max", "memory.current", "inactive_file"
            elif kinds == "memory":
                names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
                yield root / "sys/fs/cgroup/memory" / group, *names


def refuse_shortage(needed: int, device: torch.device) -> None:
    """Raise DeterminismError if a proof, which takes ``needed`` bytes, finds less memory."""
    free = _available(device)
    if needed > free:
        raise DeterminismError(
            f"a proof takes {needed} bytes for weights of its own making, as much as the largest "
            f"layer, and {free} bytes of {device.type} memory are available; free some, or prove "
            "a model of this structure on this machine once while there is enough"
        )
