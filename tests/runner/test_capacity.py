"""Memory that a pool may have on a GPU: from what torch's allocator says of it, without one."""

import pytest
import torch

from tinyspec.runner.capacity import _free_memory

GPU = torch.device("cuda", 0)


@pytest.mark.parametrize(
    "counts, free",
    [
        ({}, 100),  # nothing was allocated yet
        ({"reserved": 70, "allocated": 30}, 140),
        # Of segments of which a part is in use, whichever stream's.
        ({"reserved": 70, "allocated": 30, "inactive_split": 25}, 115),
        ({"reserved": 70, "allocated": 30, "inactive_split": 40}, 100),
    ],
    ids=str,
)
def test_what_the_allocator_keeps(counts, free, monkeypatch):
    stats = {f"{name}_bytes.all.current": count for name, count in counts.items()}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 1000))
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    assert _free_memory(GPU) == free


def test_names_of_the_allocators_counts():
    """As torch's documentation of ``memory_stats`` has them."""
    said = torch.cuda.memory_stats.__doc__
    assert all(f"{name}_bytes" in said for name in ("reserved", "allocated", "inactive_split"))
    assert "all" in said and "current" in said
