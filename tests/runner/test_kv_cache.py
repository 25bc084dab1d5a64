"""The page pool takes what is asked for or is refused with the bytes; never more than its share."""

import os
from pathlib import Path

import pytest
import torch

from tests.support.tiny import prompts, tiny
from tinyspec import Engine, EngineConfig, SamplingParams
from tinyspec.runner import kv_cache

# Of a page of 16 tokens: two layers of k and v, two heads of 16, in fp32.
PAGE = 2 * 2 * 2 * 16 * 16 * 4
SHORT = SamplingParams(max_new_tokens=3)
GPU = torch.device("cuda", 0)
STATM = Path("/proc/self/statm")


def free(monkeypatch, pages: float) -> None:
    """Memory for so many pages."""
    monkeypatch.setattr(kv_cache, "free_memory", lambda device: int(pages * PAGE))


def resident() -> int:
    """Bytes of memory that this process uses."""
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def engine_of(**settings) -> Engine:
    grows = settings.pop("grows", False)
    return Engine(tiny(), config=EngineConfig(page_size=16, **settings), grows=grows)


def bytes_of(engine: Engine) -> int:
    """What the pool's tensors take."""
    cache = engine.runner.cache
    return sum(tensor.nbytes for tensor in (*cache.k, *cache.v))


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_pools_begin_as_zeros(backend, monkeypatch):
    def poisoned(shape, **given):
        return torch.full(shape, torch.nan, **given)

    with engine_of(backend=backend, num_pages=4) as engine:
        monkeypatch.setattr(kv_cache.torch, "empty", poisoned)
        cache = engine.runner.pages(6)
    for pool in (*cache.k, *cache.v):
        assert len(pool) == 6 and not pool.any()
        assert pool.data_ptr() % kv_cache.ALIGNED == 0


@pytest.mark.skipif(not STATM.exists(), reason="Linux tells what of its memory a process uses")
def test_a_pool_takes_memory_as_it_is_used():
    """Control: once it is written it is taken."""
    with engine_of(num_pages=4) as engine:
        before = resident()
        cache = engine.runner.pages(16_000)
        size = 16_000 * PAGE
        made = resident()
        assert made - before < size / 10
        for pool in (*cache.k, *cache.v):
            pool.fill_(1)
        assert resident() - made > size / 2


def test_codes_of_8_bits_take_a_quarter_of_fp32(monkeypatch):
    free(monkeypatch, 10)
    with engine_of(num_pages=40, kv_dtype="fp8_e4m3") as engine:
        assert bytes_of(engine) == 40 * PAGE // 4
        engine.generate(prompts(2), SHORT)
    with pytest.raises(ValueError, match=f"{41 * PAGE // 4} bytes, .*enough for 40"):
        engine_of(num_pages=41, kv_dtype="fp8_e4m3")
    with pytest.raises(ValueError, match=f"{40 * PAGE} bytes, .*enough for 10"):
        engine_of(num_pages=40)


def test_what_just_fits(monkeypatch):
    free(monkeypatch, 39.9)
    with pytest.raises(ValueError, match=f"{40 * PAGE} bytes, .*enough for 39"):
        engine_of(num_pages=40)
    free(monkeypatch, 40)
    with engine_of(num_pages=40) as engine:
        assert bytes_of(engine) == 40 * PAGE
        engine.generate(prompts(2), SHORT)
        engine.release()
        free(monkeypatch, 20)  # another has taken the rest
        with pytest.raises(ValueError, match="num_pages=40"):
            engine.generate(prompts(2), SHORT)


def test_a_share_of_what_is_free_when_it_is_taken(monkeypatch):
    """Not of what was free when the engine was made, or before ``release``."""
    free(monkeypatch, 80)
    with engine_of(memory_fraction=0.5) as engine:
        assert engine.pool.num_pages == 40
        free(monkeypatch, 60)
        engine.generate(prompts(2), SHORT)
        assert engine.pool.num_pages == 30 and bytes_of(engine) == 30 * PAGE
        free(monkeypatch, 2)
        engine.generate(prompts(2), SHORT)
        assert engine.pool.num_pages == 30, "while it is held"
        for pages in (26, 100):
            engine.release()
            free(monkeypatch, pages)
            engine.generate(prompts(1), SHORT)
            assert engine.pool.num_pages == pages // 2 and bytes_of(engine) == pages // 2 * PAGE


def test_a_pool_that_grows_takes_a_share_too(monkeypatch):
    """On a CPU pages that were never written have taken nothing yet."""
    free(monkeypatch, 80)
    with engine_of(memory_fraction=0.5, grows=True) as engine:
        engine.reserve(30)
        engine.generate([[1] * 50], SHORT)
        written = engine.runner.pages_taken
        assert 4 <= written < 10
        free(monkeypatch, 80 - written)
        engine.reserve(100)
        assert engine.pool.num_pages == 40
        engine.reserve(200)
        assert engine.pool.num_pages == 40
        engine.generate(prompts(2), SHORT)


V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("memory.max", "memory.current", "inactive_file")


def group(folder, names, limit, used, files) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\n{names[2]} {files}\nfile 2\n")


@pytest.mark.parametrize(
    "lines, root, names",
    [("0::/a/b\n", "", V2), ("5:cpu:/a\n4:memory:/a/b\n0::/\n", "memory", V1)],
    ids=["version 2", "version 1"],
)
def test_control_groups(tmp_path, lines, root, names):
    """Each one around the process that has a limit."""
    assert kv_cache.group_memory(tmp_path) == []
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(lines)
    assert kv_cache.group_memory(tmp_path) == []
    folder = tmp_path / "sys/fs/cgroup" / root
    group(folder / "a/b", names, "max", 10, 0)
    group(folder / "a", names, 1000, 700, 50)
    group(folder, names, 5000, 6000, 1)
    assert kv_cache.group_memory(tmp_path) == [350, 0]


# On a GPU, from what torch's allocator says


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
def test_what_the_allocator_of_a_gpu_keeps(counts, free, monkeypatch):
    stats = {f"{name}_bytes.all.current": count for name, count in counts.items()}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 1000))
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    assert kv_cache.free_memory(GPU) == free
