"""Names of transformers outside its public interface. A model is refused where one is missing.

Other names that tinyspec reads are compared with tables of known ones (``supported``): an unknown
one is a refusal too.
"""

from __future__ import annotations

from importlib import import_module
from inspect import signature
from typing import Any

import transformers
from transformers import AttentionMaskInterface, DynamicCache, GenerationMixin, PreTrainedConfig

# What configs keep the chosen implementations under. Set by these names, because the properties of
# nearly the same name also write to the configs inside of a config.
ATTENTION_CHOICE = "_attn_implementation_internal"
EXPERTS_CHOICE = "_experts_implementation_internal"
_missing: list[str] = []
# What transformers calls the argument that holds a cache, newest first, and what it is called here.
CACHE_NAMES = ("cache", "past_key_values")
_prepared = signature(GenerationMixin.prepare_inputs_for_generation).parameters
CACHE = next((name for name in CACHE_NAMES if name in _prepared), CACHE_NAMES[0])


def private_name(module: str, name: str) -> Any:
    """``name`` of a module of transformers; None where it is missing: models are refused then."""
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError):
        _missing.append(f"{module}.{name}")
        return None


def missing_names(config: PreTrainedConfig) -> str | None:
    """Names that tinyspec needs and this version of transformers lacks, as a reason; or None."""
    attributes = ("_attn_implementation", ATTENTION_CHOICE, EXPERTS_CHOICE)
    missing = [*_missing]
    missing += [f"PreTrainedConfig.{name}" for name in attributes if not hasattr(config, name)]
    if not hasattr(DynamicCache(), "layers"):
        missing.append("DynamicCache.layers")
    if not hasattr(AttentionMaskInterface, "_global_mapping"):
        missing.append("AttentionMaskInterface._global_mapping")
    if not missing:
        return None
    return f"transformers {transformers.__version__} has no {', '.join(missing)}"
