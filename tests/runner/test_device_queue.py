"""When the results of work are read; an event poses for a GPU's."""

import torch

from tinyspec.runner import device_queue
from tinyspec.runner.device_queue import Pending


def test_results_are_read_once_they_have_arrived(monkeypatch):
    told = []

    class Event:
        def record(self, stream):
            told.append(f"{stream} records")

        def synchronize(self):
            told.append("arrived")

    class There:
        device = torch.device("cuda", 0)

        def tensors(self):
            return [None, self]

        def numpy(self):
            told.append("read")

    def sent(tensor):
        told.append("sent")
        return tensor

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "caller")
    monkeypatch.setattr(device_queue, "_to_host", sent)
    pending = Pending(There)
    assert told == ["sent", "caller records"]
    assert pending.fetch() == [None, None]
    assert told == ["sent", "caller records", "arrived", "read"]
