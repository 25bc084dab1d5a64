"""Every kernel and entry of the launch table, compiled for GPUs that are not here.

Run as a script (in a process without ``TRITON_INTERPRET``) this file reads lines of a target and an
entry, compiles what the wrappers would launch and answers with one JSON line: a record per binary.
The tests ask it; with ``--record`` it asks itself and writes down what every entry compiles to
(``compiled.py``), to be compared with from then on. The wrappers themselves are called, with a
launcher that compiles instead of running, so what is checked is what runs.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels import compiled
from tests.kernels.compiled import CODED
from tinyspec.kernels import launch
from tinyspec.kernels.accept import accept_truncate
from tinyspec.kernels.backend import AttentionMetadata, Checkpoints, LayerStates
from tinyspec.kernels.experts import add_experts, grouped_linear, sort_by_expert
from tinyspec.kernels.hidden_states import add_rms_norm, gated, linear
from tinyspec.kernels.kv_write import fused_kv_write
from tinyspec.kernels.paged_attention import attention_kernel, paged_attention
from tinyspec.kernels.recurrent import keep_rows, scan
from tinyspec.kernels.sample import sample
from tinyspec.kernels.short_conv import short_conv

ROOT = Path(__file__).parents[2]
# (backend, architecture, lanes per warp): shared memory of one program in bytes.
TARGETS = {
    "sm_80": (("cuda", 80, 32), 163 << 10),
    "sm_90": (("cuda", 90, 32), 227 << 10),
    "sm_100": (("cuda", 100, 32), 227 << 10),
    "gfx942": (("hip", "gfx942", 64), 64 << 10),
    "sm_86": (("cuda", 86, 32), 99 << 10),
    "sm_89": (("cuda", 89, 32), 99 << 10),
    "sm_120": (("cuda", 120, 32), 99 << 10),
}
# Of attention, on an H100 or H200.
PROGRAMS = 264
# Bytes that attention may spill outside of its loop over keys, and others outside of theirs.
SPILLED = 192
SPILLS = {
    ("sm_120", "grouped torch.float32 odd kn"): 16,
    ("sm_120", "short_conv torch.bfloat16 odd"): 32,
    ("sm_120", "short_conv torch.bfloat16 odd ring"): 32,
    ("sm_120", "short_conv torch.float16 odd ring"): 32,
    # By triton 3.8.
    ("sm_86", "kv_write torch.float32 512 norm=True interleaved in fp32"): 8,
    ("sm_89", "kv_write torch.float16 80 norm=True halves"): 8,
    ("sm_89", "kv_write torch.float16 96 norm=True halves"): 8,
    ("sm_89", "kv_write torch.float32 512 norm=True interleaved in fp32"): 8,
    ("sm_90", "kv_write torch.float32 512 norm=True interleaved in fp32"): 8,
    ("sm_100", "kv_write torch.float32 512 norm=False halves"): 8,
}
# The taps of one are unrolled; the other reads what it needs at once.
LOOPLESS = "short_conv_kernel", "kv_write_kernel"
# Instructions that a warp may take of it for a tile of 64 rows and 64 keys, heads of 128, on sm_90.
WALK = 1000
LLAMA = "attention torch.bfloat16 128 extras=False"
# How pairs lie, and in which dtype (None: the model's) cos and sin are.
TURNS = {"halves": (False, None), "interleaved in fp32": (True, torch.float32)}
# (rows, q heads, kv heads, page size, window, chunk, length) of passes that share a binary.
PASSES = (
    (1, 1, 1, 16, 0, 0, 30),
    (3, 16, 2, 128, 40, 0, 600),
    (257, 12, 4, 1, 1, 0, 5000),
    (5, 8, 8, 16, 0, 1, 900),
    (2, 2, 1, 16, 0, 8192, 9000),
)
HEAD_DIMS = [16, 32, 64, 80, 96, 128, 256, 512]
# (K, N) of some layers per binary: all that it knows of them is how far they divide.
LAYERS = {"even": ((64, 4096), (11008, 128)), "odd": ((3, 997), (63, 50257))}
# Widths of hidden states: a binary each, and whether there is a residual and the weight is stored
# less one. Those of MLPs share one as far as they divide.
WIDTHS = [63, 1024, 2880, 4096, 32768]
NORMS = {"sum": (True, False), "sum offset": (True, True), "alone": (False, False)}
INNER = {"even": (3072, 14336), "odd": (63, 11009)}
CHANNELS = {"even": (1024, 2048), "odd": (63, 1001)}
# Heads of keys and of values, and their sizes: of Qwen3-Next, Nemotron-H and OLMo-Hybrid.
STATES = {"delta": (16, 32, 128, 128), "mamba2": (8, 64, 128, 64), "olmo": (30, 30, 96, 192)}
# Sizes of vocabularies per binary, by how far they divide.
VOCABULARIES = {"even": (4096, 128256, 151936), "odd": (1, 50257)}
# Of what does not attend.
ROWS = (1, 16, 777)
# Weights that are rounded as they are read, as under autocast.
WIDER = "grouped torch.bfloat16 even nk of fp32"
Call = Callable[[], object]


def ints(values: list) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def entries() -> dict[str, Callable[[], Iterator[Call]]]:
    """By the name of a binary: launches that all have to share it."""
    found: dict[str, Callable[[], Iterator[Call]]] = {"accept": accept_calls, "sort": sort_calls}
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    for dtype, kind in product(dtypes, VOCABULARIES):
        found[f"sample {dtype} {kind}"] = partial(sample_calls, dtype, kind)
    for dtype, dim, norm, turn in product(dtypes, HEAD_DIMS, (True, False), TURNS):
        name = f"kv_write {dtype} {dim} norm={norm} {turn}"
        found[name] = partial(kv_write_calls, dtype, dim, norm, turn, dtype)
        if norm:
            found[name + CODED] = partial(kv_write_calls, dtype, dim, norm, turn, torch.uint8)
    for dtype, dim, extras in product(dtypes, HEAD_DIMS, (True, False)):
        name = f"attention {dtype} {dim} extras={extras}"
        found[name] = partial(attention_calls, dtype, dim, extras, dtype)
        found[name + CODED] = partial(attention_calls, dtype, dim, extras, torch.uint8)
    for dtype, width, kind in product(dtypes, WIDTHS, NORMS):
        calls = partial(add_rms_norm_calls, dtype, width, kind)
        found[f"add_rms_norm {dtype} {width} {kind}"] = calls
    for dtype, kind, activation in product(dtypes, INNER, ("silu", "gelu", "gelu_tanh")):
        found[f"gated {dtype} {kind} {activation}"] = partial(gated_calls, dtype, kind, activation)
    for dtype, kind, stored in product(dtypes, LAYERS, ("nk", "kn")):
        found[f"linear {dtype} {kind} {stored}"] = partial(linear_calls, dtype, kind, stored)
        calls = partial(grouped_calls, dtype, kind, stored)
        found[f"grouped {dtype} {kind} {stored}"] = calls
    found[WIDER] = partial(grouped_calls, torch.bfloat16, "even", "nk", torch.float32)
    for dtype, kind, rounds in product(dtypes, ("even", "odd"), (True, False)):
        calls = partial(add_calls, dtype, kind, rounds)
        found[f"add {dtype} {kind} rounds={rounds}"] = calls
    for dtype, kind in product(dtypes, CHANNELS):
        found[f"short_conv {dtype} {kind}"] = partial(short_conv_calls, dtype, kind)
        found[f"short_conv {dtype} {kind} ring"] = partial(short_conv_calls, dtype, kind, True)
        found[f"keep_rows {dtype} {kind}"] = partial(keep_rows_calls, dtype, kind)
    for dtype, rule in product(dtypes, STATES):
        found[f"recurrent {dtype} {rule}"] = partial(recurrent_calls, dtype, rule)
    return found


def accept_calls() -> Iterator[Call]:
    for requests, width, stops, page_size in ((1, 1, 0, 1), (16, 17, 3, 16), (3, 64, 1, 128)):
        table, column = torch.zeros(requests, width, dtype=torch.long), torch.ones(requests).int()
        stop_ids = torch.zeros(requests, stops, dtype=torch.long)
        args = (table, table, *[column] * 4, stop_ids, column, page_size)
        yield partial(accept_truncate, *args)


def sample_calls(dtype: torch.dtype, kind: str) -> Iterator[Call]:
    for vocab, rows, hot, forced in product(VOCABULARIES[kind], ROWS[:2], (0, 1), (0, 1)):
        # Cut out of longer ones: at any address. A vocabulary cut out of padded logits: at any
        # stride.
        logits = torch.zeros(rows + 1, vocab + 7, dtype=dtype)[1:, 1 : vocab + 1]
        tokens = torch.zeros(rows + 1, dtype=torch.long)[1:]
        noise = (torch.zeros(rows + 1)[1:], tokens, tokens) if hot else (None, None, None)
        yield partial(sample, logits, *noise, forced=tokens if forced else None)


def kv_write_calls(
    dtype: torch.dtype, dim: int, norm: bool, turn: str, cached: torch.dtype
) -> Iterator[Call]:
    interleaved, angle_dtype = TURNS[turn]
    for rows, q_heads, kv_heads in ((1, 1, 1), (16, 8, 2), (5, 32, 8)):
        fused = torch.zeros(rows, q_heads + 2 * kv_heads, dim, dtype=dtype)
        parts = fused.split([q_heads, kv_heads, kv_heads], dim=1)
        cos = torch.zeros(rows, dim, dtype=angle_dtype or dtype)
        cache = torch.zeros(2, 16, kv_heads, dim, dtype=cached)
        weight = torch.zeros(dim, dtype=dtype) if norm else None
        args = (*parts, cos, cos, cache, cache.clone(), torch.zeros(rows, dtype=torch.long))
        options = {"q_weight": weight, "k_weight": weight, "interleaved": interleaved}
        yield partial(fused_kv_write, *args, **options)


def attention_calls(
    dtype: torch.dtype, dim: int, extras: bool, cached: torch.dtype
) -> Iterator[Call]:
    for rows, q_heads, kv_heads, page_size, window, chunk, length in PASSES:
        cache = torch.zeros(2, page_size, kv_heads, dim, dtype=cached)
        q = torch.zeros(rows, q_heads, dim, dtype=dtype)
        # Odd ones: a sequence for each row.
        ends = [0, rows] if rows % 2 == 0 else [*range(rows + 1)]
        lengths = ints([length] * (len(ends) - 1))
        table = torch.zeros(len(lengths), -(-length // page_size) + 1, dtype=torch.int32)[:, 1:]
        args = (q, cache, cache.clone(), AttentionMetadata(table, ints(ends), lengths, page_size))
        more = {"softcap": 5.0, "sinks": torch.zeros(q_heads, dtype=dtype)} if extras else {}
        yield partial(paged_attention, *args, scale=1.0, window=window, chunk=chunk, **more)


def linear_calls(dtype: torch.dtype, kind: str, stored: str) -> Iterator[Call]:
    for (width, outputs), rows, bias in product(LAYERS[kind], ROWS, (True, False)):
        # Rows cut out of wider ones, a bias at any address.
        x = torch.zeros(rows, 3 * width, dtype=dtype)[:, :width]
        weight = torch.zeros(outputs, width, dtype=dtype)
        if stored == "kn":
            weight = weight.T.contiguous().T
        yield partial(
            linear, x, weight, torch.zeros(outputs + 1, dtype=dtype)[1:] if bias else None
        )


def grouped_calls(
    dtype: torch.dtype, kind: str, stored: str, weights: torch.dtype | None = None
) -> Iterator[Call]:
    for (width, outputs), pairs, bias in product(LAYERS[kind], ROWS, (True, False)):
        # Of 65 to 128 experts; nothing is written to them.
        shape = (128, outputs, width) if stored == "nk" else (100, width, outputs)
        weight = torch.empty(shape, dtype=weights or dtype)
        weight = weight if stored == "nk" else weight.transpose(1, 2)
        shift = torch.zeros(len(weight) + 1, outputs, dtype=weight.dtype)[1:] if bias else None
        x, places = torch.zeros(pairs, width, dtype=dtype), torch.zeros(pairs + 129).long()
        yield partial(grouped_linear, x, weight, shift, places[1:], places[1:])


def sort_calls() -> Iterator[Call]:
    for rows, experts in ((1, 8), (16, 128), (777, 257)):
        yield partial(sort_by_expert, torch.zeros(rows + 1, 3, dtype=torch.long)[1:], experts)


def add_calls(dtype: torch.dtype, kind: str, rounds: bool) -> Iterator[Call]:
    for width, rows in product(INNER[kind], ROWS):
        index = torch.zeros(rows + 1, 8, dtype=torch.long)[1:]
        scales = torch.zeros(rows + 1, 8, dtype=dtype if rounds else torch.float32)[1:]
        yield partial(add_experts, torch.zeros(8 * rows, width, dtype=dtype), scales, index, dtype)


def add_rms_norm_calls(dtype: torch.dtype, width: int, kind: str) -> Iterator[Call]:
    add, offset = NORMS[kind]
    for rows in ROWS:
        # A residual cut out of a wider one, a weight at any address.
        x, wide = torch.zeros(rows, width, dtype=dtype), torch.zeros(rows, 2 * width, dtype=dtype)
        weight, residual = torch.zeros(width + 1, dtype=dtype)[1:], wide[:, :width] if add else None
        yield partial(add_rms_norm, x, residual, weight, 1e-6, unit_offset=offset)


def gated_calls(dtype: torch.dtype, kind: str, activation: str) -> Iterator[Call]:
    for width, rows in product(INNER[kind], ROWS):
        both = torch.zeros(rows, 2 * width, dtype=dtype)
        yield partial(gated, both[:, :width], both[:, width:], activation)


def checkpoints_of(rows: int) -> Any:
    """Metadata of as many segments, at any address."""
    owners, at, to = (ints([0] * (rows + 1))[1:] for _ in range(3))
    return Checkpoints(owners, at, to, torch.zeros(rows + 1, dtype=torch.long)[1:], 8)


def recurrent_calls(dtype: torch.dtype, rule: str) -> Iterator[Call]:
    key_heads, heads, dk, dv = STATES[rule]
    kept = key_heads * dk + heads * dv
    wide = key_heads * dk + kept
    for rows, ring, more in ((1, 48, 0), (16, 64, 2 * dk), (777, 48, 0)):
        q = torch.zeros(rows, wide + more, dtype=dtype)[:, : key_heads * dk].view(rows, -1, dk)
        kv = torch.zeros(rows, kept, dtype=dtype)
        rings = torch.zeros(2, ring, 1), torch.zeros(2, ring, kept, dtype=dtype)
        gates, state = torch.zeros(2, ring, 2 * heads), torch.zeros(2, heads, dk, dv)
        states, own = LayerStates(*rings, gates, state), torch.zeros(rows, heads, 2)
        given = ints([[0]] * rows), ints([0] * (rows + 2))[1:], ints([0] * (rows + 1))[1:], 16
        metadata = AttentionMetadata(*given, checkpoints=checkpoints_of(rows))
        eps = 1e-6 if rule == "delta" else None
        yield partial(scan, q, kv, own, states, metadata, rule != "mamba2", 0.1, eps)


def keep_rows_calls(dtype: torch.dtype, kind: str) -> Iterator[Call]:
    for width, rows in product(CHANNELS[kind], ROWS):
        ring, slots = torch.zeros(2, 48, width, dtype=dtype), checkpoints_of(rows).slots
        rows_of_wider = torch.zeros(rows, 3 * width, dtype=dtype)[:, :width]
        yield partial(keep_rows, ring, rows_of_wider, slots, None)


def short_conv_calls(dtype: torch.dtype, kind: str, ring: bool = False) -> Iterator[Call]:
    for width, rows, size in product(CHANNELS[kind], ROWS, (16, 128)):
        # x cut out of a wider one, a weight and metadata at any address.
        x, weight = torch.zeros(rows, 3 * width, dtype=dtype), torch.zeros(width * 3 + 1)
        pool = torch.zeros(2, size, 1, width, dtype=dtype)
        given = ints([0] * 3 * rows).view(rows, 3)[:, 1:], ints([0] * (rows + 2))[1:]
        metadata = AttentionMetadata(*given, ints([0] * (rows + 1))[1:], size)
        if ring:
            pool, metadata.checkpoints = pool[:, :, 0], checkpoints_of(rows)
        weight = weight[1:].view(width, 3).to(dtype)
        slots = torch.zeros(rows + 1, dtype=torch.long)[1:]
        own = x[:, :width], weight, weight[:, 0].clone(), pool, slots, metadata
        yield partial(short_conv, *own, ring=ring)


def answer() -> None:
    """For every line [target, entry, changes] of stdin a line of stdout: a record of each kernel;
    ``changes`` to attention's entries of the launch table."""
    from triton.backends.compiler import GPUTarget

    known, attention = entries(), launch.attention
    for line in sys.stdin:
        name, entry, changes = json.loads(line)
        target = GPUTarget(*TARGETS[name][0])
        launch.IS_HIP = target.backend == "hip"
        number = 0 if launch.IS_HIP else target.arch
        launch.capability = lambda _, number=number: number
        launch.programs = lambda _: PROGRAMS
        launch.attention = lambda *args, new=changes: attention(*args)._replace(**new)
        print(json.dumps(records_of(known[entry](), target)), flush=True)


