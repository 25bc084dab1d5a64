"""The bundled model's tokenizer: byte-level BPE over the stories, every digit one token.

Knows the special tokens and the chat template, which must write what `stories.chat_prompt` writes.
Does not know the model.
"""

import random

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from benchmarks.storyteller import questions as stories

PAD = "<|pad|>"
VOCAB_SIZE = 896
MAX_LENGTH = 2048
NUM_DOCUMENTS = 8000
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}User: {{ message['content'] }}\n"
    "{% elif message['role'] == 'assistant' %}"
    "Assistant: {{ message['content'] }}{{ eos_token }}\n"
    "{% else %}{{ message['content'] }}\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)


def make_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """A tokenizer of exactly `VOCAB_SIZE` tokens; it adds no token of its own to a text.

    `<|end|>` ends an answer and, as in GPT-2, is also the token to begin from.
    """
    rng = random.Random(f"tokenizer {seed}")
    texts = (
        "".join(piece for piece, _ in stories.document(rng)).replace(stories.END, "")
        for _ in range(NUM_DOCUMENTS)
    )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(token, special=True) for token in (stories.END, PAD)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=stories.END,
        eos_token=stories.END,
        pad_token=PAD,
        padding_side="left",
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
