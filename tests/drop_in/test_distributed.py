"""Two processes on one machine: canonical forwards through DDP's own forward, refused by name for
weights that FSDP2 shards; and seeds of rows that are counted over both."""

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

CONFIG = EngineConfig(max_rows=16, reference_rows=16)
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


SAMPLED = {"do_sample": True, "temperature": 3.0, "top_k": 0, "max_new_tokens": 10}
SAMPLED |= {"pad_token_id": 0}
A, B = prompts()[:2]


def rows(model, given, **settings):
    settings = {**SAMPLED, **settings}
    return model.generate(given, **settings)[:, max(map(len, given)) :].tolist()


def seeded(rank: int, folder: str) -> None:
    """What a process samples by a base of seeds."""
    model = tiny("llama")
    tinyspec.patch(model, CONFIG, seed=5)
    found = [rows(model, [[A, B], [A, A]][rank])]
    if rank:  # transformers' own generate serves it
        ids = torch.tensor([A])
        mask = torch.ones_like(ids)
        mask[0, -1] = 0
        model.generate(ids, attention_mask=mask, **SAMPLED)
    else:
        found.append(rows(model, [B]))
    found.append(rows(model, [[A], [B]][rank]))
    torch.save(found, f"{folder}/seeded-{rank}")
    if rank:
        dist.destroy_process_group()
        return
    rows(model, [A], do_sample=False)  # alone
    rows(model, [A], seed=1)
    with pytest.raises(RuntimeError, match="over all ranks"):
        rows(model, [A])


def work(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    data_parallel(rank, folder)
    sharded(rank, folder)
    seeded(rank, folder)


@pytest.mark.slow("environments", 30)
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
    # Equal prompts on two ranks have the samples of one process that has all rows.
    first, second = (torch.load(tmp_path / f"seeded-{rank}") for rank in range(2))
    model = tiny("llama")
    tinyspec.patch(model, CONFIG, seed=5)
    calls = [rows(model, each) for each in ([A, B, A, A], [B], [A, B])]
    assert first == [calls[0][:2], calls[1], calls[2][:1]]
    assert second == [calls[0][2:], calls[2][1:]]
    assert len({tuple(row) for call in calls for row in call}) == 7
