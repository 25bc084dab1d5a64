"""A tokenizer of whole words: of a task's sentences, and of nothing else."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD, END, UNKNOWN = "<pad>", "<eos>", "<unk>"


def word_tokenizer(words: Iterable[str]) -> PreTrainedTokenizerFast:
    """Token ids in the order of ``words``, behind the pad, the end and the unknown token. Marks
    such as full stops are words of their own."""
    names = list(dict.fromkeys((PAD, END, UNKNOWN, *words)))
    vocabulary = {name: index for index, name in enumerate(names)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    marks = pre_tokenizers.Split(Regex(r"[.,?:]"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), marks])
    # No word begins with the prefix, so all are joined by spaces; marks lose theirs.
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, unk_token=UNKNOWN
    )
