"""What a text must look like: a JSON schema, a regular expression or a Lark grammar, by llguidance.

Which tokens may come next is a function of a request's parameters and of the tokens before them.
llguidance limits what its lexer explores, and counts it for all that share a lexer: drafts,
neighbours, requests of before. So each completion has one of its own, only the total counts, and
where that is reached the committed tokens decide, read anew. Knows a tokenizer; no model, no
logits. llguidance is imported when a request asks for it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib.metadata import distributions
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from tokenizers import Tokenizer

from tinyspec.determinism.fingerprint import text_code
from tinyspec.determinism.fingerprint_parts import DIGEST, Parts, text_digest
from tinyspec.errors import refuse
from tinyspec.sampling_params import SamplingParams
from tinyspec.scheduler.sequence_table import Array
from tinyspec.structured.schemas import readable, readable_grammar

# What puts a space in front of a text, by its name in a tokenizer's JSON, and what does not.
IN_FRONT = {"prepend_scheme": "never", "add_prefix_space": False}
# Of one lexer, 1 to 2 kB each: the limit that tokens depend on.
MOST_STATES = 250_000


class Reader:
    """A matcher and the ``tokens`` that it has read. It makes the mask of every place, since what
    masks explore counts, and is never rolled back: the masks that follow may be of another text.

    eos: end tokens, which it does not read. Raises RuntimeError where llguidance gives up.
    """

    def __init__(self, matcher: Any, eos: list[int]):
        self._matcher, self._eos = matcher, eos
        self.tokens: list[int] = []
        self._known: tuple[bytes, bool] | None = None
        # A lexer that has given up reads nothing, which forced tokens do not tell.
        self._unread = matcher.deep_copy()

    def copy(self) -> Reader:
        """One that reads on by itself; what it explores counts for both."""
        self.next()
        other = copy(self)
        other._matcher, other.tokens = self._matcher.deep_copy(), [*self.tokens]
        return other

    def read(self, tokens: list[int], drafts: bool = False) -> list[int]:
        """Read on in ``tokens``, which begin with those read; those from the first that may not
        follow. drafts: those that the mask has, or they would explore what no text does."""
        for token in tokens[len(self.tokens) :]:
            mask, _ = self.next()
            allowed = token < 8 * len(mask) and mask[token // 8] >> token % 8 & 1
            if token in self._eos or (drafts and not allowed):
                break
            if not self._sound(self._matcher.try_consume_tokens([token])):
                if allowed:
                    raise RuntimeError(f"token {token} is allowed and not read")
                break
            self.tokens.append(token)
            self._known = None
        return tokens[len(self.tokens) :]

    def next(self) -> tuple[bytes, bool]:
        """A bit for each token, whether it may follow, and whether the text may end here."""
        if self._known is None:
            ends = bool(self._sound(self._matcher.is_accepting()))
            mask = self._sound(self._matcher.compute_bitmask())
            if self._unread.validate_tokens(self.tokens[:1]) < len(self.tokens[:1]):
                raise RuntimeError("its lexer reads no more")
            self._known = mask, ends
        return self._known

    def _sound(self, found: Any) -> Any:
        if self._matcher.is_error():
            raise RuntimeError(self._matcher.get_error().partition("\n<state>")[0])
        return found


@dataclass(eq=False)
class Grammar:
    """Says what may follow in one completion.

    matcher: makes one that has read nothing. readers: of ``kept`` completions at most, the latest
    used last: of each that of its committed tokens, and a copy that has read drafts, too. eos: end
    tokens, which follow a text that may end; stops: what ends the completion, these among them
    unless they are ignored.
    """

    matcher: Callable[[], Any]
    readers: WeakKeyDictionary[Grammar, list[Reader]]
    kept: int
    eos: list[int]
    stops: list[int]

    def _read(self, tokens: list[int], committed: int) -> tuple[Reader, list[int]]:
        """What has read ``tokens``, of which so many are committed and the others drafts, and those
        from the first that may not follow."""
        known, own = tokens[:committed], self.readers.pop(self, [])
        if not own or known[: len(own[0].tokens)] != own[0].tokens:
            own = [Reader(self.matcher(), self.eos)]
        reader, left = own[0], own[0].read(known)
        if len(tokens) > committed and not left:
            if not own[1:] or tokens[: len(own[1].tokens)] != own[1].tokens:
                own = [own[0], own[0].copy()]
            reader, left = own[1], own[1].read(tokens, drafts=True)
        reader.next()
        self.readers[self] = own
        while len(self.readers) > self.kept:
            del self.readers[next(iter(self.readers))]
        return reader, left

    def _reader(self, tokens: list[int], committed: int) -> tuple[Reader, list[int]]:
        """As ``_read``; by new readers where those there are have explored too much, which have
        been left out then."""
        with suppress(RuntimeError):
            return self._read(tokens, committed)
        return self._read(tokens, committed)

    def allowed(self, tokens: list[int], committed: int, size: int, early: bool = False) -> Array:
        """[size] bool: what may follow the generated ``tokens``, of which so many are committed:
        the stop tokens behind a complete text, and behind drafts that are none. early: no stop
        token, unless nothing else may follow.

        Raises RuntimeError where llguidance gives up, or committed tokens are no such text.
        """
        reader, left = self._reader(tokens, committed)
        allowed, (mask, ends) = np.zeros(size, np.bool_), reader.next()
        if left:
            if len(reader.tokens) < committed and not (ends and {*left} <= {*self.stops}):
                raise RuntimeError(f"token {left[0]} was taken and may not follow")
            allowed[self.stops] = True
            return allowed
        bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")[:size]
        allowed[: len(bits)] = bits  # a model's further tokens are none of the tokenizer's
        allowed[self.eos] = False
        allowed[self.stops] |= ends
        rest = allowed.copy()
        rest[self.stops] = False
        return rest if early and rest.any() else allowed

    def beginning(self, tokens: list[int], drafts: list[int]) -> list[int]:
        """Those of ``drafts`` up to the first that may not follow the committed ``tokens``; none
        where llguidance gives up, which the next row tells."""
        with suppress(RuntimeError):
            reader, _ = self._reader(tokens + drafts, len(tokens))
            return drafts[: max(0, len(reader.tokens) - len(tokens))]
        return []


class Grammars:
    """Compiles what requests ask for, over one tokenizer, or none; and what of that tokenizer their
    bits depend on. kept: completions whose matchers are kept."""

    def __init__(self, tokenizer: Any, kept: int = 256):
        self._tokenizer, self._kept = tokenizer, kept
        self._digest = lru_cache(maxsize=8)(lambda _, vocab: text_digest(tokenizer, vocab))
        self._vocabulary = lru_cache(maxsize=8)(lambda _, eos: vocabulary(tokenizer, eos))
        self._compiled = lru_cache(maxsize=64)(self._compile)
        self._readers: WeakKeyDictionary[Grammar, list[Reader]] = WeakKeyDictionary()

    def parts(self, params: SamplingParams, vocab_size: int) -> Parts:
        """What the fingerprint of a request has more where its tokens depend on the tokenizer."""
        if self._tokenizer is None:
            return {}
        state = state_of(self._tokenizer)
        found: Parts = {"tokenizer": DIGEST + self._digest(state, vocab_size)[:32]}
        if params.stop_strings:
            found["text"] = DIGEST + text_code()[:32]
        if params.structure is not None:
            found["spelling"] = DIGEST + self._vocabulary(state, params.eos_token_id)[1][:32]
            found["llguidance"] = next((d.version for d in distributions(name="llguidance")), None)
            found["max_lexer_states"] = MOST_STATES
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
            matcher = self._compiled(field, text, state_of(self._tokenizer), eos)
        except ImportError:
            hint = "none without llguidance: pip install 'tinyspec[structured]'"
            raise refuse(field, text, hint) from None
        except (RuntimeError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise refuse(field, text, f"what llguidance compiles ({reason})") from error
        return Grammar(matcher, self._readers, self._kept, [*eos], [*params.stop_ids])

    def _compile(
        self, field: str, text: str, state: tuple[Any, ...], eos: tuple[int, ...]
    ) -> Callable[[], Any]:
        """What makes matchers that have read nothing; a copy would share its lexer. Raises
        RuntimeError and ValueError; ImportError without llguidance."""
        from llguidance import LLMatcher, LLParserLimits

        read = getattr(LLMatcher, f"grammar_from_{'lark' if field == 'grammar' else field}")
        text = {"json_schema": readable, "grammar": readable_grammar}.get(field, str)(text)
        # Without limits of one step, for which drafts would have paid; more than these overflow.
        limits = LLParserLimits(
            step_lexer_fuel=2**62, step_max_items=2**62, max_lexer_states=MOST_STATES
        )
        known, _ = self._vocabulary(state, eos)
        matcher = partial(LLMatcher, known, read(text), log_level=0, limits=limits)
        Reader(matcher(), [*eos]).next()  # where some of what compiles gives up at once
        return matcher


def state_of(tokenizer: Any) -> tuple[Any, ...]:
    """By what a vocabulary is found again: one more token, or a special one, makes another."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    added = sorted(getattr(tokenizer, "added_tokens_decoder", {}).items())
    steps = (getattr(backend, name, None) for name in ("normalizer", "pre_tokenizer", "decoder"))
    return (getattr(tokenizer, "__len__", int)(), repr(added), *map(repr, steps))


