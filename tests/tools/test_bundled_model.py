"""The bundled model: what the package ships loads, fits, answers, stops and stays uncertain."""

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.storyteller import evaluate as scores
from benchmarks.storyteller import questions as stories
from tinyspec.tools.demo import BUNDLED

Loaded = tuple[PreTrainedModel, PreTrainedTokenizerBase]
FILES = (
    "README.md",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)
NUM_QUESTIONS = 200
FLOOR = 0.85


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    return scores.load(BUNDLED, torch.float32)


def test_folder_is_small() -> None:
    assert all((BUNDLED / name).is_file() for name in FILES)
    assert sum(path.stat().st_size for path in BUNDLED.iterdir()) < 4_000_000


def test_ids_and_dtype(loaded: Loaded) -> None:
    model, tokenizer = loaded
    assert scores.load(BUNDLED, "auto")[0].dtype == torch.bfloat16
    assert model.config.vocab_size == len(tokenizer)
    for settings in (model.config, model.generation_config):
        assert settings.eos_token_id == tokenizer.eos_token_id
        assert settings.bos_token_id == tokenizer.bos_token_id
        assert settings.pad_token_id == tokenizer.pad_token_id
    assert not model.generation_config.do_sample
    assert tokenizer.eos_token_id != tokenizer.pad_token_id


def test_chat_template(loaded: Loaded) -> None:
    tokenizer = loaded[1]
    messages = [
        {"role": "user", "content": "What is 2 + 3?"},
        {"role": "assistant", "content": "2 + 3 = 5."},
        {"role": "user", "content": "Tell me a story about a fox."},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == stories.chat_prompt([("What is 2 + 3?", "2 + 3 = 5.")], messages[2]["content"])
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert ids == tokenizer(text)["input_ids"]


@pytest.mark.slow("model types", 4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_answers_held_out_questions(dtype: torch.dtype) -> None:
    model, tokenizer = scores.load(BUNDLED, dtype)
    questions = stories.held_out_questions(NUM_QUESTIONS, seed=1)
    answers = scores.greedy_answers(model, tokenizer, [prompt for prompt, _ in questions])
    right = [said == answer for (said, _), (_, answer) in zip(answers, questions, strict=True)]
    assert sum(right) / NUM_QUESTIONS >= FLOOR
    assert sum(stopped for _, stopped in answers) / NUM_QUESTIONS >= 0.99
