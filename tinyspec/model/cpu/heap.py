"""glibc's allocator, told to keep freed memory for the next pass.

By default glibc maps every large block anew and unmaps it when it is freed, so each pass faults its
activations in again, page by page. The settings hold for the whole process.
"""

from __future__ import annotations

import ctypes
import sys

# From malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
# The largest that every glibc accepts. Where glibc raises the threshold by itself, what it keeps at
# the top of the heap is twice that, too.
MMAP_BYTES = 32 << 20


def keep_freed_memory() -> bool:
    """Serve blocks below 32 MB from the heap and keep up to 64 MB of it; whether glibc took that.

    False without glibc (macOS, musl), where nothing changes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    return mallopt is not None and bool(
        mallopt(M_MMAP_THRESHOLD, MMAP_BYTES) and mallopt(M_TRIM_THRESHOLD, 2 * MMAP_BYTES)
    )
