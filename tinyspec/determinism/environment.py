"""What of the process and the machine is in force and may change bits: by the libraries' reports,
and by a canary.

Not what is set: a variable of the environment that nothing follows leaves it as it is. The canary
is a digest of what products, sums, element-wise functions and attention give for inputs made from
integers, in the dtypes and widths of a model, in torch's state of a pass. An influence that no
library reports (MKL_CBWR, ONEDNN_MAX_CPU_ISA, another BLAS) shows there as another fingerprint. It
proves nothing of a model: the probes do that.
"""

from __future__ import annotations

import ctypes
import hashlib
import platform
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from tinyspec.kernels import backend
from tinyspec.kernels.backend import AttentionMetadata, Kernels
from tinyspec.model import openmp
from tinyspec.model.attention import LayerShape
from tinyspec.model.checksum import checksum
from tinyspec.model.cpu_linears import CpuLinear
from tinyspec.model.linears import distinct_linears, linear_shape
from tinyspec.model.served_model import served_of
from tinyspec.model.shadow import shell
from tinyspec.model.torch_state import TorchState

_C: Any = torch._C
# A part of the fingerprint.
THREADS = "threads"
# Of this process, a line for every part of a file that is mapped; it ends with the path.
MAPS = Path("/proc/self/maps")
LIBRARY = "libcublas"
# Kinds of linears and heads, and outputs of a linear: more would cost more and show little more.
MOST_LINEARS, MOST_OUTPUTS, MOST_HEADS = 8, 256, 2
# More than one tile of the attention twin, and a part of one.
TOKENS = 160
# Elements that every thread gets some of, up to 16 threads.
LONG = 1 << 19
# Of weights; others are packed, and multiplied in the dtype of the model.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FUNCTIONS: tuple[Callable[[Tensor], Tensor], ...] = (
    *(torch.exp, torch.tanh, torch.sigmoid, torch.sin, torch.cos, torch.erf, torch.reciprocal),
    *(F.silu, F.gelu, F.softplus),
    lambda x: F.gelu(x, approximate="tanh"),
    lambda x: x.square().add(1).rsqrt(),
    lambda x: x.abs().add(1).log(),
    lambda x: x.sum(dim=-1),
    lambda x: x.square().mean(dim=-1),
    lambda x: x.softmax(dim=-1),
    lambda x: x.log_softmax(dim=-1),
    lambda x: F.rms_norm(x, x.shape[-1:]),
    lambda x: F.layer_norm(x, x.shape[-1:]),
)


def device_parts(device: torch.device) -> list[str]:
    """Name, instruction set, and number of multiprocessors or threads."""
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        arch = getattr(found, "gcnArchName", f"sm_{found.major}{found.minor}")
        return [found.name, arch, str(found.multi_processor_count)]
    return [_cpu_name(), torch.backends.cpu.get_cpu_capability(), str(torch.get_num_threads())]


def ambient(device: torch.device) -> dict[str, int | str]:
    """What may change while the process runs and is not pinned: threads that torch asks for and
    that run, quantized engine; on a GPU, whose passes use neither, libraries and workspaces."""
    if device.type != "cuda":
        asked, running = torch.get_num_threads(), openmp.settle()
        return {THREADS: asked, "threads running": running, "quantized engine": _C._get_qengine()}
    # Bytes of workspaces, where torch tells them (since 2.13).
    names = ("_cuda_getCublasWorkspaceSize", "_cuda_getCublasLtWorkspaceSize")
    sizes = [getattr(_C, name)() for name in names if hasattr(_C, name)]
    return {"blas": " ".join(map(str, [_C._get_blas_preferred_backend(), *sizes]))}


def environment(device: torch.device) -> dict[str, object]:
    """The parts of the fingerprint that come from process and machine, readable."""
    name, instructions, count = device_parts(device)
    gpu = {"multiprocessors": count, "cublas": cublas()}
    return {
        "device": name,
        "instruction set": instructions,
        "build": torch.__config__.show(),  # versions of MKL and oneDNN, compiler, flags
        **ambient(device),
        **(gpu if device.type == "cuda" else {}),
    }


@cache
def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


@cache
def cublas() -> dict[str, object]:
    """What is fixed of cuBLAS when a process starts: the libraries that are loaded, which need not
    be those that torch was built with, and the variables that they look at once."""
    return {"libraries": loaded_libraries(), "variables": backend.of_cublas()}


def loaded_libraries(maps: Path = MAPS) -> list[tuple[str, int]]:
    """(name, bytes) of every file of cuBLAS that is loaded, which tell versions apart. Empty
    where none is or the system does not tell."""
    lines = maps.read_text().splitlines() if maps.exists() else []
    mapped = {Path(line.split(maxsplit=5)[-1]) for line in lines if LIBRARY in line}
    return sorted((path.name, path.stat().st_size) for path in mapped if path.exists())


