"""The least time a device needs: bytes and operations of each kernel and of a whole step.

    python -m benchmarks.roofline --preset llama-3.1-8b --batch 1 64 --context 1024 [--device H200]

A kernel reads every input once and writes every output once; its floor is the larger of bytes over
bandwidth and of operations over rate, a step's the sum over its kernels. Norms, activations and
rotations count nothing in a step: they can be part of the kernels around them. Knows shapes and
devices; measures nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.presets import PRESETS
from benchmarks.render import table

INDEX = 8  # bytes of a slot, token id, key or position
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True)
class Device:
    """Bytes a second of the memory; operations a second, dense, by dtype of a product's inputs
    (float32: outside the tensor cores)."""

    name: str
    bandwidth: float
    rates: dict[str, float]

    def with_measured(self, bandwidth: float, matrix: float) -> Device:
        """The same device with the rates of a copy and of a 16-bit matrix product that were
        measured on it."""
        rates = self.rates | dict.fromkeys(("bfloat16", "float16"), matrix)
        return replace(self, bandwidth=bandwidth, rates=rates)


def _device(name: str, terabytes: float, matrix: float, scalar: float) -> Device:
    rates = {"bfloat16": matrix * 1e12, "float16": matrix * 1e12, "float32": scalar * 1e12}
    return Device(name, terabytes * 1e12, rates)


# Nominal, from the makers' data sheets, without sparsity: TB/s, TFLOP/s with 16-bit inputs and fp32
# sums, TFLOP/s of fp32. Copies reach about 0.9 of the bandwidth, products 0.8 of the rate.
DEVICES = {
    device.name: device
    for device in (
        _device("H200", 4.8, 989, 67),  # NVIDIA H200, SXM
        _device("H100", 3.35, 989, 67),  # NVIDIA H100, SXM
        _device("A100", 2.039, 312, 19.5),  # NVIDIA A100 80GB, SXM
    )
}


def here() -> Device | None:
    """This machine's GPU, if it is in the table."""
    return named(torch.cuda.get_device_name()) if torch.cuda.is_available() else None


def named(name: str) -> Device | None:
    """The device of the table that a driver's or user's name holds, as "NVIDIA H200"."""
    return next((device for key, device in DEVICES.items() if key in name), None)


@dataclass(frozen=True)
class Work:
    """Bytes that are read and written, and operations (two a multiply-add) of products whose inputs
    have ``dtype``."""

    bytes: int
    operations: int = 0
    dtype: str = "bfloat16"

    def seconds(self, device: Device) -> float:
        return max(self.bytes / device.bandwidth, self.operations / device.rates[self.dtype])

    def times(self, count: int) -> Work:
        return replace(self, bytes=count * self.bytes, operations=count * self.operations)


@dataclass(frozen=True)
class Heads:
    """Query heads, heads of keys and values, and their size."""

    q: int
    kv: int
    dim: int


