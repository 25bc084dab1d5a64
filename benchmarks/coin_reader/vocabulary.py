"""A tokenizer of whole words: of a task's sentences, and of nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD, END, UNKNOWN = "<pad>", "<eos>", "<unk>"
# Stands for every capitalised word that is not in a vocabulary which has it.
NAME = "<name>"


def word_tokenizer(words: Iterable[str]) -> PreTrainedTokenizerFast:
    """Token ids in the order of ``words``, behind the pad, the end and the unknown token. Marks
    such as full stops are words of their own."""
    names = list(dict.fromkeys((PAD, END, UNKNOWN, *words)))
    vocabulary = {name: index for index, name in enumerate(names)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    if NAME in vocabulary:
        known = "|".join(re.escape(name) for name in names if name[0].isalpha())
        # HEADS is a word in other letters, and no name.
        other = rf"(?<![\p{{L}}'])(?!(?i:{known})(?![\p{{L}}'-]))\p{{Lu}}[\p{{L}}'-]*"
        apostrophe = normalizers.Replace("\N{RIGHT SINGLE QUOTATION MARK}", "'")
        tokenizer.normalizer = normalizers.Sequence(
            [apostrophe, normalizers.Replace(Regex(other), NAME)]
        )
    marks = pre_tokenizers.Split(Regex(r"[.,;!?:]"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), marks])
    # No word begins with the prefix, so all are joined by spaces; marks lose theirs.
    tokenizer.decoder = decoders.Sequence(
        [decoders.WordPiece(prefix="##", cleanup=True), decoders.Replace(" :", ":")]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, unk_token=UNKNOWN
    )
