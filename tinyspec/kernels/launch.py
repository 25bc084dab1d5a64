"""The launch table: every tile size, warp count and stage count of the Triton kernels.

What a result depends on (tiles, splits, warps) is keyed by device, dtype and head size alone, never
by the number of rows, sequences, pages or heads, and nothing here is tuned at run time. The numbers
fit the shared memory of every architecture from sm_80 on and of gfx942 and spill no register of the
former in a loop (tests/kernels/test_compile.py). On an H200 attention's for heads of 128 was the
best of fifteen (benchmarks/results/h200/attention-entries.md); others have not been timed.

Knows dtypes and head sizes; imports neither triton nor the kernels.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

# Pinned for every kernel: triton 3.9 fuses a * b + c by default, 3.10 does not.
OPTIONS = {"enable_fp_fusion": False}
# tl.dot wants at least 16 columns.
MIN_DOT = 16
VECTOR_BYTES = 16
# The largest head that attention's table has an entry for: of Gemma 4's global layers.
MAX_HEAD_DIM = 512
# The widest hidden states whose norm one program takes.
MAX_NORM = 32768
IS_HIP = torch.version.hip is not None


class AttentionLaunch(NamedTuple):
    """block_m query rows by block_n keys per tile; a split is ``split`` tokens, a multiple of
    block_n.

    max_registers: limit for ptxas, which otherwise may spill some to reach a better occupancy; 0:
    none.
    """

    block_m: int
    block_n: int
    split: int
    num_warps: int
    num_stages: int
    max_registers: int

    def options(self) -> dict[str, int | bool]:
        """Compile options; only NVIDIA's backend knows a register limit. On AMD's a third stage of
        fp32 takes more shared memory than gfx942 has."""
        stages = min(self.num_stages, 2) if IS_HIP else self.num_stages
        options = {"num_warps": self.num_warps, "num_stages": stages, **OPTIONS}
        if self.max_registers and not IS_HIP:
            options["maxnreg"] = self.max_registers
        return options


class RowLaunch(NamedTuple):
    """``block`` of one row per program: heads, numbers, vocabulary entries, or rows of a verify a
    loop turn."""

    block: int
    num_warps: int


class LinearLaunch(NamedTuple):
    """block_m rows by block_n outputs per program, block_k of the sum per loop turn."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


# (bytes per element, head size); other head sizes use the entry of the next power of two. These fit
# every architecture from sm_80 on and gfx942. 64 query rows of 16-bit numbers are one wgmma on
# sm_90, and 4 warps share them without computing a score twice; the accumulator of 256 columns
# leaves room for 32 rows, that of 512 for 16. fp32 goes through scalar multiply-adds ("ieee"),
# where a tall tile would only spill. 3 stages: while a tile of keys is computed, those of the next
# are copied; fp32 heads of 512 have no room for that.
_ATTENTION = {
    (2, 16): AttentionLaunch(64, 64, 512, 4, 3, 255),
    (2, 32): AttentionLaunch(64, 64, 512, 4, 3, 255),
    (2, 64): AttentionLaunch(64, 32, 512, 4, 3, 255),
    (2, 128): AttentionLaunch(64, 32, 512, 4, 3, 255),
    (2, 256): AttentionLaunch(32, 32, 512, 8, 3, 255),
    (2, 512): AttentionLaunch(16, 16, 512, 4, 3, 255),
    (4, 16): AttentionLaunch(16, 32, 512, 8, 3, 255),
    (4, 32): AttentionLaunch(16, 32, 512, 8, 3, 255),
    (4, 64): AttentionLaunch(16, 32, 512, 8, 3, 255),
    (4, 128): AttentionLaunch(16, 32, 512, 8, 3, 255),
    (4, 256): AttentionLaunch(16, 16, 512, 8, 3, 255),
    (4, 512): AttentionLaunch(16, 16, 512, 8, 1, 255),
}
# By compute capability, where another entry is better: two programs an SM have room there. On sm_90
# 64 keys a tile halve the turns (they spill elsewhere, and for heads of 80 and 96 with 64 rows).
_ATTENTION_OF = {
    90: {
        (2, 64): AttentionLaunch(64, 64, 512, 4, 3, 255),
        (2, 80): AttentionLaunch(32, 64, 512, 4, 3, 255),
        (2, 96): AttentionLaunch(32, 64, 512, 4, 3, 255),
        (2, 128): AttentionLaunch(64, 64, 512, 4, 3, 0),
        (2, 256): AttentionLaunch(32, 32, 512, 4, 3, 255),
    },
    100: {(2, 256): AttentionLaunch(32, 32, 512, 4, 3, 255)},
}
# Over caches of e4m3 codes, where the general entry does not fit, as what is decoded takes
# registers. 16-bit heads of 256 would spill 396 bytes on gfx942; fp32 heads of 128 144 to 216 on
# NVIDIA's; those of 256 as much, with 16 warps or 2 stages too: there one tile is loaded at a time.
# Of fp32 heads of 16, 8 warps would copy 2 bytes a lane: copies that overlap are of 4 at least.
_ATTENTION_OF_CODES = {
    (2, 256): AttentionLaunch(32, 16, 512, 8, 3, 255),
    (4, 16): AttentionLaunch(16, 32, 512, 4, 3, 255),
    (4, 128): AttentionLaunch(16, 16, 512, 8, 3, 255),
    (4, 256): AttentionLaunch(16, 16, 512, 8, 1, 255),
}

