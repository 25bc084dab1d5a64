"""Work for the device: results in one transfer, errors kept until somebody asks."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from tinyspec.runner.device_queue import DeviceQueue, Transfer, pack, to_device, unpack

RESULTS = (
    [torch.tensor([5, -1, 2**40])],
    [torch.tensor([7]), torch.tensor([0.5, -torch.inf, 3.0]), torch.arange(15).int().view(5, 3)],
    [torch.arange(3), None, None, torch.tensor([torch.nan])],
    [torch.zeros(0, dtype=torch.int64), torch.arange(4.0)[::2]],
)


@dataclass
class Results:
    found: list[Tensor | None]

    def tensors(self):
        return self.found


def check(found, tensors):
    for array, tensor in zip(found, tensors, strict=True):
        if tensor is None:
            assert array is None
        else:
            expected = tensor.cpu().numpy()
            assert array.dtype == expected.dtype and array.shape == expected.shape
            assert array.tobytes() == expected.tobytes()


@pytest.mark.parametrize("tensors", RESULTS)
def test_one_buffer(tensors):
    packed = pack([tensor for tensor in tensors if tensor is not None])
    check(unpack(packed.numpy(), tensors), tensors)
    # Control.
    with pytest.raises(AssertionError):
        check(unpack((packed + 1).numpy(), tensors), [*tensors[:-1], torch.arange(2)])


@pytest.mark.parametrize("tensors", RESULTS)
def test_fetch(tensors):
    check(DeviceQueue().launch(lambda: Results(tensors)).fetch(), tensors)


@pytest.mark.gpu
@pytest.mark.parametrize("tensors", RESULTS)
def test_fetch_from_a_gpu(tensors):
    there = [None if tensor is None else tensor.cuda() for tensor in tensors]
    check(Transfer(there).fetch(), tensors)


def test_errors_wait_for_whoever_asks():
    def fails():
        raise ValueError("work")

    pending = DeviceQueue().launch(fails)
    assert pending.failed
    for ask in (lambda: pending.results, pending.fetch):
        with pytest.raises(ValueError, match="work"):
            ask()
    with pytest.raises(RuntimeError, match="has raised"):
        _ = pending.results


def test_arrays_are_not_copied_to_a_cpu():
    values = np.arange(4)
    tensor = to_device(values, torch.device("cpu"))
    values[0] = 9
    assert tensor.tolist() == [9, 1, 2, 3]
