"""``tinyspec batch``: one file of the same bytes, whatever actors, blocks and deaths there are."""

import json
import os
import random
import signal
import threading
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tinyspec import Engine, SamplingParams
from tinyspec.tools.demo import BUNDLED

pytest.importorskip("ray")

import psutil
import ray
from ray.cluster_utils import Cluster

import tinyspec.integrations.ray as engines

ANIMALS = ("fox", "dog", "bee", "turtle", "small grey mouse", "bird", "cat", "frog")
LINES = [
    {"id": f"row {n}", "prompt": f"One {'very ' * (n % 5)}dark day a {ANIMALS[n % 8]}"}
    | {"max_new_tokens": 6 + n % 7}
    | ({} if n % 3 else {"temperature": 0, "stop_strings": "day"})
    | ({} if n % 4 else {"seed": n})
    for n in range(64)
]
ASKED = ("--deterministic", "--temperature", 0.8, "--dtype", "bfloat16", "--device", "cpu")


@pytest.fixture
def local():
    ray.init("local", num_cpus=9, include_dashboard=False, object_store_memory=2**27)
    yield
    ray.shutdown()


@pytest.fixture
def cluster():
    """Three nodes on this machine, the first of which stays."""
    nodes = Cluster(True, head_node_args={"num_cpus": 4, "object_store_memory": 2**27})
    nodes.others = [nodes.add_node(num_cpus=2, object_store_memory=2**27) for _ in range(2)]
    ray.init(nodes.address)
    yield nodes
    ray.shutdown()
    nodes.shutdown()


@pytest.fixture(scope="module")
def expected():
    """What an engine gives by itself, each line in a call of its own."""
    lines = []
    with Engine.from_pretrained(BUNDLED, "bfloat16", "cpu") as engine:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        for line in LINES:
            own = {"temperature": 0.8, **{n: line[n] for n in line if n not in ("id", "prompt")}}
            if own["temperature"]:
                own.setdefault("seed", engines.row_seed(0, line["id"]))
            params = SamplingParams(deterministic=True, logprobs=True, **own)
            (output,) = engine.generate([line["prompt"]], params)
            lines.append(replace(output, request_id=line["id"]).to_json(stats=False))
        torch.set_num_threads(before)
    return "".join(f"{line}\n" for line in lines).encode()


@pytest.fixture
def batch(command, tmp_path):
    """Runs the command on lines; the bytes of its file, or what it says."""

    def run(lines, name, *options, exits=0):
        path, folder = tmp_path / f"{name}.jsonl", tmp_path / name
        path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        status, _, told = command("batch", path, folder, *ASKED, *options)
        assert status == exits, told
        if exits:
            return told
        assert [p.name for p in folder.rglob("*.jsonl")] == ["outputs.jsonl"]
        return (folder / "outputs.jsonl").read_bytes()

    return run


@pytest.mark.parametrize(
    "line, word",
    [
        ("{", "line 2: it is not JSON"),
        ('{"prompt": "A", "id": 0}', "line 2: id=0 is not allowed: another"),
        ('{"prompt": "A", "id": 1.5}', "line 2: id=1.5"),
        ('{"prompt": "A", "temperature": -1}', "line 2: temperature=-1"),
        ('{"prompt": "A", "temprature": 1}', "did you mean temperature"),
        ('{"id": "x"}', "line 2: prompt=None is not allowed: text"),
    ],
)
def test_bad_lines_are_all_named_before_anything_runs(command, tmp_path, line, word):
    path = tmp_path / "in.jsonl"
    path.write_text(f'{{"prompt": "A", "id": "0"}}\n{line}\n{{"prompt": []}}\n[1]\n')
    status, _, told = command("batch", path, tmp_path / "out")
    assert status == 2 and word in told and "line 3" in told and "line 4" in told
    assert not (tmp_path / "out").exists() and not ray.is_initialized()


def files(folder, pattern):
    return len(list(Path(folder).glob(pattern)))


@contextmanager
def whenever(folder, act):
    """Call ``act`` whenever the checkpoint has grown meanwhile; how large it was when that did
    something."""
    calls, done = [], threading.Event()

    def watch():
        seen = 0
        while not done.wait(0.05):
            now = files(folder / "checkpoint", "*[0-9].parquet")
            if now > seen and act():
                seen = now
                calls.append(now)

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield calls
    finally:
        done.set()
        watching.join()