@cache
def driver(loader: Callable[[str], Any] = ctypes.CDLL) -> str:
    """Version of the device's driver, which torch has no name for: by its own library, on AMD's
    that of HIP."""
    if torch.version.hip is not None:
        return torch.version.hip
    found = ctypes.c_int(-1)
    loader("libcuda.so.1").cuDriverGetVersion(ctypes.byref(found))
    return str(found.value)


# (dtype, in, out, class of linears that a CPU runs by other operators than torch's default)
Linears = tuple[tuple[torch.dtype, int, int, type[CpuLinear] | None], ...]


def canary(model: PreTrainedModel, rows: int) -> str:
    """16 hexadecimal digits for a patched model in passes of ``rows`` rows, the reference bucket.

    Computed once for equal models, and again when threads or what else is not pinned have changed.
    """
    found, served = set(), served_of(model)
    for module in distinct_linears(model).values():
        inputs, outputs = linear_shape(module) or (0, 0)
        weight = getattr(module, "weight", None)
        dtype = weight.dtype if isinstance(weight, Tensor) else model.dtype
        dtype = served.autocast.dtype or (dtype if dtype in DTYPES else model.dtype)
        kind = type(module) if isinstance(module, CpuLinear) else None
        found.add((dtype, inputs, min(outputs, MOST_OUTPUTS), kind))
    linears = tuple(sorted(found, key=str)[:MOST_LINEARS])
    heads = tuple(dict.fromkeys(served.layers))[:MOST_HEADS]
    used = linears, heads, served.dtype, rows, model.device, served.context.kernels.backend
    with TorchState(model.device)():
        return _canary_bits(*used, tuple(ambient(model.device).items()))


@cache
def _canary_bits(
    linears: Linears,
    heads: tuple[LayerShape, ...],
    dtype: torch.dtype,
    rows: int,
    device: torch.device,
    backend_name: str,
    _: tuple[object, ...],
) -> str:
    kernels = backend.load(backend_name)
    results = list(_linears(linears, rows, device, kernels.linear))
    for width in sorted({inputs for _, inputs, *_ in linears}):
        for kind in dict.fromkeys((dtype, torch.float32)):
            x = _numbers(rows, width, kind, device)
            results += [function(x / 8) for function in FUNCTIONS]
    results += _attention(heads, dtype, device, kernels)
    # Loops that every thread has a part of, among subnormal numbers as well.
    x = _numbers(1, LONG, torch.float32, device)[0]
    results += [(x / 3).sum(), x.exp(), x * 2.0**-120 * 2.0**-20]
    sums = [(str(result.dtype), tuple(result.shape), checksum(result)) for result in results]
    return hashlib.sha256(repr(sums).encode()).hexdigest()[:16]


def _numbers(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[rows, columns] of both signs below 64, of magnitudes that change from column to column; from
    integers alone, so the same everywhere."""
    place = torch.arange(rows * columns, dtype=torch.int64, device=device)
    mixed = (place * 2654435761 >> 9) % 8191 - 4095
    column = torch.arange(columns, dtype=torch.int32, device=device)
    scale = ((column * 5 % 7 + 124) << 23).view(torch.float32)  # 1/8 to 8
    return (mixed.view(rows, columns).float() * 2.0**-9 * scale).to(dtype)


def _linears(
    linears: Linears, rows: int, device: torch.device, kernel: Callable[..., Tensor]
) -> Iterator[Tensor]:
    """Products by the ways that linears take: both layouts of a weight, the kernel, a CPU's own."""
    for dtype, inputs, outputs, kind in linears:
        x, weight = (_numbers(n, inputs, dtype, device) for n in (rows, outputs))
        weight, half = weight / 64, inputs // 2
        # In every second row the second half takes back the first: what is left is rounding.
        x[::2, half : 2 * half] = -x[::2, :half].flip(1)
        weight[:, half : 2 * half] = weight[:, :half].flip(1)
        yield F.linear(x, weight)
        yield torch.mm(x, weight.t().contiguous())
        yield kernel(x, weight)
        if kind is not None:
            linear = nn.Linear(inputs, outputs, bias=False, device="meta")
            linear.weight = nn.Parameter(weight, requires_grad=False)
            yield shell(linear, kind).product(x)


def _attention(
    heads: tuple[LayerShape, ...], dtype: torch.dtype, device: torch.device, kernels: Kernels
) -> Iterator[Tensor]:
    """A prompt, and its last row by itself."""
    for shape in heads:
        size = 128
        pages = -(-TOKENS // size)
        wide = shape.num_kv_heads * shape.head_dim
        cache = _numbers(pages * size, wide, dtype, device) / 16
        cache = cache.view(pages, size, shape.num_kv_heads, shape.head_dim)
        q = _numbers(TOKENS, shape.num_heads * shape.head_dim, dtype, device) / 16
        q = q.view(TOKENS, shape.num_heads, shape.head_dim)
        scores = {"scale": shape.head_dim**-0.5, "softcap": shape.softcap}
        for first in (0, TOKENS - 1):
            metadata = AttentionMetadata.of([(first, TOKENS)], [range(pages)], size, device)
            v = cache.flip(0).contiguous()
            yield kernels.paged_attention(q[first:], cache, v, metadata, **scores)
