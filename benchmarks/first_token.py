"""How long a first deterministic token takes, and what of that was compiling and capturing.

    python -m benchmarks.first_token --preset qwen3-0.6b --journal FILE [--cold] [--smoke]

A fresh process, random weights, a prompt of 16 tokens. Appends a line of the first token (seconds,
and of processor time for each thread, which other processes of a busy machine do not lengthen), and
one of requests until their passes are graphs.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import triton
from huggingface_hub import constants

from benchmarks import journal, presets
from benchmarks.workloads import DEVICE, synchronize
from tinyspec import Engine, EngineConfig, SamplingParams
from tinyspec.runner.graphs import CudaGraph

PROMPT = [*range(5, 21)]
PASSES = 10
BATCHES, TOKENS = (1, 8, 64), 24
# Cases, by ``--cold``.
DISKS = ("with what is on disk", "nothing on disk")


class Compiled:
    """Kernels that triton compiles or finds on disk while this object is its listener."""

    def __init__(self) -> None:
        self.seconds, self.found = Counter[str](), 0

    def __call__(
        self, *, src: Any, metadata: dict[str, Any], times: Any, cache_hit: bool, **_: Any
    ) -> None:
        self.found += cache_hit
        if not cache_hit:
            self.seconds[metadata["name"]] += times.total / 1e6

    def line(self) -> dict[str, Any]:
        """What a line says of them: seconds by kernel, the longest first."""
        longest = {name: round(seconds, 2) for name, seconds in self.seconds.most_common()}
        took = round(sum(self.seconds.values()), 2)
        return {"compile_s": took, "compiled": str(longest), "binaries_on_disk": self.found}


class Captures:
    """Graphs, the seconds that they take, and the memory that the process has reserved for them."""

    def __init__(self) -> None:
        self.count, self.seconds, self.bytes = 0, 0.0, 0
        self._capture = CudaGraph.capture

    def capture(self, graph: CudaGraph, work: Callable[[], Any]) -> Any:
        torch.cuda.empty_cache()  # as a capture begins
        began, before = time.perf_counter(), torch.cuda.memory_reserved()
        result = self._capture(graph, work)
        self.count += 1
        self.seconds += time.perf_counter() - began
        self.bytes += torch.cuda.memory_reserved() - before
        return result

    def line(self) -> dict[str, Any]:
        mebibytes = round(self.bytes / 2**20, 1)
        return {"graphs": self.count, "capture_s": round(self.seconds, 2), "MiB": mebibytes}


@contextmanager
def nothing_on_disk() -> Iterator[None]:
    """Neither compiled kernels nor results of proofs."""
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.object(constants, "HF_HOME", folder),
        patch.object(triton.knobs.cache, "dir", folder),
    ):
        yield


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """Seconds of a call: of wall time, and of processor time for each thread."""
    wall, own = time.perf_counter(), time.process_time()
    call()
    synchronize()
    return time.perf_counter() - wall, (time.process_time() - own) / torch.get_num_threads()


def first(engine: Engine) -> dict[str, Any]:
    """Everything in turn, on an engine that knows at most what is on disk."""
    params = SamplingParams(max_new_tokens=1, ignore_eos=True, deterministic=True)
    compiled = Compiled()
    with patch.object(triton.knobs.compilation, "listener", compiled):
        proof = timed(engine.contract.ensure)
        token = timed(lambda: engine.generate([PROMPT], params))
    # A prompt of 16 tokens is one pass of the reference bucket.
    passes = [timed(lambda: engine.generate([[7, *PROMPT[1:]]], params)) for _ in range(PASSES)]
    token = [sum(both) for both in zip(proof, token, strict=True)]
    found = {}
    for name, clock in (("s", 0), ("cpu_s", 1)):
        found[f"first_token_{name}"] = round(token[clock], 2)
        found[f"proof_{name}"] = round(proof[clock], 2)
        found[f"reference_pass_{name}"] = round(min(took[clock] for took in passes), 4)
    return found | compiled.line()


def settling(engine: Engine) -> dict[str, Any]:
    """Batches of deterministic requests, each until its passes have come often enough for a
    graph."""
    compiled, captures = Compiled(), Captures()
    params = SamplingParams(max_new_tokens=TOKENS, ignore_eos=True, deterministic=True)
    with (
        patch.object(triton.knobs.compilation, "listener", compiled),
        patch.object(CudaGraph, "capture", lambda *given: captures.capture(*given)),
    ):
        seconds = [timed(lambda n=n: engine.generate([PROMPT] * n, params))[0] for n in BATCHES]
    return {"seconds": round(sum(seconds), 2), **captures.line(), **compiled.line()}


def main(arguments: list[str] | None = None) -> int:
    """Measure one model."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--preset", choices=presets.PRESETS, required=True)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes")
    journal.add_options(parser)
    parser.add_argument("--cold", action="store_true", help="whatever is on disk is not used")
    options = parser.parse_args(arguments)
    lines = journal.Journal.of(options)
    preset = "tiny" if options.smoke else options.preset
    name = f"{preset}, {DISKS[options.cold]}"
    model: Any = presets.build(preset, torch.bfloat16, DEVICE)
    config = EngineConfig(max_model_len=1024)
    with (
        nothing_on_disk() if options.cold else nullcontext(),
        Engine(model, config=config) as engine,
    ):
        lines.run("first token", name, partial(first, engine), least=5)
        lines.run("until passes are graphs", name, partial(settling, engine), least=5)
    return int(lines.failed)


if __name__ == "__main__":
    raise SystemExit(main())