def kill_one():
    """Kill a process of an actor that is loaded, as from outside; whether there was one."""
    for process in psutil.Process().children(recursive=True):
        if process.name().startswith("ray::MapWorker(MapBatches(Generate"):
            process.send_signal(signal.SIGKILL)
            return True
    return False


@pytest.mark.slow("environments", 150)
def test_the_same_bytes_for_all_actors_blocks_and_orders(batch, local, expected, monkeypatch):
    """Controls: another base of seeds, and without --deterministic."""
    assert batch(LINES, "one", "--rows", 64) == expected
    assert batch(LINES, "two", "--actors", 2, "--rows", 5) == expected
    shuffled = random.Random(0).sample(LINES, len(LINES))
    found = batch(shuffled, "four", "--actors", 4, "--rows", 1)
    assert sorted(found.splitlines()) == sorted(expected.splitlines())
    assert batch(LINES, "another base", "--seed", 1) != expected
    monkeypatch.setitem(globals(), "ASKED", ASKED[1:])
    assert batch(LINES, "plain", "--rows", 3) != batch(LINES, "plain again", "--rows", 64)


@pytest.mark.slow("environments", 120)
def test_the_same_bytes_whoever_dies(batch, local, expected, tmp_path, monkeypatch):
    """Actors killed from outside as blocks are done, and actors that die after every 16 rows."""
    with whenever(tmp_path / "killed", kill_one) as killed:
        assert batch(LINES, "killed", "--actors", 2, "--rows", 8) == expected
    assert killed

    class Mortal(engines.Generate):
        """Ends its process when it has returned 16 rows and is asked for more."""

        returned = 0

        def __call__(self, table):
            if self.returned >= 16:
                (tmp_path / f"died {os.getpid()}").touch()
                os._exit(1)
            self.returned += table.num_rows
            return super().__call__(table)

    monkeypatch.setattr(engines, "Generate", Mortal)
    assert batch(LINES, "mortal", "--actors", 2, "--rows", 8) == expected
    assert files(tmp_path, "died *") >= 2


@pytest.mark.slow("environments", 90)
def test_the_same_bytes_where_nodes_are_lost(batch, cluster, expected, tmp_path):
    """Both nodes beside the driver's, each with its actors, one after the other."""

    def lose():
        if cluster.others:
            cluster.remove_node(cluster.others.pop(), allow_graceful=False)
        return True

    with whenever(tmp_path / "lost", lose) as lost:
        assert batch(LINES, "lost", "--actors", 3, "--rows", 4) == expected
    assert lost and not cluster.others


@pytest.mark.slow("environments", 90)
def test_a_checkpoint_is_not_computed_again(batch, local, expected, tmp_path, monkeypatch):
    """Nor is another engine's taken for it."""
    plainly = engines.Generate

    def counts(folder, most):
        """Counts its rows in a folder, and fails behind so many."""
        folder.mkdir()

        class Counts(plainly):
            def __call__(self, table):
                if files(folder, "*") >= most:
                    raise KeyError("a mistake")
                for row in table["row"].to_pylist():
                    (folder / f"{row}").touch()
                return super().__call__(table)

        monkeypatch.setattr(engines, "Generate", Counts)

    counts(tmp_path / "counted", 24)
    assert "a mistake" in batch(LINES, "out", "--rows", 8, exits=2)
    committed = 8 * files(tmp_path / "out" / "checkpoint", "*[0-9].parquet")
    assert 0 < committed <= 24
    assert "began with other requests" in batch(LINES[1:], "out", exits=2)

    class Other(plainly):
        def load(self):
            loading = {**self.job.loading, "dtype": "float32"}
            return engines.Engine.from_pretrained(self.job.model, **loading)

    monkeypatch.setattr(engines, "Generate", Other)
    assert "dtype bfloat16 -> float32" in batch(LINES, "out", exits=2)

    counts(tmp_path / "again", len(LINES))
    assert batch(LINES, "out", "--rows", 8) == expected
    assert files(tmp_path / "again", "*") == len(LINES) - committed
    assert batch(LINES, "out") == expected  # there already