def vocabulary(tokenizer: Any, eos: tuple[int, ...]) -> tuple[Any, str]:
    """llguidance's form of a tokenizer, and the digest of all that it spells by. Raises ValueError
    for one that it cannot read."""
    from llguidance import LLTokenizer, TokenizerWrapper

    own = Spelling(tokenizer, eos)
    return LLTokenizer(TokenizerWrapper(own), eos_token=[*eos] or None, slices=[]), own.digest


class Spelling:
    """A tokenizer as llguidance asks for one: the bytes of every token, and how it spells a text.

    llguidance's own form of a tokenizer spells with added tokens, as ``</think>`` in a string of
    JSON, which its reader takes for markup and refuses; so texts are spelled without these, as they
    are, and always in one way.
    """

    bos_token_id = None

    def __init__(self, tokenizer: Any, eos: tuple[int, ...]):
        import llguidance.hf

        known = llguidance.hf.from_tokenizer(tokenizer, eos_token=[*eos] or None, slices=[])
        ids = range(known.vocab_size)
        self.eos_token_id = known.eos_token
        self.tokens = [known.decode_bytes([token]) for token in ids]
        self.special_token_ids = [token for token in ids if known.is_special_token(token)]
        form = json.loads(tokenizer.backend_tokenizer.to_str())
        form |= dict.fromkeys(("padding", "truncation", "post_processor"))
        self.digest = hashlib.sha256(json.dumps(form, sort_keys=True).encode()).hexdigest()
        first, then = form["normalizer"] or {}, form["pre_tokenizer"] or {}
        # Others than these change a text.
        steps, own = first.get("normalizers", [first]), {"Replace", "ByteLevel"}
        kept = [step for step in steps if step.get("type") in own]
        form["normalizer"] = {"type": "Sequence", "normalizers": kept}
        for step in (then, *then.get("pretokenizers", ())):
            step |= {key: IN_FRONT[key] for key in IN_FRONT.keys() & step.keys()}
        form["model"] |= {"dropout": None} if "dropout" in form["model"] else {}
        self._tokenizer = Tokenizer.from_str(json.dumps({**form, "added_tokens": []}))

    def __call__(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)
