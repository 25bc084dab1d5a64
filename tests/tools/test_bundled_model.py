"""The bundled models: what the package ships loads, fits, answers, stops and stays uncertain."""

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.storyteller import evaluate as scores
from benchmarks.storyteller import questions as stories
from tinyspec.tools.demo import BUNDLED, THINKER

Loaded = tuple[PreTrainedModel, PreTrainedTokenizerBase]
QUESTIONS, FLOOR = 200, 0.85


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    return scores.load(BUNDLED, torch.float32)


@pytest.mark.parametrize(
    ("folder", "most"), [(BUNDLED, 4e6), (THINKER, 2e6)], ids=["story", "coin"]
)
def test_folders_are_small(folder: Path, most: float) -> None:
    assert 0 < sum(path.stat().st_size for path in Path(folder).iterdir()) < most


def test_ids_and_dtype(loaded: Loaded) -> None:
    model, tokenizer = loaded
    assert scores.load(BUNDLED, "auto")[0].dtype == torch.bfloat16
    assert model.config.vocab_size == len(tokenizer)
    for settings in (model.config, model.generation_config):
        for name in ("eos_token_id", "bos_token_id", "pad_token_id"):
            assert getattr(settings, name) == getattr(tokenizer, name)
    assert not model.generation_config.do_sample
    assert tokenizer.eos_token_id != tokenizer.pad_token_id


def test_chat_template(loaded: Loaded) -> None:
    tokenizer = loaded[1]
    said = ("What is 2 + 3?", "2 + 3 = 5.", "Tell me a story about a fox.")
    roles = ("user", "assistant", "user")
    messages = [{"role": r, "content": c} for r, c in zip(roles, said, strict=True)]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == stories.chat_prompt([said[:2]], said[2])
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert ids == tokenizer(text)["input_ids"]


@pytest.mark.slow("model types", 4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_answers_held_out_questions(dtype: torch.dtype) -> None:
    model, tokenizer = scores.load(BUNDLED, dtype)
    questions = stories.held_out_questions(QUESTIONS, seed=1)
    answers = scores.greedy_answers(model, tokenizer, [prompt for prompt, _ in questions])
    right = [said == answer for (said, _), (_, answer) in zip(answers, questions, strict=True)]
    assert sum(right) / QUESTIONS >= FLOOR
    assert sum(stopped for _, stopped in answers) / QUESTIONS >= 0.99
