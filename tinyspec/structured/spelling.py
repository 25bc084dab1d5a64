"""What llguidance is told of a tokenizer: the bytes of every token, and how it spells a text.

Its own form of a tokenizer spells with added tokens, as ``</think>`` in a string of JSON, which its
reader takes for markup and refuses; so texts are spelled without these, as they are, and always in
one way. Knows no grammar and no request.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from tokenizers import Tokenizer

# What puts a space in front of a text, by its name in a tokenizer's JSON, and what does not.
IN_FRONT = {"prepend_scheme": "never", "add_prefix_space": False}


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
    """A tokenizer as llguidance asks for one."""

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
