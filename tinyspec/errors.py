"""The errors that tinyspec raises, besides ValueError."""

from __future__ import annotations

# What settings are called here, and in vLLM, SGLang, OpenAI's API and transformers.
_NAMES = {
    "max_new_tokens in SamplingParams": "max_tokens max_completion_tokens",
    "min_new_tokens in SamplingParams": "min_tokens",
    "num_return_sequences in SamplingParams": "n",
    "stop_strings in SamplingParams": "stop",
    "include_stop_str in SamplingParams": "include_stop_str_in_output",
    "bad_words_ids in SamplingParams, which takes token ids": "bad_words",
    "temperature in SamplingParams: 0 is greedy, above it samples": "do_sample",
    "json_schema, regex or grammar in SamplingParams": "response_format structured_outputs",
    "prompt here, which may be chat messages": "messages",
    "max_sequences in EngineConfig": "max_num_seqs max_running_requests",
    "memory_fraction in EngineConfig": "gpu_memory_utilization mem_fraction_static",
    "max_rows in EngineConfig": "max_num_batched_tokens",
    "max_model_len in EngineConfig": "context_length max_seq_len max_seq_length",
    "page_size in EngineConfig": "block_size",
    "kv_dtype in EngineConfig": "kv_cache_dtype",
    "draft_window in EngineConfig": "num_speculative_tokens",
    "prefix_cache in EngineConfig": "enable_prefix_caching disable_radix_cache",
    "cuda_graphs in EngineConfig": "enforce_eager disable_cuda_graph",
    "drafter in EngineConfig": "speculative_config",
    "device here, which is one for the whole model": "device_map",
    "dtype here": "torch_dtype",
}
OTHER_NAMES = {
    name: f"it is called {own}" for own, names in _NAMES.items() for name in names.split()
}
OTHER_NAMES |= dict.fromkeys(("best_of", "num_beams"), "there is none")

# Characters of a value in a message.
LONGEST = 400


class TinyspecError(Exception):
    """Base of tinyspec's own errors."""


class DeterminismError(TinyspecError):
    """``deterministic=True`` cannot be served here; the message gives the reason and the remedy."""


class UnsupportedModelError(TinyspecError):
    """The model cannot be served; the message names the module or setting that prevents it."""


class UnsupportedEnvironmentError(TinyspecError, RuntimeError):
    """No model can be served as the process is set up; the message says what to set."""


class QueueFull(TinyspecError):
    """As many calls of an AsyncEngine wait as its ``max_waiting`` allows: this one never began."""


def named(error: BaseException) -> str:
    """An error in a line: its type, and what it says if it says something."""
    kind, text = type(error).__name__, str(error)
    return f"{kind}: {text}" if text else kind


def unsupported(model: object, reason: str) -> UnsupportedModelError:
    """An UnsupportedModelError in the form that all have."""
    return UnsupportedModelError(f"{type(model).__name__} is not supported: {reason}")


def refuse(field: str, value: object, allowed: str) -> ValueError:
    """A ValueError in the form of all bad arguments: field, value, what is allowed."""
    shown = repr(value)
    if len(shown) > LONGEST:
        shown = f"{shown[: LONGEST - 3]}..."
    return ValueError(f"{field}={shown} is not allowed: {allowed}")


def refuse_other_names(given: dict[str, object]) -> None:
    """Raise ValueError for a name that others have, with what is here in its place."""
    for name in OTHER_NAMES.keys() & given.keys():
        raise refuse(name, given[name], OTHER_NAMES[name])