def records_of(calls: Iterator[Call], target: Any) -> list[dict]:
    """What ``calls`` would launch, compiled for ``target``: a record of each kernel."""
    import triton.runtime.jit as jit
    from triton.compiler import ASTSource, compile, make_backend

    backend = make_backend(target)
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
    for call in calls:
        call()
    inspect = inspect_ptx if target.backend == "cuda" else inspect_amdgcn
    records = []
    for kernel, binaries in pending.items():
        fn, options, signature, constexprs, attrs = next(iter(binaries.values()))
        source = ASTSource(fn, signature, constexprs, attrs)
        binary = compile(source, target=target, options=options.__dict__)
        record = {
            "kernel": kernel,
            "binaries": len(binaries),
            "shared": binary.metadata.shared,
            "fusion": binary.metadata.enable_fp_fusion,
        }
        records.append(record | inspect(binary.asm))
    return records


def inspect_ptx(asm: dict) -> dict:
    """Registers and local memory by cuobjdump, and what the PTX says. walk: 0 without wgmma."""
    import triton.backends.nvidia

    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        used = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", usage))
        spilled, sass = int(used["STACK"]) + int(used["LOCAL"]), ""
        if spilled or "wgmma" in asm["ptx"]:  # it takes as long as compiling
            command[1] = "--dump-sass"
            sass = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {
        "registers": int(used["REG"]),
        "spilled": spilled,
        "spilled_in_loops": spilled and spilled_in_loops(sass),
        "walk": max((len(a) for a in inner_loops(sass) if "HGMMA" in " ".join(a)), default=0),
        "atomics": re.findall(r"\b(?:atom|red)\.[\w.:]+", asm["ptx"]),
        "tf32": "tf32" in asm["ptx"],
        "flushes": re.findall(r"\b(?:mul|add|sub|fma|cvt)\.\S*ftz\S*", asm["ptx"]),
        "wide": bool(re.search(r"ld\.global\.v4\.b32|cp\.async\.cg\..*, 0x10,", asm["ptx"])),
        "dots": sorted(set(re.findall(r"wgmma\.mma_async|mma\.sync|tcgen05\.mma", asm["ptx"]))),
        "in_flight": [int(n) for n in re.findall(r"cp\.async\.wait_group\s+(\d+)", asm["ptx"])],
    }


