"""What no paged attention can serve, decided from a model's config before it runs a row.

What only a forward shows is the survey's to find. Knows transformers' configs and caches.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}
# Layers of transformers' cache that hold keys and values alone, or (shared ones) nothing.
CACHE_LAYERS = {"DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer"}
# Survey and rehearsal go so far, however short the sequences to come are.
LEAST_POSITIONS = 64
# What configs call the longest sequence.
POSITIONS = (
    *("max_position_embeddings", "n_positions", "max_target_positions", "max_seq_len", "n_ctx"),
    *("max_sequence_length", "seq_length", "context_length", "model_max_length"),
)


def refusal(model: PreTrainedModel) -> str | None:
    """What in the model's config cannot be served, or None."""
    config = model.config
    if config.is_encoder_decoder or getattr(config, "add_cross_attention", False):
        return "it has cross-attention"
    text = config.get_text_config(decoder=True)
    kept = {type(layer).__name__ for layer in _cache_layers(text)} - CACHE_LAYERS
    if kept:
        return f"it keeps state other than keys and values ({', '.join(sorted(kept))})"
    others = set(getattr(text, "layer_types", None) or ()) - LAYER_TYPES
    if others:
        return f"it has layers of type {', '.join(sorted(others))}"
    if "dynamic" in _rope_types(text):
        return "dynamic RoPE scaling makes a row depend on the longest sequence"
    return None


def length_refusal(model: PreTrainedModel, max_model_len: int, max_rows: int) -> str | None:
    """What forbids sequences of ``max_model_len`` tokens, passes of ``max_rows`` rows, or None."""
    text = model.config.get_text_config(decoder=True)
    rope = next((r for r in _ropes(text) if r.get("rope_type") == "longrope"), None)
    if rope is not None:
        most = rope.get("original_max_position_embeddings")
        most = most or getattr(text, "original_max_position_embeddings", None) or 0
        if max_model_len > most or most < LEAST_POSITIONS:
            return (
                "longrope takes other factors once a sequence passes "
                f"{most} tokens, for all of its rows; set max_model_len={most} to stay below"
            )
    scale = getattr(text, "floor_scale", None)
    tempered = getattr(text, "attn_temperature_tuning", False)
    for name, size in (("max_model_len", max_model_len), ("max_rows", max_rows)):
        if tempered and scale and size >= scale:
            return (
                f"its attention is tempered from {scale} rows on by a count of its own; set "
                f"{name}={scale - 1} to stay below"
            )
    return None


def max_positions(model: PreTrainedModel) -> int:
    """The longest sequence that the model has positions for."""
    text = model.config.get_text_config(decoder=True)
    found = (getattr(text, name, None) for name in POSITIONS)
    most = next((int(value) for value in found if value and value > 0), None)
    return most or 2048  # nothing limits it: as much as most were trained for


def vocab_size(model: PreTrainedModel) -> int:
    """Rows of the model's embedding table: the token ids it takes."""
    return len(model.get_input_embeddings().weight)  # type: ignore[arg-type]


def cache_windows(model: PreTrainedModel) -> set[int]:
    """Sliding windows of the layers of the model's own cache."""
    layers = _cache_layers(model.config.get_text_config(decoder=True))
    return {w for layer in layers if (w := getattr(layer, "sliding_window", None))}


def _cache_layers(text: PreTrainedConfig) -> list[Any]:
    try:
        return list(DynamicCache(config=text).layers)
    except (AttributeError, KeyError, TypeError, ValueError):  # a cache of the model's own making
        return []


def _ropes(text: PreTrainedConfig) -> Iterator[dict[str, Any]]:
    """RoPE's parameters, of each type of layers where they differ."""
    given = getattr(text, "rope_parameters", None) or {}
    if isinstance(given, dict):
        yield given
        yield from (part for part in given.values() if isinstance(part, dict))


def _rope_types(text: PreTrainedConfig) -> set[str]:
    return {rope.get("rope_type", "default") for rope in _ropes(text)}
