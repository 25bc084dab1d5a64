"""Freed memory stays with the process: how many pages are faulted in again."""

import ctypes
import subprocess
import sys

import pytest

# In a process of its own, whose heap has no large free block yet.
SCRIPT = """
import ctypes, resource

from tinyspec.model import cpu_linears as heap

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        block = libc.malloc(8 << 20)
        ctypes.memset(block, 1, 8 << 20)
        libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

assert libc.mallopt(heap.M_MMAP_THRESHOLD, 128 << 10)
assert libc.mallopt(heap.M_TRIM_THRESHOLD, 128 << 10)
returned = faults()
assert heap.keep_freed_memory()
faults()
print(returned, faults())
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="not glibc")
def test_freed_memory_is_used_again():
    command = [sys.executable, "-c", SCRIPT]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    returned, kept = map(int, run.stdout.split())
    assert returned >= 20
    assert kept < returned / 4
