"""The errors that tinyspec raises, besides ValueError."""

from __future__ import annotations

# Names that settings have in vLLM, SGLang, OpenAI's API and transformers, and what to say of them.
_HINTS = {
    "it is called max_new_tokens in SamplingParams": "max_tokens max_completion_tokens",
    "it is called min_new_tokens in SamplingParams": "min_tokens",
    "it is called num_return_sequences in SamplingParams": "n",
    "it is called stop_strings in SamplingParams": "stop",
    "it is called temperature in SamplingParams: 0 is greedy, above it samples": "do_sample",
    "it is called max_sequences in EngineConfig": "max_num_seqs max_running_requests",
    "it is called memory_fraction in EngineConfig": "gpu_memory_utilization mem_fraction_static",
    "it is called max_rows in EngineConfig": "max_num_batched_tokens",
    "it is called max_model_len in EngineConfig": "context_length max_seq_len max_seq_length",
    "it is called page_size in EngineConfig": "block_size",
    "it is called prefix_cache in EngineConfig": "enable_prefix_caching disable_radix_cache",
    "it is called cuda_graphs in EngineConfig": "enforce_eager disable_cuda_graph",
    "it is called kv_dtype in EngineConfig": "kv_cache_dtype",
    "it is called drafter in EngineConfig": "speculative_config speculative_model",
    "it is called draft_window in EngineConfig": "num_speculative_tokens",
    "it is called prompt here, which may be chat messages": "messages",
    "there is none; max_new_tokens does not count the prompt": "max_length",
    "it is called include_stop_str in SamplingParams": "include_stop_str_in_output",
    "there is none; a function in logits_processors can do it": "no_repeat_ngram_size "
    "allowed_token_ids",
    "it is called bad_words_ids in SamplingParams, which takes token ids": "bad_words",
    "there is none; json_schema, regex and grammar are such fields of SamplingParams": "ebnf "
    "guided_decoding structured_outputs response_format guided_json guided_regex guided_grammar",
    "there is none": "best_of num_beams use_beam_search length_penalty skip_special_tokens "
    "tensor_parallel_size tp_size pipeline_parallel_size swap_space cpu_offload_gb enable_lora",
}
OTHER_NAMES = {name: hint for hint, names in _HINTS.items() for name in names.split()}

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
