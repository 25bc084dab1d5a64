"""Freed memory stays with the process: how many pages are faulted in again."""

import ctypes
import resource
import sys

import pytest
import torch

from tinyspec.model.cpu import heap

pytestmark = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library is not glibc"
)


def faults():
    """Minor page faults of twenty tensors of 8 MB, each written and freed before the next."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.zeros(8 << 20, dtype=torch.uint8).fill_(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_freed_memory_is_used_again():
    libc = ctypes.CDLL(None)
    try:
        assert libc.mallopt(heap.M_MMAP_THRESHOLD, 128 << 10)
        assert libc.mallopt(heap.M_TRIM_THRESHOLD, 128 << 10)
        returned = faults()
    finally:
        assert heap.keep_freed_memory()
    faults()
    assert faults() < returned / 4


def test_without_glibc(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not heap.keep_freed_memory()
