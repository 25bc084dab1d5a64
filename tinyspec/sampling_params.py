"""SamplingParams: the settings of one request.

Knows nothing of the model: what depends on it (token ids in range, lengths that fit, a tokenizer
for stop strings) is checked when the request is added.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from tinyspec.errors import named, refuse
from tinyspec.scalars import (
    Settings,
    integers,
    is_finite,
    is_int,
    numbers,
    one_of,
    plain,
    plain_list,
    setting,
    switch,
)

LOGPROBS_MODES = ("processed", "raw")
# What a text must look like, in one of several forms.
STRUCTURES = ("json_schema", "regex", "grammar")


def _token_ids(field: str, value: Any) -> tuple[int, ...]:
    """One id or several, as a tuple."""
    several = isinstance(value, Iterable)
    ids = (value,) if is_int(value) else tuple(plain_list(value)) if several else (None,)
    if not all(is_int(i) and i >= 0 for i in ids):
        raise refuse(field, value, "token ids, integers of at least 0")
    return ids


def _words(field: str, value: Any) -> tuple[tuple[int, ...], ...]:
    """Token ids of each of several words."""
    words = value if isinstance(value, Iterable) else [None]
    ids = [tuple(plain_list(word)) if isinstance(word, Iterable) else () for word in words]
    if not all(word and all(is_int(i) and i >= 0 for i in word) for word in ids):
        raise refuse(field, value, "lists of one token id or more each, integers of at least 0")
    return tuple(ids)


def _biases(field: str, value: Any) -> dict[int, float]:
    """A number for each token id; JSON writes ids as strings."""
    found = {}
    for token, bias in value.items() if isinstance(value, Mapping) else [(None, None)]:
        token, bias = plain(token), plain(bias)
        if isinstance(token, str) and token.isdecimal():
            token = int(token)
        if not (is_int(token) and token >= 0 and is_finite(bias)):
            raise refuse(field, value, "finite numbers by token ids, integers of at least 0")
        found[token] = bias
    return found


def _strings(field: str, value: Any) -> tuple[str, ...]:
    """One string or several, as a tuple."""
    strings = (value,) if isinstance(value, str) else value
    if not isinstance(strings, Iterable) or not all(isinstance(s, str) and s for s in strings):
        raise refuse(field, value, "strings that are not empty")
    if any("\ud800" <= letter <= "\udfff" for text in strings for letter in text):
        raise refuse(field, value, "strings without lone surrogates")
    return tuple(strings)


def _functions(field: str, value: Any) -> Any:
    """Functions, as a tuple; or one that makes processors."""
    if isinstance(value, Iterable):
        return tuple(value)
    if field == "stopping_criteria" or not callable(value):
        raise refuse(field, value, "a list of functions")
    return value


def _text(field: str, value: Any) -> str:
    """A text; of a JSON schema also what JSON makes one of."""
    if isinstance(value, Mapping) and field == "json_schema":
        try:
            return json.dumps(dict(value))
        except (TypeError, ValueError, RecursionError) as error:
            raise refuse(field, value, f"what JSON can hold ({error})") from None
    if not isinstance(value, str):
        raise refuse(field, value, "a str")
    return value


_SHARE = numbers("a number in [0, 1]", lambda x: 0 <= x <= 1)
_FINITE = numbers("a finite number", lambda _: True)
_POSITIVE = numbers("a finite number above 0", lambda x: x > 0)
# Temperatures above 0 as fp32, which logits are divided in, has the least and its largest number.
COLDEST, HOTTEST = 9.999999974752427e-07, 3.4028234663852886e38
TEMPERATURES = "0 (greedy) or a number from 1e-6 to 3.4e38, the largest of fp32"
_TEMPERATURE = numbers(TEMPERATURES, lambda x: x == 0 or COLDEST <= x <= HOTTEST)


@dataclass(frozen=True, kw_only=True)
class SamplingParams(Settings):
    """How one request is sampled. Names follow transformers' ``GenerationConfig`` where it has one.

    deterministic: the same tokens and log-probabilities, bit for bit, whatever else runs.
    max_new_tokens: most tokens that are generated (default: 128). None: what ``max_model_len``
        leaves, which the output records.
    min_new_tokens: no stop token is sampled before, and stop strings that end before do not count.
    temperature: 0 (default) is greedy.
    top_k: sample from so many of the likeliest. 0: off. It filters before top_p, and that before
        min_p.
    top_p: sample from the likeliest that have so much together. 1: off; 0: the likeliest alone.
    min_p: sample from those with so much of the likeliest's probability. 0: off.
    repetition_penalty: divides positive logits of tokens already seen, and multiplies negative ones
        (default: 1, none).
    frequency_penalty: subtracted from logits of generated tokens, as often as each was. OpenAI's
        meaning, as of presence_penalty: the prompt does not count.
    presence_penalty: subtracted from logits of generated tokens, once each.
    logit_bias: added to the logits of token ids, as {"5": 2.5}.
    bad_words_ids: token ids that may not follow each other, as [[5], [6, 7]]. The last one is
        excluded where the others precede it; one that is a single end token is ignored.
    allowed_token_ids: no other token is sampled, be it an end token. Empty: any may be.
    json_schema: the text must be JSON of this schema. A dict, or its JSON; one of json_schema,
        regex and grammar at most: only tokens that lead to such a text are left; the end tokens
        once it is complete. Whole texts match, from their first character. Needs a tokenizer and
        the extra "structured"; drafts are made under the same rule. Laid out as {"a": [1, 2]},
        unless the schema has an ``x-guidance`` of llguidance's.
    regex: the whole text must match it.
    grammar: the text must be one of this Lark grammar. As llguidance reads it.
    seed: makes a sampled request repeatable. None draws one, which the output records.
    num_return_sequences: completions of the prompt. Each is as if it had been asked for alone.
    eos_token_id: ends a completion, instead of the model's.
    ignore_eos: run to max_new_tokens.
    stop_strings: ends a completion, which includes it.
    stop_token_ids: ends a completion, which includes it.
    include_stop_str: whether the text has the stop string. False ends the text before it, tokens
        stay; events show no part of it.
    logprobs: log-probabilities of the chosen tokens.
    top_logprobs: log-probabilities of so many best tokens too.
    prompt_logprobs: log-probabilities of the prompt's tokens but the first.
    logprobs_mode: of the distribution sampled from ("processed"), or of the model's own ("raw").
    thinking: read the prompt with thoughts, by a model that has learnt to (``ThinkingModel``).
    logits_processors: called as ``f(input_ids [1, L], scores [1, V]) -> scores`` once per committed
        position, in order; one that declares ``stateless = True`` may be called for drafts too. All
        completions that a list is given for share what is in it: an object that keeps state would
        mix them up. A function without arguments in place of the list is called once for each
        completion, and makes a list of its own.
    stopping_criteria: called as ``f(input_ids [1, L], None)`` after every committed token.

    Logits are changed before temperature in this order, which is transformers' where it has one:
    logit_bias, repetition_penalty, frequency_penalty and presence_penalty, bad_words_ids,
    allowed_token_ids, min_new_tokens, json_schema or regex or grammar, logits_processors. Numbers
    may be numpy's, or tensors without dimensions. The command line has an option for each field but
    functions, with the first sentence of its text above.

    Raises ValueError naming the field, its value and what is allowed.
    """

    max_new_tokens: int | None = setting(128, integers(1))
    min_new_tokens: int = setting(0, integers(0))
    temperature: float = setting(0.0, _TEMPERATURE)
    top_k: int | None = setting(None, integers(0, " (0 and None: off)"))
    top_p: float | None = setting(None, _SHARE)
    min_p: float | None = setting(None, _SHARE)
    logit_bias: Mapping[int, float] | None = setting(None, _biases, hash=False)
    repetition_penalty: float = setting(1.0, _POSITIVE)
    frequency_penalty: float = setting(0.0, _FINITE)
    presence_penalty: float = setting(0.0, _FINITE)
    bad_words_ids: Sequence[Sequence[int]] | None = setting(None, _words)
    allowed_token_ids: int | Sequence[int] = setting((), _token_ids)
    json_schema: str | Mapping[str, Any] | None = setting(None, _text)
    regex: str | None = setting(None, _text)
    grammar: str | None = setting(None, _text)
    seed: int | None = setting(None, integers(0, ", or None", bits=64))
    deterministic: bool = setting(False, switch())
    num_return_sequences: int = setting(1, integers(1))
    eos_token_id: int | Sequence[int] | None = setting(None, _token_ids)
    ignore_eos: bool = setting(False, switch())
    stop_strings: str | Sequence[str] = setting((), _strings)
    stop_token_ids: int | Sequence[int] = setting((), _token_ids)
    logprobs: bool = setting(False, switch("; top_logprobs takes a number"))
    top_logprobs: int = setting(0, integers(0))
    prompt_logprobs: bool = setting(False, switch())
    logprobs_mode: str = setting("processed", one_of(LOGPROBS_MODES))
    logits_processors: Sequence[Callable[..., Any]] | Callable[[], Sequence[Any]] = setting(
        (), _functions
    )
    stopping_criteria: Sequence[Callable[..., Any]] = setting((), _functions)
    thinking: bool = setting(False, switch())
    include_stop_str: bool = setting(True, switch())

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            allowed = f"at most max_new_tokens={self.max_new_tokens}"
            raise refuse("min_new_tokens", self.min_new_tokens, allowed)
        given = [field for field in STRUCTURES if getattr(self, field) is not None]
        if len(given) > 1:
            raise refuse(given[1], getattr(self, given[1]), f"left out beside {given[0]}")

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
        return all(getattr(p, "stateless", False) for p in self.functions["logits_processors"])

    @cached_property
    def functions(self) -> dict[str, tuple[Callable[..., Any], ...]]:
        """The user's, by field; one that makes processors stands for them."""
        processors, criteria = self.logits_processors, self.stopping_criteria
        own = (processors,) if callable(processors) else tuple(processors)
        return {"logits_processors": own, "stopping_criteria": tuple(criteria)}

    @cached_property
    def changes_logits(self) -> bool:
        """Whether logits are changed before temperature, nearly always by the tokens before."""
        penalties = self.repetition_penalty != 1.0, self.frequency_penalty, self.presence_penalty
        named = self.logit_bias, self.bad_words_ids, self.allowed_token_ids, self.structure
        return any((*penalties, *named, self.logits_processors))

    @cached_property
    def structure(self) -> tuple[str, str] | None:
        """The field that says what its text must look like, and its value."""
        given = [(field, getattr(self, field)) for field in STRUCTURES]
        return next((each for each in given if each[1] is not None), None)

    @cached_property
    def checks_text(self) -> bool:
        """Whether more than token ids and their number can end it, or is kept of its tokens."""
        return bool(self.stop_strings or self.stopping_criteria or self.top_logprobs)

    @property
    def needs_tokenizer(self) -> bool:
        """Whether tokens that are promised depend on the tokenizer."""
        return self.deterministic and bool(self.stop_strings or self.structure)

    def resolve(self, **changes: Any) -> SamplingParams:
        """With the model's defaults filled in: a copy, where they change anything."""
        new = {name: value for name, value in changes.items() if getattr(self, name) is not value}
        return replace(self, **new) if new else self

    def of_one(self) -> SamplingParams:
        """For one completion: with processors of its own, if a function makes them.

        Raises ValueError where that fails.
        """
        if not callable(make := self.logits_processors):
            return self
        try:
            own = [*make()]
            if not all(map(callable, own)):
                raise TypeError(f"it made {own}")
        except Exception as error:
            allowed = f"a function that makes a list of functions ({named(error)})"
            raise refuse("logits_processors", make, allowed) from error
        return self.resolve(logits_processors=own)

    def to_dict(self) -> dict[str, Any]:
        """Plain data; user functions are given by name."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        for field, functions in self.functions.items():
            plain[field] = [
                f if isinstance(f, str) else getattr(f, "__qualname__", type(f).__qualname__)
                for f in functions
            ]
        return plain

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> SamplingParams:
        """The inverse of ``to_dict``; user functions stay names, which cannot be run again."""
        return cls(**data)
