"""The KV pool: its tensors, one pair per layer, and how many pages memory and limits allow.

Memory of a CPU is what the machine and the control groups of the process (containers) leave. Knows
slots and pages, not their owners.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tinyspec.config import EngineConfig
from tinyspec.errors import DeterminismError, refuse
from tinyspec.kernels.twins.layers import CODES
from tinyspec.model.served_model import ServedModel

# Shares of the free memory: a CPU's is shared with every other process.
DEFAULT_FRACTION = {"cuda": 0.8, "cpu": 0.4}
# Statistics of torch's allocator: all of its memory, and what of that no other segment can be.
SEGMENTS = ("reserved", "allocated", "inactive_split")
# By the kinds of a control group, as version 2 and 1 list them: names of its limit, of what is used
# and of what of that is files.
GROUPS = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
# From malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
# The largest that every glibc accepts. Where glibc raises the threshold by itself, what it keeps at
# the top of the heap is twice that, too.
MMAP_BYTES = 32 << 20
# At which torch's own memory on a CPU begins.
ALIGNED = 64


def dtype_of(kv_dtype: str, own: torch.dtype) -> torch.dtype:
    """The type of a cache's numbers by ``EngineConfig.kv_dtype``; own: of keys and values."""
    return own if kv_dtype == "auto" else CODES


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """As ``torch.zeros``; on a CPU memory is taken when it is first used."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = prod(shape) * dtype.itemsize
    memory = np.zeros(size + ALIGNED, np.uint8)
    begin = -memory.ctypes.data % ALIGNED
    return torch.from_numpy(memory[begin : begin + size]).view(dtype).view(*shape)


class KVCache:
    """Per layer k and v [num_pages, page_size, num_kv_heads, head_dim], as ``dtype_of`` says; of
    each short convolution rows [num_pages, page_size, 1, channels] in the model's dtype. Of each
    recurrent layer ``states``, of so many sequences with rings of so many places. All begin as
    zeros: the Triton kernels need finite values, and the twins take longer without.

    hidden: last hidden states [num_pages, page_size, 1, width], if they are kept. beside: of a
    second model, on pages of the same numbers: what is copied here is there, too.
    """

    beside: KVCache | None = None

    def __init__(
        self,
        served: ServedModel,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        states: tuple[int, int] = (0, 0),
    ):
        new = partial(zeros, device=served.model.device)

        def pool(heads: int, width: int, dtype: torch.dtype) -> Tensor:
            return new((num_pages, page_size, heads, width), dtype=dtype)

        shapes = [(layer.num_kv_heads, layer.head_dim, dtype) for layer in served.layers]
        self.k, self.v = ([pool(*shape) for shape in shapes] for _ in range(2))
        self.rows = [pool(1, channels, served.dtype) for channels in served.channels]
        self.hidden = pool(1, served.hidden, served.dtype) if served.hidden else None
        kept = () if self.hidden is None else (self.hidden,)
        self.pools = (*self.k, *self.v, *self.rows, *kept)
        self.states = [layer.states(*states, new) for layer in served.recurrent]

    @staticmethod
    def page_bytes(served: ServedModel, page_size: int, dtype: torch.dtype) -> int:
        """Bytes of one page over all layers."""
        width = sum(layer.num_kv_heads * layer.head_dim for layer in served.layers)
        rows = (sum(served.channels) + served.hidden) * served.dtype.itemsize
        return page_size * (2 * width * dtype.itemsize + rows)

    @staticmethod
    def state_bytes(served: ServedModel, states: tuple[int, int]) -> int:
        """Bytes of so many states and rings, of all layers."""
        parts = (part for layer in served.recurrent for part in layer.parts(*states))
        return sum(prod(shape) * kind.itemsize for shape, kind in parts)

    @property
    def held(self) -> tuple[Sequence[Any], ...]:
        """What passes read and write, as ``AttentionContext.hold`` takes it."""
        return self.k, self.v, self.rows, self.states

    @property
    def addresses(self) -> tuple[int, ...]:
        """Of all its memory."""
        states = (part for layer in self.states for part in layer)
        return tuple(pool.data_ptr() for pool in (*self.pools, *states))

    def copy_states(self, copies: list[tuple[int, int]]) -> None:
        """Copy states, (from, to) one after the other, in every layer."""
        for source, target in copies:
            for layer in self.states:
                for part in layer:
                    part[target].copy_(part[source])

    def copy_pages(self, copies: list[tuple[int, int]]) -> None:
        """Copy pages, (from, to) one after the other, in every layer; none is left to be copied."""
        beside = () if self.beside is None else self.beside.pools
        for source, target in copies:
            for pool in (*self.pools, *beside):
                pool[target].copy_(pool[source])
        copies.clear()


def free_memory(device: torch.device) -> int:
    """Bytes that can be allocated: on a CPU also those that hold files which can be read again."""
    if device.type == "cuda":
        # What torch's allocator keeps of freed memory is free for a pool as well: on whichever
        # stream it was used, it goes back to the device before an allocation fails. Not so the
        # rest of segments of which a part is in use.
        stats = torch.cuda.memory_stats(device)
        kept, *taken = (stats.get(f"{name}_bytes.all.current", 0) for name in SEGMENTS)
        return torch.cuda.mem_get_info(device)[0] + kept - sum(taken)
    lines = Path("/proc/meminfo").read_text().splitlines()
    (free,) = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return min([int(free) * 1024, *group_memory()])


def keep_freed_memory() -> bool:
    """Let glibc's heap keep what a pass frees for the next one: serve blocks below 32 MB from it
    and keep up to 64 MB of it (of each of malloc's, of which threads share at most eight a core);
    whether glibc took that.

    False without glibc (macOS, musl), where nothing changes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    return mallopt is not None and bool(
        mallopt(M_MMAP_THRESHOLD, MMAP_BYTES) and mallopt(M_TRIM_THRESHOLD, 2 * MMAP_BYTES)
    )


def most_pages(
    config: EngineConfig,
    served: ServedModel,
    states: tuple[int, int],
    held: int = 0,
    beside: ServedModel | None = None,
) -> int:
    """``config.num_pages``, or what fits beside the model and max_sequences could use.

    states: of recurrent layers, and places of their rings, which take memory beside. held: pages
    whose memory the pool has taken already; it counts as free, as theirs does then. beside: a
    second model on the same pages. Raises ValueError if no page fits, or not as many as configured.
    """
    assert config.page_size and config.max_model_len
    device, dtype = served.model.device, dtype_of(config.kv_dtype, served.dtype)
    # Of a model without attention pages are numbers.
    models = (served,) if beside is None else (served, beside)
    page = max(sum(KVCache.page_bytes(one, config.page_size, dtype) for one in models), 1)
    there = free_memory(device)
    # A CPU's memory is taken when it is written.
    if served.recurrent and device.type != "cpu" and not held:
        needed = KVCache.state_bytes(served, states)
        if needed >= there:
            fewer = f"fewer: the recurrent states of {states[0]} take {needed} bytes of {there}"
            raise refuse("max_sequences", config.max_sequences, fewer)
        there -= needed
    if config.num_pages is not None:
        if config.num_pages * page > there:
            allowed = f"they take {config.num_pages * page} bytes, and {there} are available, "
            raise refuse("num_pages", config.num_pages, f"{allowed}enough for {there // page}")
        return config.num_pages
    most = config.max_sequences * -(-config.max_model_len // config.page_size)
    fraction = config.memory_fraction or DEFAULT_FRACTION.get(device.type, 0.4)
    fitting = int((there + held * page) * fraction) // page
    if fitting < 1:
        raise refuse("memory_fraction", fraction, f"enough for a page of {page} bytes")
    return min(most, fitting)


def group_memory(root: Path = Path("/")) -> list[int]:
    """Bytes that each control group of the process with a limit leaves it, of the groups around it
    too; files that can be read again count as free. root: of the file system."""
    found: list[int] = []
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        _, kinds, path = line.split(":", 2)
        own = Path(path.lstrip("/"))
        for group in (own, *own.parents) if kinds in GROUPS else ():
            folder, (most, used, files) = root / "sys/fs/cgroup" / kinds / group, GROUPS[kinds]
            with suppress(OSError, ValueError):  # no limit, or "max"
                limit, taken = (int((folder / name).read_text()) for name in (most, used))
                stat = (folder / "memory.stat").read_text().splitlines()
                counts = dict(line.split() for line in stat)
                found.append(max(0, limit - taken + int(counts.get(files, 0))))
    return found


def refuse_shortage(needed: int, device: torch.device) -> None:
    """Raise DeterminismError if a proof, which takes ``needed`` bytes, finds less memory."""
    free = free_memory(device)
    if needed > free:
        raise DeterminismError(
            f"a proof takes {needed} bytes for weights of its own making, as much as the largest "
            f"layer, and {free} bytes of {device.type} memory are available; free some, or prove "
            "a model of this structure on this machine once while there is enough"
        )
