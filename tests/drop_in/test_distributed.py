"""Canonical forwards in two processes on one machine: through DDP's own forward, and refused by
name for weights that FSDP2 shards."""

from __future__ import annotations

import os
import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import tinyspec
from tests.support import forward as f
from tests.support.zoo import VOCAB, prompts, tiny
from tinyspec import EngineConfig, UnsupportedModelError

CONFIG = EngineConfig(max_rows=64, reference_rows=16)
BATCH = torch.randint(3, VOCAB, (4, 33), generator=torch.Generator().manual_seed(0))


def patched():
    model = tiny("llama").train()
    tinyspec.patch(model, CONFIG, forward=True)
    return model


def data_parallel(rank: int, folder: str) -> None:
    """Half of the batch at once, and in two parts of one row each that add up."""
    model = patched()
    model.gradient_checkpointing_enable()
    wrapper, buckets = DistributedDataParallel(model), []

    def hook(state, bucket):
        buckets.append(bucket.index())
        reduced = dist.all_reduce(bucket.buffer().div_(2), async_op=True).get_future()
        return reduced.then(lambda future: future.value()[0])

    wrapper.register_comm_hook(None, hook)
    first, second = mine = BATCH.split(2)[rank]
    out = wrapper(mine, labels=mine, use_cache=False)
    whole = f.gradients(model, out.loss)
    with wrapper.no_sync():
        (wrapper(first[None], labels=first[None]).loss / 2).backward()
    assert len(buckets) == 1
    (wrapper(second[None], labels=second[None]).loss / 2).backward()
    assert len(buckets) == 2
    summed = {name: p.grad for name, p in model.named_parameters()}
    made = f.rollout(model, prompts()[:2], 5)
    assert made.equal([wrapper(torch.tensor([row])).logits[0] for row in made.rows])
    torch.save((out.logits.detach(), whole, summed), f"{folder}/{rank}")


def sharded(rank: int, folder: str) -> None:
    """Before ``patch`` or after it."""
    before, after = tiny("llama"), patched()
    mesh = init_device_mesh("cpu", (2,))
    for model in (before, after):
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    match = r"is sharded over devices \(DTensor\)"
    with pytest.raises(UnsupportedModelError, match=match):
        tinyspec.patch(before, CONFIG, forward=True)
    with pytest.raises(UnsupportedModelError, match=match):
        after(BATCH)


def work(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    data_parallel(rank, folder)
    sharded(rank, folder)
    dist.destroy_process_group()


def test_two_processes(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(work, args=(port, str(tmp_path)), nprocs=2)
    model = patched()
    out = model(BATCH, labels=BATCH)
    expected = f.gradients(model, out.loss)
    for rank in range(2):
        logits, *found = torch.load(tmp_path / str(rank))
        assert torch.equal(logits, out.logits.split(2)[rank])
        assert max(f.error(one, expected) for one in found) < 1e-6
