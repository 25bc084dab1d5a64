"""The fingerprint: a digest of everything that the bits of a deterministic request depend on.

Nothing that is measured by time enters it, nor anything that cannot change a bit (window, drafter,
page size, pool size).
"""

from __future__ import annotations

import hashlib
import json
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from tinyspec.config import EngineConfig
from tinyspec.invariance import linear_shape

_CHUNK = 1 << 22
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(tensor: Tensor) -> int:
    """Position-weighted integer sum of a tensor's bits, modulo 2**64, computed where it lies.

    Wrapping integer addition has no order, so any device gives the same number.
    """
    words = tensor.detach().contiguous().flatten().view(_WORDS[tensor.element_size()])
    total = 0
    for start in range(0, words.numel(), _CHUNK):
        part = words[start : start + _CHUNK].long()
        place = torch.arange(start, start + part.numel(), device=part.device)
        # Odd multipliers, spread over 64 bits: swapping two different words changes the sum.
        weight = (place * 2 + 1) * -7046029254386353131
        total += int((part * (weight | 1)).sum())
    return total % (1 << 64)


def weight_state(model: nn.Module) -> list[tuple[str, int, int]]:
    """Name, address and version counter of every parameter: changes when a weight does."""
    return [
        (name, p.data_ptr(), 0 if p.is_inference() else p._version)
        for name, p in model.named_parameters()
    ]


def digest_weights(model: nn.Module) -> str:
    """Digest of every parameter and buffer: name, shape, dtype, bits."""
    digest = hashlib.sha256()
    tensors = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in tensors:
        entry = (name, tuple(tensor.shape), str(tensor.dtype), checksum(tensor))
        digest.update(repr(entry).encode())
    return digest.hexdigest()


def _device(device: torch.device) -> list[str]:
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        arch = getattr(found, "gcnArchName", f"sm_{found.major}{found.minor}")
        return [found.name, arch, str(found.multi_processor_count)]
    return [_cpu_name(), torch.backends.cpu.get_cpu_capability(), str(torch.get_num_threads())]


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _versions(device: torch.device) -> list[str]:
    found = [torch.__version__, transformers.__version__, str(torch.version.cuda)]
    if device.type == "cuda":
        found += [version("triton"), str(torch._C._cuda_getDriverVersion())]  # type: ignore[attr-defined]
    return found


def _settings(model: PreTrainedModel) -> dict[str, Any]:
    """The model's config without what says only where it came from."""
    settings = json.loads(model.config.to_json_string())
    for name in ("_name_or_path", "transformers_version"):
        settings.pop(name, None)
    return settings


def fingerprint(
    model: PreTrainedModel, weights: str, config: EngineConfig, device: torch.device
) -> str:
    """32 hexadecimal digits. ``weights`` is the digest of the model's weights."""
    parts = {
        "weights": weights,
        "model": type(model).__name__,
        "config": _settings(model),
        "device": _device(device),
        "versions": _versions(device),
        "reference_rows": config.reference_rows,
        "backend": config.backend,
        "kv_dtype": config.kv_dtype,
        "max_model_len": config.max_model_len,
        "cuda_graphs": config.cuda_graphs,
        "linears": sorted({type(m).__name__ for m in model.modules() if linear_shape(m)}),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]
