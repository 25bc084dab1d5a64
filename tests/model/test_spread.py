"""A model spread over two processes is refused by name in both, by whatever serves; one that is
whole in both has the bits and the fingerprint of one process."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from transformers.distributed import DistributedConfig

import tinyspec
from tests.support.loading import CONFIG, DETERMINISTIC, PROMPTS, greedy, load, saved, serve
from tests.support.tiny import tiny
from tinyspec import AsyncEngine, Engine, UnsupportedModelError, doctor

SERVING = (
    lambda model: Engine(model, config=CONFIG),
    lambda model: AsyncEngine(model, config=CONFIG),
    lambda model: tinyspec.patch(model, CONFIG),
    lambda model: tinyspec.patch(model, CONFIG, forward=True),
    lambda model: tinyspec.canonical(model, CONFIG).__enter__(),
)


def spread(folder: str):
    """Models that transformers or torch spread over this process and the other, and the reasons."""
    yield load(folder, tp_plan="auto"), r"it is spread over 2 processes \(tp=2\)"
    for name in ("pp", "fsdp"):
        config = DistributedConfig(**{f"{name}_size": 2})
        yield load(folder, distributed_config=config), rf"over 2 processes \({name}=2\)"
    yield fully_shard(tiny()), r"embed_tokens.weight is sharded over devices \(DTensor\)"
    mesh, plan = dist.init_device_mesh("cpu", (2,)), ColwiseParallel(output_layouts=Replicate())
    yield parallelize_module(tiny(), mesh, {"lm_head": plan}), "lm_head.weight is sharded over dev"


def work(rank: int, port: int, folder: str, alone: list, fingerprint: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    minute = timedelta(minutes=1)  # where one waits for the other the test fails soon
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=minute)
    for model, reason in spread(folder):
        for served in SERVING:
            with pytest.raises(UnsupportedModelError, match=f"ForCausalLM is not supp.*{reason}"):
                served(model)
        assert "is not supported" in doctor(model).problems[0]
        # The control: it is spread, works, and neither process has run ahead of the other.
        assert greedy(model) == alone
    whole = tiny()
    assert serve(whole, alone) == fingerprint
    with Engine(whole, config=CONFIG) as engine:
        fully_shard(whole)
        with pytest.raises(UnsupportedModelError, match="sharded over devices"):
            engine.generate(PROMPTS, DETERMINISTIC)
    wrapper = FullyShardedDataParallel(tiny(), device_id=torch.device("cpu"), use_orig_params=True)
    with pytest.raises(UnsupportedModelError, match=r"embed_tokens.weight is not whole"):
        Engine(wrapper.module, config=CONFIG)
    with FullyShardedDataParallel.summon_full_params(wrapper, writeback=False):
        assert serve(wrapper.module, alone) == fingerprint
    dist.destroy_process_group()


@pytest.mark.slow("environments", 22)
def test_two_processes(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    alone, fingerprint = greedy(tiny()), serve(tiny())
    mp.spawn(work, args=(port, saved(tmp_path), alone, fingerprint), nprocs=2)
