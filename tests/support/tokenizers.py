"""Small tokenizers of the kinds that checkpoints have: bytes with markup, and pieces that begin
with a space."""

from functools import cache

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import PreTrainedTokenizerFast

MARKUP = ("<tool_call>", "</tool_call>", "<think>", "</think>")
CHAT = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEXT = '{"name": "get_weather", "arguments": {"city": "Paris"}}\n<tool_call> the think a b'


def _added(tokenizer, texts, special):
    tokenizer.add_tokens([AddedToken(x, special=special, normalized=False) for x in texts])


def byte_level(special, in_front=False):
    """As Qwen's: bytes, ChatML, and markup that is ``special`` or not. in_front: a space before
    every text, which is spelled at random."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=in_front)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=sorted(alphabet))
    tokenizer.train_from_iterator([TEXT] * 5, trainer)
    tokenizer.model.dropout = 0.5 if in_front else None
    _added(tokenizer, CHAT, True)
    _added(tokenizer, (*MARKUP, "    "), special)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")


def pieces(scheme=None):
    """As Llama-2's: a normalizer puts a space in front; or Metaspace does, by ``scheme``."""
    known = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = '▁abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789{}":,.<>_|/[]'
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "a"), ("{", '"'), ('"', ":")]
    vocabulary = {x: n for n, x in enumerate([*known, *letters, *map("".join, merges)])}
    options = {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, **options))
    if scheme is None:
        steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        tokenizer.normalizer = normalizers.Sequence(steps)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    _added(tokenizer, ("<unk>", "<s>", "</s>"), True)
    _added(tokenizer, MARKUP[:2], False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


KINDS = {
    "markup": lambda: byte_level(False),
    "special markup": lambda: byte_level(True),
    "space in front": lambda: byte_level(True, in_front=True),
    "pieces": pieces,
    "metaspace": lambda: pieces("always"),
}


@cache
def tokenizer_of(kind):
    """One of ``KINDS``."""
    return KINDS[kind]()
