"""Reads prompts chunk by chunk with a dense KV cache: the definition that an engine agrees with.

One serial step a chunk, no speculation, no pages. For training's evaluation and as a reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import DynamicCache

from tinyspec.model.supported import CACHE
from tinyspec.thinking.model import IGNORED, ThinkingModel


@dataclass
class Reading:
    """thoughts: for each prompt, for each whole chunk, token ids with the end token (without one if
    it was cut). logits: [B, V] at each prompt's last token. cache: of the longest prompt."""

    thoughts: list[list[list[int]]]
    logits: torch.Tensor
    cache: DynamicCache


def think(model: ThinkingModel, hidden: torch.Tensor) -> torch.Tensor:
    """Greedy thoughts [N, m] of chunks' hidden states [N, c, d]; IGNORED behind the end token."""
    config = model.thinking_config
    thoughts = hidden.new_full((len(hidden), 0), 0, dtype=torch.long)
    ended = torch.zeros(len(hidden), dtype=torch.bool, device=hidden.device)
    while thoughts.shape[1] < config.max_thought_tokens and not ended.all():
        logits = model.thinking(hidden, model.embed(thoughts.clamp(min=0)))[:, -1]
        token = logits.argmax(-1).masked_fill(ended, IGNORED)
        ended |= token == config.end_token_id
        thoughts = torch.cat([thoughts, token[:, None]], 1)
    return thoughts


@torch.no_grad()
def read(model: ThinkingModel, prompts: Sequence[Sequence[int]]) -> Reading:
    """Reads prompts side by side; each is padded behind its end, where nothing of it looks."""
    size = model.thinking_config.chunk_size
    lengths = [len(prompt) for prompt in prompts]
    ids = torch.zeros((len(prompts), max(lengths)), dtype=torch.long, device=model.device)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt, device=model.device)
    cache = DynamicCache(config=model.config)
    states = None
    logits: list[torch.Tensor] = [ids.new_zeros(0)] * len(prompts)
    thoughts: list[list[list[int]]] = [[] for _ in prompts]
    for start in range(0, max(lengths), size):
        chunk = ids[:, start : start + size]
        added = None if states is None else states[:, : chunk.shape[1]]
        hidden: list[torch.Tensor] = []
        with model.tapped(added, hidden.append):
            output = model.backbone(input_ids=chunk, use_cache=True, **{CACHE: cache})
        for row, length in enumerate(lengths):
            if start < length <= start + size:
                logits[row] = output.logits[row, length - 1 - start]
        if chunk.shape[1] < size:
            break
        found = think(model, hidden[0])
        states = model.states(found)
        for row, length in enumerate(lengths):
            if start + size <= length:
                thoughts[row].append([token for token in found[row].tolist() if token >= 0])
    return Reading(thoughts, torch.stack(logits), cache)


@torch.no_grad()
def generate(
    model: ThinkingModel, prompt: Sequence[int], max_new_tokens: int, eos_token_id: int | None
) -> tuple[list[list[int]], list[int]]:
    """Thoughts, and the greedy answer; it is decoded without states."""
    reading = read(model, [prompt])
    answer = [int(reading.logits[0].argmax())]
    while len(answer) < max_new_tokens and answer[-1] != eos_token_id:
        token = torch.tensor([[answer[-1]]], device=model.device)
        output = model.backbone(input_ids=token, use_cache=True, **{CACHE: reading.cache})
        answer.append(int(output.logits[0, -1].argmax()))
    return reading.thoughts[0], answer
