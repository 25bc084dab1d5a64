"""Thinking models with random weights, of which T thinks about some chunks and not about others."""

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from tests.support.mixes import bits
from tinyspec import Engine, EngineConfig, RequestOutput, SamplingParams
from tinyspec.thinking.config import ThinkingConfig
from tinyspec.thinking.model import ThinkingModel

END, VOCAB = 1, 64
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
KINDS = {
    "llama": {},
    "qwen3": {"head_dim": 16},
    "gemma3_text": {"head_dim": 16, "sliding_window": 16, "sliding_window_pattern": 2},
    "mistral": {"sliding_window": 16},
}
# Of these the thinking model alone is tried, not what an engine does with it.
MORE_KINDS = {"qwen2": {}}


def backbone(kind: str) -> PreTrainedModel:
    """Of a kind, with weights as they are drawn."""
    more = {**KINDS, **MORE_KINDS}[kind]
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES, **more))


# Added to the logit of T's end token: about half of the thoughts are trivial; all are.
SOME, NONE = 3.0, 1e4


def thinking_model(
    kind: str = "llama", quiet: float = SOME, biased: bool = True, **fields: int
) -> ThinkingModel:
    """A new one; the same weights for the same arguments. Without ``biased`` T nearly always
    thinks, and the model can be loaded once it was saved."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = ThinkingConfig(**{"end_token_id": END, "max_thought_tokens": 4, **fields})
        model = ThinkingModel.from_backbone(backbone(kind), config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0.0, 0.15)
    head = model.thinking.head
    if biased:
        other = nn.Linear(head.in_features, head.out_features)
        with torch.no_grad():
            other.weight.copy_(head.weight)
            other.bias.zero_()
            other.bias[END] = quiet
        model.thinking.head = other.eval()
    return model


def tokenizer() -> PreTrainedTokenizerFast:
    """A word for every token."""
    words = WordLevel({f"w{n}": n for n in range(VOCAB)}, unk_token="w0")
    found = Tokenizer(words)
    found.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=found, eos_token=f"w{END}")


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Random tokens."""
    found = torch.randint(2, VOCAB, (length,), generator=torch.Generator().manual_seed(seed))
    return found.tolist()


def params(tokens: int = 8, **changes: object) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": tokens, "thinking": True, **changes})


def exact(tokens: int = 8, **changes: object) -> SamplingParams:
    return params(tokens, **{"deterministic": True, "logprobs": True, **changes})


def engine_of(model: ThinkingModel, **settings: object) -> Engine:
    """An engine with small passes and pages, so that their sizes vary."""
    small = {"reference_rows": 16, "max_rows": 64, "page_size": 16}
    return Engine(model, config=EngineConfig(**{**small, **settings}))


def said(output: RequestOutput) -> tuple[list[list[int]], list[int]]:
    """Thoughts and the first completion's answer, as ``reading.generate`` returns them."""
    assert output.thoughts is not None
    return [thought.token_ids for thought in output.thoughts], output.completions[0].token_ids


def all_bits(output: RequestOutput) -> object:
    """All that must be the same in every bit."""
    return output.thoughts, bits(output)
