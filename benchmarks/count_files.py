"""How far one prompt travels: files and functions of the package that it enters, and calls from a
lower wing into a higher one.

    python benchmarks/count_files.py [--deterministic] [--list]

A prompt goes through a patched ``generate`` once before it is counted. A call is one (caller,
callee) pair of functions, however often it is made; the shared files belong to no wing.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import tinyspec

PACKAGE = Path(tinyspec.__file__).parent
# From the highest to the lowest.
WINGS = (
    *("cli", "tools", "drop_in", "engine", "thinking"),
    *("determinism", "runner", "scheduler", "model", "kernels"),
)


def wing(file: str) -> int | None:
    """The place of a file's wing, None for the shared files."""
    first = Path(file).relative_to(PACKAGE).parts[0]
    return WINGS.index(first) if first in WINGS else None


class Count:
    """Files and functions entered, and calls upwards, while it is the profiler."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.functions: set[CodeType] = set()
        self.upwards: set[tuple[str, str]] = set()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call" or not _is_ours(frame):
            return
        callee, caller = frame.f_code, frame.f_back
        self.files.add(callee.co_filename)
        self.functions.add(callee)
        # Through the code of libraries, as of torch's modules, to who called that.
        while caller is not None and not _is_ours(caller):
            caller = caller.f_back
        if caller is None:
            return
        above, below = wing(callee.co_filename), wing(caller.f_code.co_filename)
        if above is not None and below is not None and above < below:
            self.upwards.add((_named(caller), _named(frame)))


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(f"{PACKAGE}/")


def _named(frame: FrameType) -> str:
    path = Path(frame.f_code.co_filename).relative_to(PACKAGE)
    return f"{path}:{frame.f_code.co_qualname if sys.version_info >= (3, 11) else ''}"


def count(deterministic: bool) -> Count:
    """Of the second of two equal calls."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
    )
    model: Any = LlamaForCausalLM(config).eval()
    tinyspec.patch(model)
    found = Count()
    ids = torch.tensor([[1, 2, 3, 4, 5]])
    settings = {"max_new_tokens": 8, "do_sample": False, "deterministic": deterministic}
    model.generate(ids, **settings)
    sys.setprofile(found)
    try:
        model.generate(ids, **settings)
    finally:
        sys.setprofile(None)
    tinyspec.unpatch(model)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--list", action="store_true", help="name them")
    options = parser.parse_args()
    found = count(options.deterministic)
    entered = f"{len(found.files)} files, {len(found.functions)} functions"
    print(f"{entered} entered, {len(found.upwards)} calls upwards")
    if options.list:
        for name in sorted(found.files):
            print(f"  {Path(name).relative_to(PACKAGE)}")
        for caller, callee in sorted(found.upwards):
            print(f"  {caller} -> {callee}")


if __name__ == "__main__":
    main()