def spilled_in_loops(sass: str) -> int:
    """Instructions on local memory in the loops that hold no other loop."""
    local = re.compile(r"\b(LDL|STL)\b")
    loops, all_of_it = inner_loops(sass), [text for _, text in instructions(sass)]
    assert loops or any(name in sass for name in LOOPLESS), "what spills has loops"
    assert any(map(local.search, all_of_it)), "and local memory"
    return sum(bool(local.search(text)) for loop in loops for text in loop)


def instructions(sass: str) -> list[tuple[str, str]]:
    """Address and text of each."""
    return re.findall(r"/\*([0-9a-f]{4,5})\*/ +([^;/]+);", sass)


def inner_loops(sass: str) -> list[list[str]]:
    """The instructions of every loop that holds no other loop."""
    lines = instructions(sass)
    place = {int(address, 16): n for n, (address, _) in enumerate(lines)}
    jumps = [(re.search(r"\bBRA .*?(0x[0-9a-f]+)", text), n) for n, (_, text) in enumerate(lines)]
    loops = [(place[int(to.group(1), 16)], n) for to, n in jumps if to]
    loops = [(first, last) for first, last in loops if first < last]
    inner = [a for a in loops if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    return [[text for _, text in lines[first : last + 1]] for first, last in inner]


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
        "flushes": re.findall(r"\.amdhsa_float_denorm_mode_32 [^3]", text),
        "wide": bool(re.search(r"(global|buffer)_load_dwordx4", text)),
        "dots": sorted(set(re.findall(r"v_mfma_\w+", text))),
    }


