"""What a text must look like: a JSON schema, a regular expression or a Lark grammar, by llguidance.

Which tokens may come next is a function of a request's parameters and of the tokens of one
completion, drafts included. Knows a tokenizer; no model, no logits. llguidance is imported when a
request asks for it.
"""

from __future__ import annotations

from functools import lru_cache
from importlib.metadata import distributions
from typing import Any

import numpy as np

from tinyspec.determinism.fingerprint_parts import DIGEST, Parts, text_digest
from tinyspec.errors import refuse
from tinyspec.sampling_params import SamplingParams
from tinyspec.scheduler.sequence_table import Array

# Compiled grammars that are kept; each completion follows a copy of its own.
KEPT = 64


class Grammar:
    """Follows the tokens of one completion.

    matcher: llguidance's, which has read nothing. eos: end tokens, which follow a text that may
    end; stops: what ends the completion, these among them unless they are ignored.
    """

    def __init__(self, matcher: Any, eos: tuple[int, ...], stops: tuple[int, ...]):
        self._fresh, self._matcher = matcher, matcher.deep_copy()
        self._eos, self._stops = [*eos], [*stops]
        self._tokens: list[int] = []

    def _read(self, tokens: list[int]) -> bool:
        """Go on behind ``tokens``, back to where they part from those read so far; whether all of
        them may follow each other: it stops behind those that may."""
        if self._matcher.is_error():  # which it stays
            self._matcher, self._tokens = self._fresh.deep_copy(), []
        read = self._tokens
        if tokens[: len(read)] != read:
            pairs = zip(read, tokens, strict=False)
            parted = (n for n, (one, other) in enumerate(pairs) if one != other)
            read = read[: next(parted, len(tokens))]
            self._matcher.rollback(len(self._tokens) - len(read))
        count = self._matcher.try_consume_tokens(tokens[len(read) :])
        self._tokens = tokens[: len(read) + count]
        return len(self._tokens) == len(tokens)

    def allowed(self, tokens: list[int], size: int, early: bool = False) -> Array:
        """[size] bool: what may follow the generated ``tokens``. Where nothing else may, as behind
        a text that is complete, or that is none, the stop tokens. early: no stop token, unless
        nothing else may follow.

        Raises RuntimeError where llguidance gives up.
        """
        found = np.zeros(size, np.bool_)
        if self._read(tokens):
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            known = np.unpackbits(bits, bitorder="little")[:size]
            found[: len(known)] = known  # a model's further tokens are none of the tokenizer's
            found[self._eos] = False
            found[self._stops] |= self._matcher.is_accepting()
        if self._matcher.is_error():
            raise RuntimeError(self._matcher.get_error().partition("\n")[0])
        if early:
            found[self._stops] = False
        if not found.any():
            found[self._stops] = True
        return found

    def beginning(self, tokens: list[int], drafts: list[int]) -> list[int]:
        """Those of ``drafts`` up to the first that may not follow ``tokens``."""
        read = self._read(tokens)
        return drafts[: self._matcher.validate_tokens(drafts)] if read else []


class Grammars:
    """Compiles what requests ask for, over one tokenizer, or none; and what of that tokenizer their
    bits depend on."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._digest = lru_cache(maxsize=8)(lambda _, vocab: text_digest(tokenizer, vocab))
        self._vocabulary = lru_cache(maxsize=8)(self._vocabulary_of)
        self._matcher = lru_cache(maxsize=KEPT)(self._compiled)

    @property
    def _size(self) -> int:
        """Tokens that the tokenizer has now."""
        return len(self._tokenizer) if hasattr(self._tokenizer, "__len__") else 0

    def parts(self, params: SamplingParams, vocab_size: int) -> Parts:
        """What the fingerprint of a request has more where its tokens depend on the tokenizer."""
        found: Parts = {}
        if self._tokenizer is not None:
            found["tokenizer"] = DIGEST + self._digest(self._size, vocab_size)[:32]
        if params.structure is not None:
            found["llguidance"] = next((d.version for d in distributions(name="llguidance")), None)
        return found

    def of(self, params: SamplingParams) -> Grammar | None:
        """For one completion; None where any text will do. params: end tokens resolved.

        Raises ValueError naming the field for what does not compile, or cannot be served here.
        """
        if params.structure is None:
            return None
        field, text = params.structure
        eos: tuple[int, ...] = params.eos_token_id  # type: ignore[assignment]
        if self._tokenizer is None:
            raise refuse(field, text, "none without a tokenizer")
        if not params.stop_ids:
            raise refuse(field, text, "none without an end token (eos_token_id, ignore_eos)")
        try:
            return Grammar(self._matcher(field, text, self._size, eos), eos, params.stop_ids)
        except ImportError:
            hint = "none without llguidance: pip install 'tinyspec[structured]'"
            raise refuse(field, text, hint) from None
        except ValueError as error:
            reason = " ".join(str(error).split())
            raise refuse(field, text, f"what llguidance compiles ({reason})") from error

    def _vocabulary_of(self, size: int, eos: tuple[int, ...]) -> Any:
        """llguidance's form of the tokenizer."""
        import llguidance.hf

        return llguidance.hf.from_tokenizer(self._tokenizer, eos_token=[*eos] or None)

    def _compiled(self, field: str, text: str, size: int, eos: tuple[int, ...]) -> Any:
        """A matcher that has read nothing. Raises ValueError; ImportError without llguidance."""
        from llguidance import LLMatcher

        read = getattr(LLMatcher, f"grammar_from_{'lark' if field == 'grammar' else field}")
        matcher = LLMatcher(self._vocabulary(size, eos), read(text), log_level=0)
        tried = matcher.deep_copy()
        tried.compute_bitmask()  # where some of what compiles gives up at once
        if tried.is_error():
            raise ValueError(tried.get_error().partition("\n<state>")[0])
        return matcher
