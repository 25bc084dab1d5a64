"""The fingerprint: a digest of everything that the bits of a deterministic request depend on.

Nothing that is measured by time enters it, nor anything that cannot change a bit (window, drafter,
page size, pool size).
"""

from __future__ import annotations

import hashlib
import json
import platform
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from tinyspec.config import EngineConfig
from tinyspec.determinism.checksum import checksum
from tinyspec.determinism.code_digest import syntax_digest
from tinyspec.model.linear_kinds import linear_shape
from tinyspec.model.linears import KernelLinear
from tinyspec.model.moe import implementations, kernel_experts
from tinyspec.model.quantized import extra_parts, is_packed, layout, packing_format, parts, trace
from tinyspec.model.wrappers import hooks_of

# One more with every change that gives canonical passes other bits.
REVISION = 4
_PLAIN = (bool, int, float, str)
# Numbers on modules that no bit of a pass depends on.
_IDLE = ("training", "gradient_checkpointing")
_ADAPTERS = ("active_adapters", "active_adapter", "disable_adapters", "merged_adapters")


def weight_state(model: nn.Module) -> list[tuple[str, tuple[int, ...]]]:
    """Name and trace of every parameter and buffer: changes when a weight does."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [(name, trace(tensor)) for name, tensor in tensors]


def adapter_state(model: nn.Module) -> list[tuple[str, str, str]]:
    """Which adapters (peft's tuner layers) are in use: switching them changes no parameter."""
    found = []
    for name, module in model.named_modules():
        present = [a for a in _ADAPTERS if a in module.__dict__ or hasattr(type(module), a)]
        values = {attribute: getattr(module, attribute) for attribute in present}
        # transformers' models have methods of these names.
        values = {a: value for a, value in values.items() if not callable(value)}
        if values:
            # A flag beside the adapters may make another function of the same weights.
            own = {a: v for a, v in vars(module).items() if isinstance(v, _PLAIN)}
            values["settings"] = sorted((a, v) for a, v in own.items() if a != "training")
            values["scaling"] = getattr(module, "scaling", None)
        found += [(name, attribute, repr(value)) for attribute, value in values.items()]
    return found


def structure(model: nn.Module) -> list[tuple[object, ...]]:
    """What the probed facts depend on beside device and settings: modules and their hooks, shapes,
    layouts and alignment of parameters and buffers, how experts run; not their values."""
    found: list[tuple[object, ...]] = []
    for name, module in model.named_modules():
        hooks = len(hooks_of(module))
        own_forward = "forward" in vars(module), module._compiled_call_impl is not None
        kind = type(module)
        found.append((name, kind.__module__, kind.__qualname__, hooks, own_forward))
        for own, tensor in {**module._parameters, **module._buffers}.items():
            if tensor is not None:
                found.append((own, layout(tensor)))
    return found + implementations(model)


def settings(model: nn.Module) -> list[tuple[str, str, object]]:
    """Plain values that modules keep as attributes: another one may be another function."""
    return [
        (name, attribute, value)
        for name, module in model.named_modules()
        for attribute, value in vars(module).items()
        if isinstance(value, _PLAIN) and attribute != "training"
    ]


def function_settings(model: nn.Module) -> list[tuple[str, str, object]]:
    """Numbers among the ``settings`` that may enter what a module computes: of transformers',
    torch's and our own modules, as others may count what they like."""
    known = {
        name
        for name, module in model.named_modules()
        if type(module).__module__.split(".")[0] in ("transformers", "torch", "tinyspec")
    }
    return [
        (name, attribute, value)
        for name, attribute, value in settings(model)
        if isinstance(value, (int, float))
        and not attribute.startswith("_")
        and attribute not in _IDLE
        and name in known
    ]


def served_by_kernel(model: nn.Module) -> list[str]:
    """Names of the linears and experts that the linear kernel serves."""
    linears = (name for name, m in model.named_modules() if isinstance(m, KernelLinear))
    return sorted([*linears, *kernel_experts(model)])


@torch.no_grad()
def digest_weights(model: nn.Module) -> str:
    """Digest of every parameter and buffer (name, shape, dtype, bits; of packed ones every part)
    and of the adapters used."""
    digest = hashlib.sha256(repr(adapter_state(model)).encode())
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_packed(tensor):
            digest.update(repr((name, packing_format(tensor))).encode())
        for part, plain in parts(tensor).items():
            _add(digest, f"{name}.{part}" if part else name, plain)
    for name, module in model.named_modules():
        for part, plain in extra_parts(module).items():
            _add(digest, f"{name}.{part}", plain)
    return digest.hexdigest()


def _add(digest: hashlib._Hash, name: str, tensor: Tensor) -> None:
    entry = (name, tuple(tensor.shape), str(tensor.dtype), checksum(tensor))
    digest.update(repr(entry).encode())


def device_parts(device: torch.device) -> list[str]:
    """Name, instruction set, and number of multiprocessors or threads."""
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


def _libraries(model: nn.Module) -> dict[str, str]:
    """Versions of the libraries whose modules and weights are in the model (peft, torchao)."""
    kinds = {type(module) for module in model.modules()} | {type(p) for p in model.parameters()}
    names = {kind.__module__.split(".")[0] for kind in kinds} - {"tinyspec", "torch"}
    return {name: found for name in names if (found := _version(name)) is not None}


@cache
def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _config(model: PreTrainedModel) -> dict[str, Any]:
    """The model's config without what says only where it came from, or what its weights say."""
    config = json.loads(model.config.to_json_string())
    for name in ("_name_or_path", "transformers_version", "architectures", "dtype"):
        config.pop(name, None)
    return config


def fingerprint(
    model: PreTrainedModel, weights: str, config: EngineConfig, device: torch.device
) -> str:
    """32 hexadecimal digits. ``weights`` is the digest of the model's weights."""
    parts = {
        "revision": REVISION,
        "code": syntax_digest(),
        "weights": weights,
        "settings": function_settings(model),
        "model": type(model).__name__,
        "config": _config(model),
        "device": device_parts(device),
        "versions": _versions(device),
        "libraries": _libraries(model),
        "reference_rows": config.reference_rows,
        "backend": config.backend,
        "kv_dtype": config.kv_dtype,
        "max_model_len": config.max_model_len,
        "cuda_graphs": config.cuda_graphs,
        "linears": sorted({type(m).__name__ for m in model.modules() if linear_shape(m)}),
        "linear_kernel": served_by_kernel(model),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]
