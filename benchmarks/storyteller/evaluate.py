"""Scores of a model folder: exact answers to held-out questions, and uncertainty when sampled.

Loads the folder as any user would, with the Auto classes. Does not know how the model was made.
"""

from collections import defaultdict
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from benchmarks.storyteller import questions as stories

MAX_ANSWER_TOKENS = 96
STORY_TOKENS = 64
BATCH_SIZE = 50


def load(folder: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model in `dtype` and its tokenizer, from a local folder."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    return model.eval(), AutoTokenizer.from_pretrained(folder, local_files_only=True)


def greedy_answers(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[str]
) -> list[tuple[str, bool]]:
    """The greedy answer to each prompt, and whether it stopped by itself."""
    answers: list[tuple[str, bool]] = []
    for start in range(0, len(prompts), BATCH_SIZE):
        batch = tokenizer(prompts[start : start + BATCH_SIZE], padding=True, return_tensors="pt")
        output = model.generate(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            do_sample=False,
            max_new_tokens=MAX_ANSWER_TOKENS,
        )
        for ids in output[:, batch["input_ids"].shape[1] :]:
            stopped = bool((ids == tokenizer.eos_token_id).any())
            answers.append((tokenizer.decode(ids, skip_special_tokens=True).strip(), stopped))
    return answers


def sampled_entropy(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[str], seed: int
) -> tuple[float, list[str]]:
    """Mean entropy in nats per token of sampled continuations, and the continuations."""
    torch.manual_seed(seed)
    batch = tokenizer(prompts, padding=True, return_tensors="pt")
    output = model.generate(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        do_sample=True,
        top_k=0,
        max_new_tokens=STORY_TOKENS,
        output_logits=True,
        return_dict_in_generate=True,
    )
    ids = output.sequences[:, batch["input_ids"].shape[1] :]
    log_probs = torch.stack(output.logits, dim=1).float().log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    is_end = (ids == tokenizer.eos_token_id).int()
    inside = (is_end.cumsum(-1) - is_end) == 0
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
    return entropy[inside].mean().item(), texts


@torch.inference_mode()
def evaluate(folder: Path, num_questions: int, dtype: torch.dtype) -> dict[str, float]:
    """Share of exact answers per kind and overall, share stopped, and entropy per story token."""
    model, tokenizer = load(folder, dtype)
    questions = stories.held_out_by_kind(num_questions, seed=0)
    answers = greedy_answers(model, tokenizer, [prompt for _, prompt, _ in questions])
    right: dict[str, list[bool]] = defaultdict(list)
    for (kind, _, expected), (answer, _) in zip(questions, answers, strict=True):
        right[kind].append(answer == expected)
    entropy, _ = sampled_entropy(model, tokenizer, stories.open_prompts(32, seed=0), seed=0)
    scores = {kind: sum(found) / len(found) for kind, found in sorted(right.items())}
    scores["overall"] = sum(sum(found) for found in right.values()) / num_questions
    scores["stopped"] = sum(stopped for _, stopped in answers) / num_questions
    scores["entropy"] = entropy
    return {name: round(score, 4) for name, score in scores.items()}
