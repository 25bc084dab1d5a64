"""In which order a device is given work, and when its results are read; streams and events pose for
a GPU's."""

from contextlib import contextmanager

import pytest
import torch

from tinyspec.model.torch_state import DeviceStream
from tinyspec.runner import device_queue
from tinyspec.runner.device_queue import Pending

GPU = torch.device("cuda", 0)


@pytest.fixture
def told(monkeypatch):
    """What streams and events are asked for, in order."""
    log, current = [], []

    class Stream:
        def __init__(self, device=GPU, name="own"):
            self.name = name

        def wait_stream(self, other):
            log.append(f"{self.name} waits for {other.name}")

    class Event:
        def record(self, stream):
            log.append(f"{stream.name} records")

        def synchronize(self):
            log.append("arrived")

    @contextmanager
    def on(stream):
        current.append(stream)
        yield
        current.pop()

    current.append(Stream(name="caller"))
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextmanager(lambda: (yield))())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[-1])
    return log


def test_a_block_runs_behind_its_caller_and_before_it_goes_on(told):
    stream = DeviceStream(GPU)
    with stream():
        with stream():
            told.append("work")
        told.append("more")
    with pytest.raises(KeyError), stream():
        raise KeyError
    assert told == [
        *("own waits for caller", "work", "more", "caller waits for own"),
        *("own waits for caller", "caller waits for own"),
    ]


def test_results_are_read_once_they_have_arrived(told, monkeypatch):
    class There:
        device = GPU

        def tensors(self):
            return [None, self]

        def numpy(self):
            told.append("read")

    def sent(tensor):
        told.append("sent")
        return tensor

    monkeypatch.setattr(device_queue, "_to_host", sent)
    pending = Pending(There)
    assert told == ["sent", "caller records"]
    assert pending.fetch() == [None, None]
    assert told == ["sent", "caller records", "arrived", "read"]
