"""Every kernel and entry of the launch table, compiled for GPUs that are not here.

Run as a script (in a process without ``TRITON_INTERPRET``) this file compiles what the wrappers
would launch and prints one JSON line per binary; as a test it reads those lines. The wrappers
themselves are called, with a launcher that compiles instead of running, so what is checked is what
runs.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

ROOT = Path(__file__).parents[2]
# (backend, architecture, lanes per warp): shared memory of one program in bytes.
TARGETS = {
    "sm_80": (("cuda", 80, 32), 163 << 10),
    "sm_90": (("cuda", 90, 32), 227 << 10),
    "sm_100": (("cuda", 100, 32), 227 << 10),
    "gfx942": (("hip", "gfx942", 64), 64 << 10),
}
# How pairs lie, and in which dtype (None: the model's) cos and sin are.
TURNS = {"halves": (False, None), "interleaved in fp32": (True, torch.float32)}
# (rows, q heads, kv heads, page size, window, chunk, length) of passes that share a binary.
PASSES = (
    (1, 1, 1, 16, 0, 0, 30),
    (3, 16, 2, 128, 40, 0, 600),
    (17, 12, 4, 1, 1, 0, 5000),
    (5, 8, 8, 16, 0, 1, 900),
    (2, 2, 1, 16, 0, 8192, 9000),
)
HEAD_DIMS = [16, 32, 64, 80, 96, 128, 256]
Call = Callable[[], object]


def ints(values: list) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def entries(full: bool) -> Iterator[tuple[str, list[Call]]]:
    """Name of a binary, and launches that all have to share it."""
    yield (
        "accept",
        [accept_call(*sizes) for sizes in ((1, 1, 0, 1), (16, 17, 3, 16), (3, 64, 1, 128))],
    )
    sizes = ((1, 1), (16, 4096), (3, 50257))
    yield "sample", [sample_call(*size, forced) for size in sizes for forced in (False, True)]
    dtypes = [torch.bfloat16, torch.float16, torch.float32] if full else [torch.bfloat16]
    norms = (True, False) if full else (True,)
    sizes = ((1, 1, 1), (16, 8, 2), (5, 32, 8))
    dims = HEAD_DIMS if full else [80, 128]
    for dtype, dim, norm, turn in product(dtypes, dims, norms, TURNS):
        calls = [kv_write_call(dtype, dim, norm, turn, *size) for size in sizes]
        yield f"kv_write {dtype} {dim} norm={norm} {turn}", calls
    grid = list(product(dtypes, HEAD_DIMS, (True, False)))
    if not full:
        grid = [(torch.bfloat16, dim, False) for dim in (64, 80, 128)]
        grid += [(torch.bfloat16, 256, True), (torch.float32, 64, False)]
    for dtype, dim, extras in grid:
        calls = [attention_call(dtype, dim, extras, *size) for size in PASSES]
        yield f"attention {dtype} {dim} extras={extras}", calls
    # (K, N) of some layers per binary: all that it knows of them is how far they divide.
    layers = {"even": ((64, 4096), (11008, 128)), "odd": ((3, 997), (63, 50257))}
    kinds = list(product(dtypes, layers, ("nk", "kn")))
    if not full:
        kinds = [(torch.bfloat16, "even", "nk"), (torch.float32, "even", "kn")]
        kinds.append((torch.bfloat16, "odd", "kn"))
    for dtype, kind, stored in kinds:
        shapes = product(layers[kind], (1, 16, 777), (True, False))
        yield f"linear {dtype} {kind} {stored}", [linear_call(dtype, stored, *s) for s in shapes]


def accept_call(requests: int, width: int, stops: int, page_size: int) -> Call:
    from tinyspec.kernels.accept import accept_truncate

    table, column = torch.zeros(requests, width, dtype=torch.long), torch.ones(requests).int()
    stop_ids = torch.zeros(requests, stops, dtype=torch.long)
    columns = (column, column, column, column)
    return lambda: accept_truncate(table, table, *columns, stop_ids, column, page_size)


def sample_call(rows: int, vocab: int, forced: bool) -> Call:
    from tinyspec.kernels.sample import sample

    numbers = torch.zeros(rows, dtype=torch.long)
    # A vocabulary cut out of padded logits: any base address, any stride.
    logits = torch.zeros(rows, vocab + 7)[:, 1 : vocab + 1]
    # Cut out of a longer one: at any address.
    tokens = torch.zeros(rows + 1, dtype=torch.long)[1:] if forced else None
    return lambda: sample(logits, torch.zeros(rows), numbers, numbers, forced=tokens)


def kv_write_call(
    dtype: torch.dtype, dim: int, norm: bool, turn: str, rows: int, q_heads: int, kv_heads: int
) -> Call:
    from tinyspec.kernels.kv_write import fused_kv_write

    interleaved, angle_dtype = TURNS[turn]
    fused = torch.zeros(rows, q_heads + 2 * kv_heads, dim, dtype=dtype)
    parts = fused.split([q_heads, kv_heads, kv_heads], dim=1)
    cos = torch.zeros(rows, dim, dtype=angle_dtype or dtype)
    cache = torch.zeros(2, 16, kv_heads, dim, dtype=dtype)
    weight = torch.zeros(dim, dtype=dtype) if norm else None
    slots = torch.zeros(rows, dtype=torch.long)
    args = (*parts, cos, cos, cache, cache.clone(), slots)
    options = {"q_weight": weight, "k_weight": weight, "interleaved": interleaved}
    return lambda: fused_kv_write(*args, **options)


def attention_call(
    dtype: torch.dtype,
    dim: int,
    extras: bool,
    rows: int,
    q_heads: int,
    kv_heads: int,
    page_size: int,
    window: int,
    chunk: int,
    length: int,
) -> Call:
    from tinyspec.kernels.attention_metadata import AttentionMetadata
    from tinyspec.kernels.paged_attention import paged_attention

    cache = torch.zeros(2, page_size, kv_heads, dim, dtype=dtype)
    q = torch.zeros(rows, q_heads, dim, dtype=dtype)
    table = torch.zeros(1, -(-length // page_size) + 1, dtype=torch.int32)[:, 1:]
    metadata = AttentionMetadata(table, ints([0, rows]), ints([length]), page_size, rows, length)
    options = {"window": window, "chunk": chunk}
    if extras:
        options |= {"softcap": 5.0, "sinks": torch.zeros(q_heads, dtype=dtype)}
    return lambda: paged_attention(q, cache, cache.clone(), metadata, scale=1.0, **options)


def linear_call(dtype: torch.dtype, stored: str, layer: tuple, rows: int, bias: bool) -> Call:
    from tinyspec.kernels.linear import linear

    width, outputs = layer
    # Rows cut out of wider ones, a bias at any address.
    x = torch.zeros(rows, 3 * width, dtype=dtype)[:, :width]
    weight = torch.zeros(outputs, width, dtype=dtype)
    if stored == "kn":
        weight = weight.T.contiguous().T
    shift = torch.zeros(outputs + 1, dtype=dtype)[1:] if bias else None
    return lambda: linear(x, weight, shift)


def compile_all(targets: list[str], full: bool) -> None:
    """Compile every entry for every target; one JSON line per kernel and entry on stdout."""
    import triton.runtime.jit as jit
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile, make_backend

    from tinyspec.kernels import launch

    pending: dict[str, dict[str, tuple]] = {}

    def prepare(
        self: jit.JITFunction, *args: object, grid: tuple, warmup: bool, **kw: object
    ) -> None:
        binder = jit.create_function_from_signature(self.signature, self.params, backend)
        bound, specialization, options = binder(*args, **kw)
        options, *rest = self._pack_args(backend, kw, bound, specialization, options)
        key = f"{specialization} {sorted(options.__dict__.items(), key=str)} {rest[1]}"
        pending.setdefault(self.__name__, {}).setdefault(key, (self, options, *rest))

    jit.JITFunction.run = prepare
    for name in targets:
        target = GPUTarget(*TARGETS[name][0])
        backend = make_backend(target)
        launch.IS_HIP = target.backend == "hip"
        for entry, calls in entries(full):
            pending.clear()
            for call in calls:
                call()
            for kernel, binaries in pending.items():
                fn, options, signature, constexprs, attrs = next(iter(binaries.values()))
                source = ASTSource(fn, signature, constexprs, attrs)
                compiled = compile(source, target=target, options=options.__dict__)
                record = {
                    "target": name,
                    "entry": entry,
                    "kernel": kernel,
                    "binaries": len(binaries),
                    "shared": compiled.metadata.shared,
                    "fusion": compiled.metadata.enable_fp_fusion,
                }
                inspect = inspect_ptx if target.backend == "cuda" else inspect_amdgcn
                print(json.dumps(record | inspect(compiled.asm)), flush=True)


def inspect_ptx(asm: dict) -> dict:
    """Registers and local memory by cuobjdump, and what the PTX says."""
    import triton.backends.nvidia

    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    used = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", usage))
    return {
        "registers": int(used["REG"]),
        "spilled": int(used["STACK"]) + int(used["LOCAL"]),
        "atomics": re.findall(r"\b(?:atom|red)\.[\w.:]+", asm["ptx"]),
        "tf32": "tf32" in asm["ptx"],
        "dots": sorted(set(re.findall(r"wgmma\.mma_async|mma\.sync|tcgen05\.mma", asm["ptx"]))),
    }


def inspect_amdgcn(asm: dict) -> dict:
    """The same from AMD's assembly, whose metadata names them."""
    text = asm["amdgcn"]

    def number(name: str) -> int:
        return int(re.search(rf"\.{name}:\s+(\d+)", text).group(1))

    return {
        "registers": number("vgpr_count"),
        "spilled": number("private_segment_fixed_size"),
        "atomics": re.findall(r"\b(?:global|flat|buffer|ds)_(?:atomic|add|min|max)\w*", text),
        "tf32": "xf32" in text,
        "dots": sorted(set(re.findall(r"v_mfma_\w+", text))),
    }