Compiler = Callable[..., list[dict]]


@contextmanager
def compiling() -> Iterator[Compiler]:
    """Records of an entry for a target, by a process in which triton compiles."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [env.get("PYTHONPATH")])])
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, __file__], env=env, cwd=ROOT, **pipes) as child:

        def ask(target: str, entry: str, **changes: int) -> list[dict]:
            print(json.dumps([target, entry, changes]), file=child.stdin, flush=True)
            line = child.stdout.readline()
            assert line, "the process that compiles has ended"
            return json.loads(line)

        yield ask
        child.stdin.close()


@pytest.fixture(scope="module")
def compiler() -> Iterator[Compiler]:
    with compiling() as ask:
        yield ask


def record() -> None:
    """Compile every entry for the targets of the table, and write it down."""
    table: compiled.Table = {}
    with compiling() as ask:
        for entry, target in product(entries(), compiled.TARGETS):
            for found in ask(target, entry):
                row = table.setdefault(compiled.key_of(entry, found), {})
                row[target] = compiled.figures(found)
    compiled.write(table)


# What the dots of 64 rows must become on sm_90: fp32 in pieces, without tf32.
DOTS = {
    LLAMA: ["wgmma.mma_async"],
    "attention torch.float32 64 extras=False": [],
    "linear torch.bfloat16 even nk": ["wgmma.mma_async"],
    "grouped torch.bfloat16 even nk": ["wgmma.mma_async"],
    "linear torch.float32 even kn": [],
}
# Launched behind the kernel that an entry is named after.
SECOND_KERNELS = {
    "attention_kernel": ("work_kernel", "merge_kernel"),
    "sample_kernel": ("sample_merge_kernel",),
}
# By default every kernel and every target; all others are slow.
ESSENTIAL = {
    *(("sm_90", entry) for entry in ("accept", "sample torch.bfloat16 even", *DOTS)),
    ("sm_90", "kv_write torch.bfloat16 128 norm=True halves"),
    ("sm_80", "kv_write torch.bfloat16 80 norm=True interleaved in fp32"),
    ("sm_80", "attention torch.bfloat16 80 extras=False"),
    ("sm_86", "attention torch.bfloat16 128 extras=False"),
    ("sm_100", "attention torch.bfloat16 256 extras=True"),
    ("gfx942", "attention torch.bfloat16 64 extras=False"),
    ("sm_80", "attention torch.bfloat16 64 extras=False" + CODED),
    ("gfx942", "linear torch.bfloat16 odd kn"),
    ("sm_90", "add_rms_norm torch.bfloat16 4096 sum"),
    ("sm_90", "gated torch.bfloat16 even silu"),
    ("sm_90", "short_conv torch.bfloat16 even"),
    *(("sm_90", f"recurrent torch.bfloat16 {rule}") for rule in ("delta", "mamba2")),
    *(("sm_80", f"{entry} torch.bfloat16 even") for entry in ("keep_rows",)),
    *(("sm_90", entry) for entry in ("sort", "add torch.bfloat16 even rounds=True")),
    *(("gfx942", entry) for entry in ("grouped torch.bfloat16 odd kn", WIDER)),
}
GRID = [
    pytest.param(
        *case,
        marks=() if case in ESSENTIAL else pytest.mark.slow("compile grid", 2),
        id=" ".join(case),
    )
    for case in product(TARGETS, entries())
]


@pytest.mark.parametrize("target, entry", GRID)
def test_entry(compiler, target, entry):
    """One binary whatever the rows, heads, pages, windows, strides and lengths; it fits shared
    memory, spills nothing in a loop (gfx942 does, a little, where scores are capped), and has no
    atomics, no fused multiply-add, no tf32. It takes no more of an SM than what is written down."""
    records = compiler(target, entry)
    kernels = {kernel_of(entry), *SECOND_KERNELS.get(kernel_of(entry), ())}
    assert {record["kernel"] for record in records} == kernels
    for record in records:
        assert record["binaries"] == 1, record
        assert record["shared"] <= TARGETS[target][1], record
        # What a split of keys is surrounded by may spill a little, the walk along its keys nothing.
        few = SPILLS.get((target, entry), 0)
        few = SPILLED if record["kernel"] == "attention_kernel" else few
        assert target == "gfx942" or record["spilled"] <= few, record
        assert not record.get("spilled_in_loops"), record
        assert not record["atomics"], record
        assert not record["fusion"] and not record["tf32"], record
        # Codes become numbers by way of subnormal ones.
        assert not (entry.endswith(CODED) and record["flushes"]), record
        # Keys and values of a tile are copied while those of another are waited for.
        if record["kernel"] == "attention_kernel" and overlaps(target, entry):
            assert max(record["in_flight"]) >= 2, record
    if target in compiled.TARGETS and (table := compiled.versions().get(compiled.installed())):
        assert not compiled.worse(table, target, entry, records)
    if target == "sm_90" and entry in DOTS:
        (dots,) = (r["dots"] for r in records if r["kernel"] == kernel_of(entry))
        assert dots == DOTS[entry]
    if (target, entry) == ("sm_90", LLAMA):
        (walk,) = (r["walk"] for r in records if r["kernel"] == kernel_of(entry))
        assert 0 < walk <= WALK
    if (wide := loads_widely(target, entry)) is not None:
        (found,) = (r["wide"] for r in records if r["kernel"] == kernel_of(entry))
        assert found == wide


def loads_widely(target: str, entry: str) -> bool | None:
    """Whether 16 bytes are loaded at a time: where rows divide so far. None: not known."""
    kernel = entry.partition(" ")[0]
    if kernel in ("accept", "sort", "kv_write", "attention"):
        return None
    # On gfx942 triton drops what sample told it of rows, and a lane of 64 has fewer of a state.
    if target == "gfx942" and kernel in ("sample", "recurrent"):
        return None
    return entry.split()[2] not in ("odd", "63")


def overlaps(target: str, entry: str) -> bool:
    """Whether an entry has room for more than one tile."""
    full = "float32 512" in entry or ("float32 256" in entry and entry.endswith(CODED))
    return target != "gfx942" and not full


def kernel_of(entry: str) -> str:
    """The kernel that an entry is named after."""
    return f"{entry.partition(' ')[0]}_kernel"


def test_essential_entries_exist():
    """Every kernel and every target is among those that run by default."""
    known = entries()
    assert {entry for _, entry in ESSENTIAL} <= known.keys()
    assert {kernel_of(entry) for _, entry in ESSENTIAL} == set(map(kernel_of, known))
    # sm_86 stands for those with as little shared memory.
    assert {target for target, _ in ESSENTIAL} == set(TARGETS) - {"sm_89", "sm_120"}


def table_of_this_triton() -> compiled.Table:
    table = compiled.versions().get(compiled.installed())
    if table is None:
        pytest.skip(f"no table for triton {compiled.installed()}: run this file with --record")
    return table


def test_every_entry_is_written_down():
    """On every target of the table, with the kernels behind it, and nothing else."""
    expected = {
        f"{entry} {kernel}"
        for entry in entries()
        for kernel in (kernel_of(entry), *SECOND_KERNELS.get(kernel_of(entry), ()))
    }
    for table in compiled.versions().values():
        assert table.keys() == expected
        assert all(row.keys() == {*compiled.TARGETS} for row in table.values())


@pytest.mark.slow("compile grid", 2)
@pytest.mark.parametrize(
    "dim, change, what",
    [(128, {"num_stages": 2}, "copies in flight"), (16, {"block_m": 128}, "registers")],
)
def test_control_a_worse_entry(compiler, dim, change, what):
    """A stage less, and a tile of twice the rows."""
    table, entry = table_of_this_triton(), f"attention torch.bfloat16 {dim} extras=False"
    assert not compiled.worse(table, "sm_90", entry, compiler("sm_90", entry))
    found = compiled.worse(table, "sm_90", entry, compiler("sm_90", entry, **change))
    assert any(f" {what}," in line for line in found), found


@pytest.mark.slow("compile grid", 2)
def test_control_a_loop_that_spills(compiler):
    """Twice the rows, with as many warps."""
    records = compiler("sm_90", LLAMA, block_m=128)
    (found,) = (r for r in records if r["kernel"] == "attention_kernel")
    assert found["spilled"] > SPILLED and found["spilled_in_loops"] and found["walk"] > WALK


@pytest.mark.gpu
def test_one_binary_when_run():
    """On the device itself: many shapes, one compiled kernel in triton's cache."""
    torch.set_default_device("cuda")
    try:
        cache = attention_kernel.device_caches[torch.cuda.current_device()][0]
        before = len(cache)
        # No other test has this head size.
        for call in attention_calls(torch.bfloat16, 48, False, torch.bfloat16):
            call()
        assert len(cache) == before + 1
    finally:
        torch.set_default_device("cpu")


if __name__ == "__main__":
    record() if "--record" in sys.argv else answer()
