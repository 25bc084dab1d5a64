"""The fingerprint: everything that the bits of a deterministic request depend on, and its digest.

Nothing that is measured by time enters it, nor anything that cannot change a bit (window, drafter,
page size, pool size).
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Collection
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from tinyspec.config import EngineConfig
from tinyspec.determinism.environment import canary, driver, environment
from tinyspec.determinism.fingerprint_parts import DIGEST, Fingerprint, shortened
from tinyspec.determinism.model_state import function_settings, functions, tensors
from tinyspec.determinism.results import PACKAGE, code_digest
from tinyspec.model.checksum import checksum
from tinyspec.model.linears import KernelLinear, SharedLinear, linear_shape
from tinyspec.model.moe import kernel_experts
from tinyspec.model.quantized import extra_parts, is_packed, packing_format, parts
from tinyspec.model.served_model import served_of
from tinyspec.model.torch_state import without_modes

# The wings that decide what a pass computes; the twins are part of kernels.
WINGS = ("kernels", "model", "runner")
# Fields of syntax trees that no bit depends on.
TYPES = ("annotation", "returns")
# And what decides tokens, log-probabilities or ends elsewhere, one by one: file, class or none, and
# names. README.md says why these, and why no others.
NAMES = (
    ("config.py", "", "STATE_TILE"),
    ("sampling_params.py", "SamplingParams", "eos_ids stop_ids filtered changes_logits"),
    ("sampling_params.py", "SamplingParams", "structure checks_text"),
    ("scheduler/request.py", "", "_GOLDEN _MASK noise_key"),
    ("scheduler/request.py", "Sequence", "sampling enter"),
    ("scheduler/request.py", "Request", "__post_init__"),
    ("scheduler/sequence_table.py", "SequenceTable", "stops_at"),
    ("scheduler/checkpoints.py", "Checkpoints", "move"),
    ("scheduler/thoughts.py", "Thoughts", "end added"),
    ("engine/commit.py", "Committer", "_commit_newest _append_one_by_one _finish stops"),
    ("structured/grammars.py", "", "MOST_STATES IN_FRONT vocabulary Spelling"),
    ("structured/grammars.py", "Reader", "__init__ read next _sound"),
    ("structured/grammars.py", "Grammar", "allowed _read _reader"),
    ("structured/grammars.py", "Grammars", "of _compile"),
    ("structured/schemas.py", "", "LAYOUT FORMATS EMPTY ANY STRINGS DATA NAMED IN_PLACE ABOUT"),
    ("structured/schemas.py", "", "LARK readable readable_grammar walk _readable _simplify _names"),
    ("drop_in/run.py", "WideRows", "_sample _note_ends"),
)
# And, for requests whose tokens depend on text:
OF_TEXT = (
    ("text/decoding.py", "", "INCOMPLETE MOST_BEFORE FEW decode decode_behind"),
    ("text/decoding.py", "", "reach decoded first_stop"),
)


class ExtraModules(NamedTuple):
    """Modules that run beside the model, with weights of their own. settings: what else their
    results depend on."""

    modules: nn.Module
    settings: str


def asking_for_gradients(model: nn.Module) -> list[str]:
    """Names of torch's linears whose weights do: views of rows are multiplied otherwise then."""
    return [
        name
        for name, module in model.named_modules()
        if linear_shape(module) and not isinstance(module, SharedLinear)
        if getattr(getattr(module, "weight", None), "requires_grad", False)
    ]


@torch.no_grad()
@without_modes()
def digest_weights(model: nn.Module, ignored: Collection[str] = ()) -> str:
    """Digest of every parameter, buffer and attribute but ``ignored`` (name, shape, strides, dtype,
    bits; of packed ones every part)."""
    digest = hashlib.sha256()

    def add(name: str, tensor: Tensor) -> None:
        form = tuple(tensor.shape), _strides(tensor), str(tensor.dtype)
        digest.update(repr((name, *form, checksum(tensor))).encode())

    for name, tensor in tensors(model, ignored):
        if is_packed(tensor):
            digest.update(repr((name, packing_format(tensor))).encode())
        for part, plain in parts(tensor).items():
            add(f"{name}.{part}" if part else name, plain)
    for name, module in model.named_modules():
        for part, plain in extra_parts(module).items():
            add(f"{name}.{part}", plain)
    return digest.hexdigest()


