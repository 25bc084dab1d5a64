"""Measures the facts that determinism rests on, for a model's shapes on this device.

    python benchmarks/probe.py --preset small --dtype float32 --json probe.json

1. At a fixed row count, does a row's result depend on its row index or on the other rows?
2. Which row counts agree with which others, bit for bit, and what does each cost?
3. Does attention depend on a row's own sequence alone?
4. How often does a one-row pass produce the token of a reference pass from the same state?

Linears are probed one by one with inputs whose sums cancel, then the model end to end. Knows no
engine: what is measured here is torch and transformers.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import attention_facts, elementwise_facts, presets, render
from benchmarks.environment import environment
from benchmarks.row_classes import row_classes
from tinyspec.determinism.probes.bits import cancelling_inputs, position_invariant, unequal_bits
from tinyspec.model.linear_kinds import distinct_linears, linear_shape, linear_weight

ROWS = [*range(1, 17), *range(18, 33, 2), 40, 48, 56, 64, 80, 96, 100, 112, 128, 192, 256, 512]
PARTS = ("linears", "model_pass", "elementwise", "attention", "agreement")


def main(arguments: list[str] | None = None) -> int:
    """Measure, print Markdown tables, and save JSON if asked."""
    options = parse(arguments)
    dtype, device = getattr(torch, options.dtype), options.device
    pin(options.split_k)
    if options.model:
        model = presets.load(options.model, dtype, device)
    else:
        model = presets.build(options.preset, dtype, device, options.layers)
    config = model.config.get_text_config()
    report: dict[str, Any] = {
        "kind": "tinyspec-probe",
        "environment": environment(device),
        "model": {
            "name": Path(options.model).name if options.model else options.preset,
            "layers": config.num_hidden_layers,
            "dtype": options.dtype,
            "reference": options.reference,
            "split_k": options.split_k,
            "weights": "its own" if options.model else f"random, std {presets.WEIGHT_STD}",
        },
    }
    with torch.inference_mode():
        for part in options.parts:
            started = time.perf_counter()
            report[part] = MEASURES[part](model, config, options)
            print(f"{part}: {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
            if options.json:  # what is measured stays if the next part is cut
                Path(options.json).write_text(json.dumps(report, indent=1) + "\n")
    print(render.probe_table(report))
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--preset", choices=presets.PRESETS, default="small", help="a shape, random weights")
    add("--model", metavar="FOLDER", help="a model folder instead, e.g. tinyspec/tools/storyteller")
    add("--layers", type=int, help="cut the preset's depth")
    add("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--rows", type=numbers, default=ROWS, metavar="1,2,3", help="row counts to try")
    add("--reference", type=int, help="reference row count (CPU 32, GPU 128)")
    add("--pool", type=int, default=256, help="rows that every row count is compared on")
    add("--parts", type=lambda text: text.split(","), default=PARTS, help=",".join(PARTS))
    add("--agreement", type=int, default=512, help="tokens compared for fact 4")
    add("--split-k", choices=("default", "off"), default="default", help="cuBLAS, 16-bit GEMMs")
    add("--json", metavar="FILE", help="save the measurements")
    options = parser.parse_args(arguments)
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"--parts: {', '.join(unknown)} not among {', '.join(PARTS)}")
    kind = torch.device(options.device).type
    options.reference = options.reference or (32 if kind == "cpu" else 128)
    options.rows = sorted({*options.rows, options.reference})
    return options


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def pin(split_k: str) -> None:
    """Torch's settings of a deterministic pass: no TF32, no reduced-precision reductions."""
    torch.backends.cuda.matmul.allow_tf32 = False
    for kind in ("fp16", "bf16"):
        value = False if split_k == "default" else (False, False)
        setattr(torch.backends.cuda.matmul, f"allow_{kind}_reduced_precision_reduction", value)


def measure_linears(model: nn.Module, config: Any, options: argparse.Namespace) -> list[dict]:
    """Facts 1 and 2 for every distinct linear, by torch's linear and on a CPU by oneDNN's."""
    found = []
    for name, module in distinct_linears(model).items():
        shape, weight = linear_shape(module), linear_weight(module)
        assert shape is not None
        dtype = getattr(torch, options.dtype)
        inputs = cancelling_inputs(options.pool, shape[0], dtype, 0, weight).to(options.device)
        ways: dict[str, Callable[[Tensor], Tensor]] = {"torch": module}
        if onednn := onednn_linear(module, inputs):
            ways["oneDNN"] = onednn
        for way, fn in ways.items():
            measured = {"name": name, "in": shape[0], "out": shape[1], "way": way}
            found.append(measured | facts(fn, inputs, options))
    return found


def onednn_linear(module: nn.Module, inputs: Tensor) -> Callable[[Tensor], Tensor] | None:
    """`module` by oneDNN on its plain weight, where that private op exists and agrees; fp32 CPU."""
    if not isinstance(module, nn.Linear) or inputs.device.type != "cpu":
        return None
    op = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    if op is None or inputs.dtype != torch.float32:
        return None

    def fn(x: Tensor) -> Tensor:
        return op(x, module.weight, module.bias, "none", [], "")

    x = torch.randn(8, module.in_features)
    return fn if torch.allclose(fn(x), module(x), rtol=1e-3, atol=1e-3) else None