def compiled(full: bool) -> list[dict]:
    """Records of a fresh process, in which triton compiles."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [env.get("PYTHONPATH")])])
    command = [sys.executable, __file__, *TARGETS, *(["--full"] if full else [])]
    run = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-4000:]
    return [json.loads(line) for line in run.stdout.splitlines()]


@pytest.fixture(scope="module", params=["essential", pytest.param("full", marks=pytest.mark.slow)])
def records(request: pytest.FixtureRequest) -> list[dict]:
    found = compiled(full=request.param == "full")
    names = ("accept", "sample", "kv_write", "attention", "merge", "linear")
    kernels = {f"{name}_kernel" for name in names}
    for target in TARGETS:
        assert {r["kernel"] for r in found if r["target"] == target} == kernels
    return found


def offenders(records: list[dict], wrong: Callable[[dict], object]) -> list[str]:
    return [f"{r['target']} {r['entry']} {r['kernel']}: {r}" for r in records if wrong(r)]


def test_one_binary(records: list[dict]) -> None:
    """Whatever the rows, heads, pages, windows, strides and lengths."""
    assert not offenders(records, lambda r: r["binaries"] != 1)


def test_fits_shared_memory(records: list[dict]) -> None:
    assert not offenders(records, lambda r: r["shared"] > TARGETS[r["target"]][1])


def test_spills_nothing(records: list[dict]) -> None:
    """On NVIDIA; gfx942 spills a little where scores are capped."""
    assert not offenders(records, lambda r: r["target"] != "gfx942" and r["spilled"])


def test_no_atomics(records: list[dict]) -> None:
    assert not offenders(records, lambda r: r["atomics"])


def test_arithmetic_is_pinned(records: list[dict]) -> None:
    """No fused multiply-add, no tf32, and 64 rows of 16-bit numbers are wgmma on sm_90."""
    assert not offenders(records, lambda r: r["fusion"] or r["tf32"])
    dots = {
        r["entry"]: r["dots"]
        for r in records
        if r["target"] == "sm_90" and r["kernel"] in ("attention_kernel", "linear_kernel")
    }
    assert dots["attention torch.bfloat16 128 extras=False"] == ["wgmma.mma_async"]
    assert dots["attention torch.float32 64 extras=False"] == []
    assert dots["linear torch.bfloat16 even nk"] == ["wgmma.mma_async"]
    assert dots["linear torch.float32 even kn"] == []


@pytest.mark.gpu
def test_one_binary_when_run() -> None:
    """On the device itself: many shapes, one compiled kernel in triton's cache."""
    from tinyspec.kernels.paged_attention import attention_kernel

    torch.set_default_device("cuda")
    try:
        cache = attention_kernel.device_caches[torch.cuda.current_device()][0]
        before = len(cache)
        for size in PASSES:
            # No other test has this head size.
            attention_call(torch.bfloat16, 48, False, *size)()
        assert len(cache) == before + 1
    finally:
        torch.set_default_device("cpu")


if __name__ == "__main__":
    compile_all([a for a in sys.argv[1:] if not a.startswith("--")], "--full" in sys.argv)