def digest_extra(extra: ExtraModules, ignored: Collection[str] = ()) -> str:
    """Of weights, structure and settings; ignored: names of attributes that are none."""
    parts = (
        digest_weights(extra.modules, ignored),
        functions(extra.modules),
        function_settings(extra.modules, ignored),
        extra.settings,
        asking_for_gradients(extra.modules),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _strides(tensor: Tensor) -> tuple[int, ...] | None:
    """None where a tensor lies row by row: other products of it have other bits."""
    return None if tensor.is_contiguous() else tensor.stride()


@cache
def code(root: Path = PACKAGE) -> str:
    """Digest of the package's code at ``root`` that bits depend on: files of the ``WINGS``, and
    ``NAMES``. Raises KeyError for a name that is not there."""
    return _named(NAMES, root, code_digest(*WINGS, root=root))


@cache
def text_code(root: Path = PACKAGE) -> str:
    """Digest of the code that says where a text ends."""
    return _named(OF_TEXT, root)


def _named(listed: tuple[tuple[str, str, str], ...], root: Path, *others: str) -> str:
    """Digest of ``others`` and of statements by name, without comments, docstrings, types and
    places."""
    found: list[Any] = [*others]
    for file, owner, names in listed:
        known = _defined(ast.parse((root / file).read_bytes()))
        known = _defined(known[owner]) if owner else known
        found += [(file, owner, name, _plain(known[name])) for name in names.split()]
    return hashlib.sha256(repr(found).encode()).hexdigest()


def _defined(within: Any) -> dict[str, Any]:
    """The statements of a module or class that define names, by these."""
    targets = [(x, node) for node in within.body for x in (node, *getattr(node, "targets", ()))]
    return {getattr(x, "name", getattr(x, "id", "")): node for x, node in targets}


def _plain(node: Any) -> Any:
    """Of a statement, its parts; Python's own dump of them differs from version to version."""
    if isinstance(node, list):
        texts = (isinstance(x, ast.Expr) and isinstance(x.value, ast.Constant) for x in node)
        return [_plain(x) for x, is_text in zip(node, texts, strict=True) if not is_text]
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = [(k, v) for k, v in ast.iter_fields(node) if v not in (None, []) and k not in TYPES]
    return [type(node).__name__, *((key, _plain(value)) for key, value in fields)]


def _versions(device: torch.device) -> dict[str, str | None]:
    found: dict[str, str | None] = {
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
    }
    if device.type == "cuda":
        found["triton"] = version("triton")
        found["driver"] = driver()
    return {**found, "cuda": torch.version.cuda}


def _libraries(model: nn.Module) -> dict[str, str]:
    """Versions of the libraries whose modules and weights are in the model (peft, torchao)."""
    kinds = {type(module) for module in model.modules()} | {type(p) for p in model.parameters()}
    own = {"tinyspec", "torch", "transformers"}
    found = {}
    for name in {kind.__module__.split(".")[0] for kind in kinds} - own:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _config(model: PreTrainedModel) -> dict[str, Any]:
    """The model's config without what says only where it came from, or what its weights say."""
    config = json.loads(model.config.to_json_string())
    for name in ("_name_or_path", "transformers_version", "architectures", "dtype"):
        config.pop(name, None)
    return config


def _attention(model: PreTrainedModel) -> list[Any]:
    """What passes take from attention modules as it was when the model was loaded: which keys a row
    sees and, of stand-ins that do not run the module's forward, scale and softcap."""
    calls = served_of(model).context.layers
    return [[c.name, c.reach._asdict(), c.scale, c.shape.softcap] for c in calls]


def fingerprint(
    model: PreTrainedModel,
    weights: dict[str, str],
    config: EngineConfig,
    ignored: Collection[str] = (),
) -> Fingerprint:
    """weights: digests of the model's own and of what runs beside it, by part. ignored: names of
    attributes that are no settings."""
    assert config.reference_rows
    autocast = served_of(model).autocast.dtype
    by_kernel = [name for name, m in model.named_modules() if isinstance(m, KernelLinear)]
    parts = {
        "model": type(model).__name__,
        "dtype": str(model.dtype).removeprefix("torch."),
        **({} if autocast is None else {"autocast": str(autocast).removeprefix("torch.")}),
        "reference_rows": config.reference_rows,
        "max_model_len": config.max_model_len,
        "backend": config.backend,
        "kv_dtype": config.kv_dtype,
        "cuda_graphs": config.cuda_graphs,
        **environment(model.device),
        **_versions(model.device),
        "libraries": _libraries(model),
        "linears": sorted({type(m).__name__ for m in model.modules() if linear_shape(m)}),
        "linear_kernel": sorted([*by_kernel, *kernel_experts(model)]),
        "gradients": asking_for_gradients(model),
        **{name: DIGEST + digest[:32] for name, digest in weights.items()},
        "config": _config(model),
        "modules": functions(model),
        "settings": function_settings(model, ignored),
        "attention": _attention(model),
        "code": DIGEST + code()[:32],
        "canary": DIGEST + canary(model, config.reference_rows),
    }
    return Fingerprint(shortened(parts))
