"""The parts of a fingerprint: short values by name, which outputs carry and people read.

Knows neither models nor devices, and imports no library.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

Parts = dict[str, str | int | bool | None]
# Characters of a part, so that all of them take 2 KB at most; longer ones are digests.
LONGEST = 72
DIGEST = "sha256 "
PLAIN = (str, int, bool, type(None))


@dataclass(frozen=True)
class Fingerprint:
    """Readable parts, and the digest of exactly these."""

    parts: Parts

    @cached_property
    def digest(self) -> str:
        """32 hexadecimal digits."""
        return digest_of(self.parts)

    def with_tokenizer(self, parts: Parts | None) -> Fingerprint:
        """Of a request whose tokens depend on the tokenizer, with its parts; None: on none."""
        return Fingerprint({**self.parts, **parts}) if parts else self


def digest_of(parts: Parts) -> str:
    """32 hexadecimal digits; other parts, in value or type, have others. Their order does not
    count."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def shortened(parts: dict[str, Any]) -> Parts:
    """``parts`` with lists and objects as JSON, and what is long as a digest."""
    found: Parts = {}
    for name, value in parts.items():
        text = json.dumps(value, sort_keys=True)
        if len(text) > LONGEST:
            found[name] = DIGEST + hashlib.sha256(text.encode()).hexdigest()[:32]
        else:
            found[name] = value if type(value) in PLAIN else text
    return found


def are_parts(value: Any) -> bool:
    """Whether a value, which may come from anywhere, has the form of parts."""
    return type(value) is dict and all(
        type(name) is str and type(part) in PLAIN for name, part in value.items()
    )


def differences(one: Parts, other: Parts) -> list[str]:
    """What is not the same in two fingerprints: "threads 2 -> 1"; what is known by its digest alone
    comes last, as its name."""
    found, by_digest = [], []
    for name in {**one, **other}:
        values = [parts.get(name, "(absent)") for parts in (one, other)]
        if json.dumps(values[0]) == json.dumps(values[1]):
            continue
        if any(str(value).startswith(DIGEST) for value in values):
            by_digest.append(name)
        else:
            found.append(f"{name} {values[0]} -> {values[1]}")
    return found + by_digest


def explained(one: Any, other: Parts) -> str:
    """Those differences in a line; empty where an output carries no parts. one: of the output."""
    return ", ".join(differences(one, other)) if are_parts(one) else ""


def text_digest(tokenizer: Any, vocab_size: int) -> str:
    """Digest of what stop strings see: the text of every token, alone and after the others.

    Bytes of one character have the same text alone, and settings may enter the text of several
    tokens only: so vocabulary, class, decoder and clean-up count as well, where there are any.
    """

    def text(token_ids: list[int]) -> str:
        try:
            return str(tokenizer.decode(token_ids, skip_special_tokens=False))
        except Exception as error:  # of an id beyond the tokenizer's
            return type(error).__name__

    kind, ids = type(tokenizer), list(range(vocab_size))
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    cleans_up = getattr(tokenizer, "clean_up_tokenization_spaces", None)
    tokens = sorted(tokenizer.get_vocab().items()) if hasattr(tokenizer, "get_vocab") else None
    found = (kind.__module__, kind.__qualname__, repr(decoder), cleans_up, tokens)
    texts = [text(ids), *(text([token]) for token in ids)]
    return hashlib.sha256(repr((found, texts)).encode()).hexdigest()