# By bytes per element. 64 rows of 16-bit numbers are one wgmma on sm_90; fp32 is scalar again.
_LINEAR = {
    2: LinearLaunch(64, 64, 64, 8, 4),
    4: LinearLaunch(32, 64, 32, 8, 3),
}

# 16 numbers a lane, 8 of AMD's 64 lanes; either way loads of 16 bytes.
GATED = RowLaunch(1024, num_warps=2)
SAMPLE = RowLaunch(4096, num_warps=4)
ACCEPT = RowLaunch(32, num_warps=1)
# Of pairs of a row and an expert. Two loads of 16 bytes a lane; with more warps one would spill.
SORT = RowLaunch(1024, num_warps=4)
ADD_EXPERTS = RowLaunch(512, num_warps=1)
SHORT_CONV = RowLaunch(512, num_warps=1)
# Numbers of a recurrent layer's state that a program, of one warp, holds in registers.
STATE_NUMBERS = 2048
# Numbers of a row that is kept.
KEEP_ROWS = RowLaunch(1024, num_warps=2)
# Segments that a program looks through at a time for that of its row.
SEGMENTS = 64

# Attention's programs are as many as a device runs at a time; who computes what changes no bit.
PROGRAMS_PER_SM = 2
# Those that share the merge of an item.
MERGE_PROGRAMS = 8
PROGRAMS_INTERPRETED = 4
MAX_WORKSPACE_BYTES = 256 << 20


def padded(head_dim: int) -> int:
    """Head size as a tile sees it: the next power of two, and wide enough for tl.dot."""
    return max(MIN_DOT, next_power_of_2(head_dim))


def next_power_of_2(n: int) -> int:
    """Smallest power of two >= n; n >= 1."""
    return 1 << (n - 1).bit_length()


def vector(dtype: torch.dtype, size: int) -> int:
    """Largest power of two, 16 bytes at most, of which every head or row of this size begins at a
    multiple."""
    return min(VECTOR_BYTES // dtype.itemsize, size & -size)


def aligned(*tensors: Tensor) -> bool:
    """Whether all begin at a multiple of 16 bytes; triton compiles another binary for those that do
    not."""
    return all(t.data_ptr() % VECTOR_BYTES == 0 for t in tensors)


def vectorizable(x: Tensor, vec: int, start: int = VECTOR_BYTES) -> Tensor:
    """x itself, or a contiguous copy of it where its layout would need another binary: where a row
    would not begin at a multiple of ``vec`` elements, or x not at one of ``start`` bytes."""
    *strides, last = x.stride()
    begins = x.data_ptr() % start == 0
    if last == 1 and begins and all(stride % vec == 0 for stride in strides):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def state_blocks(dk: int, dv: int) -> tuple[int, int]:
    """Rows of a head's state, all of them, and columns that a program of a recurrent layer owns."""
    keys, values = (1 << (size - 1).bit_length() for size in (dk, dv))
    return keys, min(values, max(1, STATE_NUMBERS // keys))


@cache
def capability(device: torch.device) -> int:
    """Compute capability of an NVIDIA GPU, 90 for 9.0; of others 0."""
    if device.type != "cuda" or IS_HIP:
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def state_options(device: torch.device) -> dict[str, int | bool]:
    """Compile options of recurrent layers: triton 3.9 would spill a number a token on sm_100."""
    return {**OPTIONS, "maxnreg": 255} if capability(device) == 100 else {**OPTIONS}


def attention(
    dtype: torch.dtype, head_dim: int, device: torch.device, codes: bool = False
) -> AttentionLaunch:
    """Entry of paged attention with queries of ``dtype``; head_dim up to MAX_HEAD_DIM. codes:
    whether keys and values are e4m3 codes."""
    here = _ATTENTION_OF.get(capability(device), {})
    table = _ATTENTION | _ATTENTION_OF_CODES if codes else _ATTENTION
    own, next_one = ((dtype.itemsize, size) for size in (head_dim, padded(head_dim)))
    return here.get(own) or table.get(own) or here.get(next_one) or table[next_one]


@cache
def programs(device: torch.device) -> int:
    """How many programs share the work of attention on ``device``."""
    if device.type != "cuda":
        return PROGRAMS_INTERPRETED
    return PROGRAMS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count


def workspace_entries(wanted: int, head_dim: int) -> int:
    """Of ``wanted`` partial results, those for which there is memory."""
    return min(wanted, MAX_WORKSPACE_BYTES // (4 * (padded(head_dim) + 2)))


def merge(head_dim: int) -> RowLaunch:
    """Entry of the kernel that merges splits: rows of one head at a time."""
    return RowLaunch(4, num_warps=1 if padded(head_dim) <= 128 else 4)


def kv_write(head_dim: int) -> RowLaunch:
    """Entry of the fused KV write."""
    return RowLaunch(4, num_warps=1 if padded(head_dim) <= 128 else 2)


def merge_lanes(blocks: int) -> int:
    """Lanes of a row's blocks in one tile; one number for vocabularies up to half a million."""
    return max(128, next_power_of_2(blocks))


def rms_norm(size: int) -> RowLaunch:
    """Entry of add_rms_norm; size up to MAX_NORM.

    A whole row stays in the registers of one program, so it is read once. 512 numbers a warp are 16
    a lane: two loads of 16 bytes in 16 bits. In the widest rows they are 64.
    """
    block = next_power_of_2(size)
    return RowLaunch(block, num_warps=min(16, max(1, block // 512)))


def linear(dtype: torch.dtype) -> LinearLaunch:
    """Entry of linear."""
    return _LINEAR[dtype.itemsize]