def measure_model(model: nn.Module, config: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Facts 1 and 2 end to end: R sequences of one token each, embeddings in, logits out."""
    ids = torch.randint(config.vocab_size, (options.pool,), generator=generator(5))
    inputs = model.get_input_embeddings()(ids.to(options.device)).clone()

    def fn(rows: Tensor) -> Tensor:
        return model(inputs_embeds=rows[:, None], use_cache=False).logits[:, 0]

    return facts(fn, inputs, options, passes=8)


def facts(
    fn: Callable[[Tensor], Tensor], inputs: Tensor, options: argparse.Namespace, passes: int = 16
) -> dict[str, Any]:
    """Classes, row counts where fact 1 fails (every shift at the reference), milliseconds."""
    found = row_classes(fn, inputs, options.rows, options.reference)
    probes = [
        position_invariant(fn, inputs, n, passes=None if n == options.reference else passes)
        for n in options.rows
    ]
    return {
        "reference": options.reference,
        "pool": found.pool,
        "classes": [list(members) for members in found.classes],
        "differing": {str(n): count for n, count in found.differing.items()},
        "position_dependent": [probe.rows for probe in probes if not probe],
        "ms": {str(n): milliseconds(fn, rows_of(inputs, n)) for n in options.rows},
    }


def rows_of(inputs: Tensor, rows: int) -> Tensor:
    return inputs[torch.arange(rows, device=inputs.device) % len(inputs)]


def milliseconds(fn: Callable[[Tensor], Tensor], x: Tensor, budget: float = 0.3) -> float:
    """Median of 7 to 50 calls after a warm-up; on a GPU by events, queued without waiting."""
    fn(x)
    started = time.perf_counter()
    fn(x)
    if x.is_cuda:
        torch.cuda.synchronize()
    calls = max(7, min(50, int(budget / max(time.perf_counter() - started, 1e-6))))
    if x.is_cuda:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(calls + 1)]
        events[0].record()
        for event in events[1:]:
            fn(x)
            event.record()
        torch.cuda.synchronize()
        times = [a.elapsed_time(b) for a, b in pairwise(events)]
    else:
        times = []
        for _ in range(calls):
            started = time.perf_counter()
            fn(x)
            times.append(1e3 * (time.perf_counter() - started))
    return round(statistics.median(times), 4)


def measure_elementwise(model: nn.Module, config: Any, options: argparse.Namespace) -> list[dict]:
    widths = {config.hidden_size, getattr(config, "intermediate_size", 64), config.vocab_size}
    return elementwise_facts.checks(widths, getattr(torch, options.dtype), options.device)


def measure_attention(model: nn.Module, config: Any, options: argparse.Namespace) -> list[dict]:
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    groups = attention_facts.Heads(heads, getattr(config, "num_key_value_heads", heads), size)
    return attention_facts.checks(groups, getattr(torch, options.dtype), options.device)


def measure_agreement(model: nn.Module, config: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Fact 4: from one canonical KV cache, the next token of a one-row and of a reference pass.

    The sequences continue by sampling at temperature 1, so that states differ.
    """
    rows, device, prompt = options.reference, options.device, 16
    draw = generator(7, device)
    start = config.bos_token_id if options.model and config.bos_token_id is not None else None
    ids = torch.randint(config.vocab_size, (rows, 1), generator=generator(6)).to(device)
    ids = ids if start is None else torch.full_like(ids, start)
    compared, other_token, other_bits, cache = 0, 0, 0, None
    turn = 0
    while compared < options.agreement:
        before = copy.deepcopy(cache)
        out = model(input_ids=ids, past_key_values=cache, use_cache=True)
        cache, logits = out.past_key_values, out.logits[:, -1]
        if turn >= prompt:
            for row in range(rows):
                own = copy.copy(before)
                own.layers = [copy.copy(layer) for layer in before.layers]
                own.batch_select_indices(torch.tensor([row], device=device))
                single = model(input_ids=ids[row : row + 1], past_key_values=own).logits[:, -1]
                other_token += int((single.argmax(-1) != logits[row].argmax(-1)).item())
                other_bits += int(unequal_bits(single, logits[row : row + 1]).any())
            compared += rows
        probabilities = F.softmax(logits.float(), -1)
        ids, turn = torch.multinomial(probabilities, 1, generator=draw), turn + 1
    return {"compared": compared, "other_token": other_token, "other_bits": other_bits}


def generator(seed: int, device: str = "cpu") -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


MEASURES: dict[str, Callable[..., Any]] = {
    "linears": measure_linears,
    "model_pass": measure_model,
    "elementwise": measure_elementwise,
    "attention": measure_attention,
    "agreement": measure_agreement,
}

if __name__ == "__main__":
    raise SystemExit(main())
