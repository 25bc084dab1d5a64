"""SamplingParams: the settings of one request.

Knows nothing of the model: what depends on it (token ids in range, lengths that fit, a tokenizer
for stop strings) is checked when the request is added.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from tinyspec.errors import refuse, refuse_other_names
from tinyspec.scalars import plain, plain_list

LOGPROBS_MODES = ("processed", "raw")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _token_ids(field: str, value: Any) -> tuple[int, ...]:
    """One id or several, as a tuple."""
    several = isinstance(value, Iterable)
    ids = (value,) if _is_int(value) else tuple(plain_list(value)) if several else (None,)
    if not all(_is_int(i) and i >= 0 for i in ids):
        raise refuse(field, value, "token ids, integers of at least 0")
    return ids


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is sampled. Names follow transformers' ``GenerationConfig`` where it has one.

    max_new_tokens, min_new_tokens: bounds on the tokens generated; before ``min_new_tokens`` no
        stop token is sampled. max_new_tokens=None: what fits into ``max_model_len`` and the page
        pool, which the output records.
    temperature: 0 is greedy. top_k (0: off), top_p (1: off, 0: the likeliest alone) and min_p
        (0: off) filter in this order.
    repetition_penalty: divides positive and multiplies negative logits of tokens already seen.
    seed: makes a sampled request repeatable; None draws one, which the output records.
    deterministic: the same tokens and log-probabilities, bit for bit, whatever else runs.
    num_return_sequences: completions of the prompt; each is as if it had been asked for alone.
    eos_token_id: None takes the model's. ignore_eos: run to ``max_new_tokens``.
    stop_strings, stop_token_ids: further stops; the output includes them. include_stop_str: False
        ends the text before the stop string, tokens stay; events show no part of it.
    logprobs: the chosen token's log-probability. top_logprobs: also those of so many best tokens.
    prompt_logprobs: log-probability of every prompt token but the first.
    logprobs_mode: of the distribution sampled from ("processed") or of the model's own ("raw").
    logits_processors: called as ``f(input_ids [1, L], scores [1, V]) -> scores`` once per committed
        position, in order; one that declares ``stateless = True`` may be called for drafts too.
    stopping_criteria: called as ``f(input_ids [1, L], None)`` after every committed token.
    thinking: read the prompt with thoughts, by a model that has learnt to (``ThinkingModel``).

    Numbers may be numpy's, or tensors without dimensions. Raises ValueError naming the field, its
    value and what is allowed.
    """

    max_new_tokens: int | None = 128
    min_new_tokens: int = 0
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    seed: int | None = None
    deterministic: bool = False
    num_return_sequences: int = 1
    eos_token_id: int | Sequence[int] | None = None
    ignore_eos: bool = False
    stop_strings: str | Sequence[str] = ()
    stop_token_ids: int | Sequence[int] = ()
    logprobs: bool = False
    top_logprobs: int = 0
    prompt_logprobs: bool = False
    logprobs_mode: str = "processed"
    logits_processors: Sequence[Callable[..., Any]] = ()
    stopping_criteria: Sequence[Callable[..., Any]] = ()
    thinking: bool = False
    include_stop_str: bool = True

    def __new__(cls, **given: Any) -> SamplingParams:
        refuse_other_names(given)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if (own := plain(value)) is not value:
                self._set(field.name, own)
        self._check_numbers()
        self._check_choices()
        self._check_lists()

    def _check_numbers(self) -> None:
        def number(field: str, allowed: str, ok: Callable[[float], bool]) -> None:
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise refuse(field, value, allowed)
            # An integer may be finite and too large for a float.
            if not (abs(value) <= sys.float_info.max and ok(value)):
                raise refuse(field, value, allowed)

        def integer(field: str, least: int, more: str = "") -> None:
            value = getattr(self, field)
            if not _is_int(value) or not least <= value < 2**63:
                raise refuse(field, value, f"an integer of at least {least}, below 2**63{more}")

        if self.max_new_tokens is not None:
            integer("max_new_tokens", 1)
        integer("min_new_tokens", 0)
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            allowed = f"at most max_new_tokens={self.max_new_tokens}"
            raise refuse("min_new_tokens", self.min_new_tokens, allowed)
        allowed = "0 (greedy) or a finite number of at least 1e-6"
        number("temperature", allowed, lambda x: x == 0 or x >= 1e-6)
        number("repetition_penalty", "a finite number above 0", lambda x: x > 0)
        if self.top_k is not None:
            integer("top_k", 0, " (0 and None: off)")
        if self.top_p is not None:
            number("top_p", "a number in [0, 1]", lambda x: 0 <= x <= 1)
        if self.min_p is not None:
            number("min_p", "a number in [0, 1]", lambda x: 0 <= x <= 1)
        if self.seed is not None and not (_is_int(self.seed) and 0 <= self.seed < 2**64):
            raise refuse("seed", self.seed, "None or an integer in [0, 2**64)")
        integer("num_return_sequences", 1)
        integer("top_logprobs", 0)

    def _check_choices(self) -> None:
        switches = ("deterministic", "ignore_eos", "logprobs", "prompt_logprobs", "thinking")
        for field in (*switches, "include_stop_str"):
            if not isinstance(getattr(self, field), bool):
                also = "; top_logprobs takes a number" if field == "logprobs" else ""
                raise refuse(field, getattr(self, field), f"True or False{also}")
        if self.logprobs_mode not in LOGPROBS_MODES:
            raise refuse("logprobs_mode", self.logprobs_mode, f"one of {LOGPROBS_MODES}")

    def _check_lists(self) -> None:
        """Checks what may be one value or several, and makes tuples of it."""
        if self.eos_token_id is not None:
            self._set("eos_token_id", _token_ids("eos_token_id", self.eos_token_id))
        self._set("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        strings = (self.stop_strings,) if isinstance(self.stop_strings, str) else self.stop_strings
        if not isinstance(strings, Iterable) or not all(isinstance(s, str) and s for s in strings):
            raise refuse("stop_strings", self.stop_strings, "strings that are not empty")
        if any("\ud800" <= letter <= "\udfff" for stop in strings for letter in stop):
            raise refuse("stop_strings", self.stop_strings, "strings without lone surrogates")
        self._set("stop_strings", tuple(strings))
        for field in ("logits_processors", "stopping_criteria"):
            functions = getattr(self, field)
            if not isinstance(functions, Iterable):
                raise refuse(field, functions, "a list of functions")
            self._set(field, tuple(functions))

    def _set(self, field: str, value: object) -> None:
        object.__setattr__(self, field, value)

    @property
    def most_new_tokens(self) -> int:
        """``max_new_tokens``, once it is resolved."""
        assert self.max_new_tokens is not None
        return self.max_new_tokens

    @cached_property
    def eos_ids(self) -> tuple[int, ...]:
        """The EOS tokens that end the request, once ``eos_token_id`` is resolved."""
        return () if self.ignore_eos else tuple(self.eos_token_id or ())  # type: ignore[arg-type]

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """All tokens that do."""
        return (*self.eos_ids, *self.stop_token_ids)  # type: ignore[misc]

    @property
    def hidden_stops(self) -> tuple[str, ...]:
        """The stop strings that texts do not show."""
        return () if self.include_stop_str else tuple(self.stop_strings)

    @cached_property
    def filtered(self) -> bool:
        """Whether top-k, top-p or min-p filters the logits."""
        return self.temperature > 0 and bool(
            self.top_k or self.min_p or (self.top_p is not None and self.top_p < 1)
        )

    @cached_property
    def draftable(self) -> bool:
        """Whether every logits processor may be called for tokens that are not committed."""
        return all(getattr(p, "stateless", False) for p in self.logits_processors)

    @cached_property
    def needs_history(self) -> bool:
        """Whether sampling depends on the tokens before."""
        return self.repetition_penalty != 1.0 or bool(self.logits_processors)

    @cached_property
    def checks_text(self) -> bool:
        """Whether more than token ids and their number can end it, or is kept of its tokens."""
        return bool(self.stop_strings or self.stopping_criteria or self.top_logprobs)

    @property
    def needs_tokenizer(self) -> bool:
        """Whether tokens that are promised depend on the tokenizer."""
        return self.deterministic and bool(self.stop_strings)

    def resolve(self, **changes: Any) -> SamplingParams:
        """With the model's defaults filled in: a copy, where they change anything."""
        new = {name: value for name, value in changes.items() if getattr(self, name) is not value}
        return replace(self, **new) if new else self

    def to_dict(self) -> dict[str, Any]:
        """Plain data; user functions are given by name."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        for field in ("logits_processors", "stopping_criteria"):
            plain[field] = [
                f if isinstance(f, str) else getattr(f, "__qualname__", type(f).__qualname__)
                for f in plain[field]
            ]
        return plain

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> SamplingParams:
        """The inverse of ``to_dict``; user functions stay names, which cannot be run again."""
        return cls(**data)