def attention(
    heads: Heads, spans: Sequence[tuple[int, int]], dtype: str = "bfloat16", kv_bytes: int = 0
) -> Work:
    """Causal attention of each (first, end) of ``spans``: rows at positions first to end - 1.

    Every key and value of a context is read once, however many rows attend to it. kv_bytes: of one
    number in the cache, where it is another than ``dtype``'s.
    """
    rows = sum(end - first for first, end in spans)
    tokens = sum(end for _, end in spans)
    # Row p attends to p + 1 keys.
    pairs = sum((end * (end + 1) - first * (first + 1)) // 2 for first, end in spans)
    moved = 2 * rows * heads.q * heads.dim * BYTES[dtype]
    moved += 2 * tokens * heads.kv * heads.dim * (kv_bytes or BYTES[dtype])
    return Work(moved, 4 * pairs * heads.q * heads.dim, dtype)


def kv_write(heads: Heads, rows: int, dtype: str = "bfloat16") -> Work:
    """q, k and v in and out, cos and sin of every row in ``dtype``, and the slots."""
    numbers = 2 * (heads.q + 2 * heads.kv) * heads.dim + 2 * heads.dim
    return Work(rows * (numbers * BYTES[dtype] + INDEX), 0, dtype)


@dataclass(frozen=True)
class States:
    """Of a recurrent layer: heads of keys and of values, and their sizes."""

    key_heads: int
    heads: int
    dk: int
    dv: int


def linear(rows: int, inputs: int, outputs: int, dtype: str = "bfloat16") -> Work:
    """Weight, rows in, rows out."""
    numbers = inputs * outputs + rows * (inputs + outputs)
    return Work(numbers * BYTES[dtype], 2 * rows * inputs * outputs, dtype)


def recurrent(
    states: States, spans: list[tuple[int, int]], tile: int, dtype: str = "bfloat16"
) -> Work:
    """Of (first, end) of every sequence, from states at multiples of ``tile`` on: these, read, and
    written where the rows go beyond the next; keys and values in the ring, queries, keys and values
    of the rows, gates; results. Operations are of no product."""
    rows = sum(end - first for first, end in spans)
    size, gates = states.heads * states.dk * states.dv * 4, 2 * states.heads * 4
    kv = (states.key_heads * states.dk + states.heads * states.dv) * BYTES[dtype]
    held = sum(first % tile for first, _ in spans)
    own = states.key_heads * states.dk * BYTES[dtype] + states.heads * states.dv * 4
    read = sum(first > 0 for first, _ in spans)
    written = sum(end // tile > first // tile for first, end in spans)
    return Work((read + written) * size + (held + rows) * (kv + gates) + rows * own)


def sample(rows: int, vocab: int, dtype: str = "float32") -> Work:
    """Logits; temperature, key, position in, token and log-probability out, of every row."""
    return Work(rows * (vocab * BYTES[dtype] + 4 + 3 * INDEX + 4), 0, dtype)


def accept(requests: int, width: int, stops: int = 1) -> Work:
    """Drafts, targets and stop ids; ten int32 of every request (five in, five out)."""
    return Work(requests * ((2 * width + stops) * INDEX + 10 * 4))


def norm(rows: int, width: int, dtype: str = "bfloat16") -> Work:
    """Residual and its addend in, their sum and its norm out, and the weight."""
    return Work((4 * rows + 1) * width * BYTES[dtype], 0, dtype)


def activation(rows: int, width: int, dtype: str = "bfloat16") -> Work:
    """Gate and up in, their product out."""
    return Work(3 * rows * width * BYTES[dtype], 0, dtype)


def heads_of(config: Any) -> Heads:
    """Of a decoder's config."""
    q = config.num_attention_heads
    kv = getattr(config, "num_key_value_heads", None) or q
    return Heads(q, kv, getattr(config, "head_dim", None) or config.hidden_size // q)


def step(config: Any, spans: Sequence[tuple[int, int]], dtype: str = "bfloat16") -> dict[str, Work]:
    """Work of one pass by kernel: rows and contexts as in ``attention``, one token sampled for each
    span. Of a decoder with gated MLPs; no bias, no experts."""
    heads, rows = heads_of(config), sum(end - first for first, end in spans)
    width, inner, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    q_width, kv_width = heads.q * heads.dim, heads.kv * heads.dim
    return {
        "embedding": Work(rows * (2 * width * BYTES[dtype] + INDEX), 0, dtype),
        "q, k, v": linear(rows, width, q_width + 2 * kv_width, dtype).times(layers),
        "KV write": kv_write(heads, rows, dtype).times(layers),
        "attention": attention(heads, spans, dtype).times(layers),
        "o": linear(rows, q_width, width, dtype).times(layers),
        "gate, up": linear(rows, width, 2 * inner, dtype).times(layers),
        "down": linear(rows, inner, width, dtype).times(layers),
        "unembedding": linear(len(spans), width, config.vocab_size, dtype),
        "sample": sample(len(spans), config.vocab_size, dtype),
    }


def decode(config: Any, batch: int, context: int, dtype: str = "bfloat16") -> dict[str, Work]:
    """A pass that gives each of ``batch`` sequences one token, which then have ``context``."""
    return step(config, [(context - 1, context)] * batch, dtype)


def floor(works: dict[str, Work], device: Device) -> float:
    """Seconds that a pass takes at least."""
    return sum(work.seconds(device) for work in works.values())


def over_floor(seconds: float, work: Work, device: Device | None) -> dict[str, float]:
    """What a benchmark prints beside its time: GB/s, and on a known device its floor in
    microseconds and how many times that it took."""
    found = {"GB_per_s": round(work.bytes / seconds / 1e9, 2)}
    if device is not None:
        least = work.seconds(device)
        found |= {"floor_us": round(1e6 * least, 2), "over_floor": round(seconds / least, 2)}
    return found


def preset_config(preset: str) -> Any:
    """The shape of a preset, with the attributes of its config."""
    return argparse.Namespace(**PRESETS[preset])


def step_table(works: dict[str, Work], device: Device) -> str:
    """Bytes, operations and the floor of every kernel of a pass, and of all of it."""
    found = []
    for name, work in works.items():
        seconds = work.seconds(device)
        bound = "bytes" if work.bytes / device.bandwidth >= seconds else "operations"
        found.append((name, work.bytes, work.operations, seconds, bound))
    sums = (sum(column) for column in zip(*(row[1:4] for row in found), strict=True))
    rows = [
        [name, *(f"{number:.4g}" for number in (moved / 1e6, done / 1e9, 1e6 * seconds)), bound]
        for name, moved, done, seconds, bound in [*found, ("all", *sums, "")]
    ]
    return table(["kernel", "MB", "Gop", "floor us", "bound by"], rows)


def main(arguments: list[str] | None = None) -> int:
    """Print the tables of decode passes."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.roofline",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--preset", choices=PRESETS, default="llama-3.1-8b")
    add("--batch", type=int, nargs="+", default=[1, 64])
    add("--context", type=int, default=1024)
    add("--device", choices=DEVICES, default="H200")
    add("--bandwidth", type=float, help="GB/s of a copy, measured")
    add("--matrix", type=float, help="TFLOP/s of a 16-bit matrix product, measured")
    options = parser.parse_args(arguments)
    device = DEVICES[options.device]
    device = device.with_measured(
        1e9 * options.bandwidth if options.bandwidth else device.bandwidth,
        1e12 * options.matrix if options.matrix else device.rates["bfloat16"],
    )
    for batch in options.batch:
        print(f"### {options.preset}, batch {batch}, context {options.context}, {device.name}\n")
        works = decode(preset_config(options.preset), batch, options.context)
        print(step_table(works, device) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
