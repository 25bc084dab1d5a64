"""Trains a small model from a seed on a task's examples: steps, evaluation, checkpoints.

Data is a function of (seed, step), so that a run that goes on is the run that was not interrupted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from random import Random
from typing import Literal

import torch
from transformers import MistralConfig, MistralForCausalLM, PreTrainedTokenizerFast

from benchmarks.coin_reader.reading import read
from benchmarks.coin_reader.tasks import TASKS, Example, Task
from benchmarks.coin_reader.vocabulary import END, PAD, word_tokenizer
from tinyspec.thinking.config import ThinkingConfig
from tinyspec.thinking.model import IGNORED, ThinkingModel

# thoughts: Thinking States. none: the answer alone, the control. chain: the states are written out
# before the answer, a chain of thought. retold: each with the sentence that it follows from.
Mode = Literal["thoughts", "none", "chain", "retold"]
# How thoughts weigh in the loss: the paper's sum over a prompt's chunks (its Eq. 6), or the mean of
# all their tokens.
Loss = Literal["sum", "mean"]


@dataclass(frozen=True)
class Run:
    """What a training is a function of. window: of attention, in tokens; None: full attention.
    filler: most of the sentences that change nothing; batches differ in it, and reach it in the
    second half. tokens: of a batch, so that short examples are many."""

    task: str = "parity"
    mode: Mode = "thoughts"
    steps: int = 800
    seed: int = 0
    least: int = 1
    operations: int = 10
    filler: float = 0.0
    window: int | None = 16
    loss: Loss = "sum"
    tokens: int = 2048
    rate: float = 3e-3
    hidden_size: int = 64
    layers: int = 4
    chunk_size: int = 8

    def __post_init__(self) -> None:
        for name in ("steps", "operations", "tokens", "layers", "chunk_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} is not allowed: at least 1")
        if not 0 <= self.least <= self.operations:
            raise ValueError(f"least={self.least} is not allowed: from 0 to {self.operations}")
        if not 0 <= self.filler < 1:
            raise ValueError(f"filler={self.filler} is not allowed: from 0 to below 1")


class Training:
    """A model, its optimizer, and how many steps it has made."""

    def __init__(self, run: Run):
        self.run = run
        self.task: Task = TASKS[run.task]
        self.tokenizer = word_tokenizer(self.task.words)
        self._ids: dict[str, int] = self.tokenizer.get_vocab()
        self.model = make_model(run, self.task, self.tokenizer)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=run.rate, betas=(0.9, 0.98), weight_decay=0.01
        )
        self.done = 0

    def ids(self, words: Sequence[str]) -> list[int]:
        return [self._ids[word] for word in words]

    def step(self) -> float:
        """One batch; returns its loss."""
        run = self.run
        for group in self.optimizer.param_groups:
            group["lr"] = run.rate * schedule(self.done, run.steps)
        self.model.train()
        loss = self.loss(self.batch(self.done))
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.model.eval()
        self.done += 1
        return float(loss.detach())

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        found = self.model(**batch)
        if self.run.loss == "sum" or "thoughts" not in batch:
            return found.loss
        thoughts = batch["thoughts"]
        return found.answer_loss + found.thought_loss * len(thoughts) / (thoughts >= 0).sum()

    def batch(self, number: int) -> dict[str, torch.Tensor]:
        """input_ids and labels [B, L], and thoughts [B, K, m] where the run thinks."""
        run = self.run
        rng = Random(f"{run.seed} {number}")
        filler = run.filler * rng.random() ** 0.5 * min(1.0, 2 * (number + 1) / run.steps)
        examples: list[Example] = []
        longest = 0
        while longest * len(examples) < run.tokens:
            operations = rng.randint(run.least, run.operations)
            examples.append(self.task.example(rng, operations, filler=filler))
            longest = max(longest, len(examples[-1].prompt))
        rows = [(self.ids(e.prompt), self.ids(self.answer(e))) for e in examples]
        length = max(len(prompt) + len(answer) for prompt, answer in rows)
        ids = torch.full((len(rows), length), self.ids([PAD])[0])
        labels = torch.full((len(rows), length), IGNORED)
        for row, (prompt, answer) in enumerate(rows):
            end = len(prompt) + len(answer)
            ids[row, :end] = torch.tensor(prompt + answer)
            labels[row, len(prompt) : end] = torch.tensor(answer)
        found = {"input_ids": ids, "labels": labels}
        if run.mode == "thoughts":
            found["thoughts"] = self._thoughts(examples)
        return found

    def answer(self, example: Example) -> tuple[str, ...]:
        """The words to be learnt behind the prompt."""
        before = {"chain": example.steps, "retold": example.retold}.get(self.run.mode, ())
        return (*before, *example.answer)

    def _thoughts(self, examples: Sequence[Example]) -> torch.Tensor:
        rows = [[self.ids(t) for t in e.thoughts(self.run.chunk_size)] for e in examples]
        longest = max((len(thought) for row in rows for thought in row), default=1)
        found = torch.full((len(rows), max(map(len, rows)), longest), IGNORED)
        for row, thoughts in enumerate(rows):
            for chunk, thought in enumerate(thoughts):
                found[row, chunk, : len(thought)] = torch.tensor(thought)
        return found

    def accuracy(
        self, operations: Sequence[int], count: int, filler: float | None = None
    ) -> tuple[float, float]:
        """Part of ``count`` held-out prompts whose answer is right, by the sequential reading, or
        by the backbone alone where the run does not think; and part of their thoughts."""
        filler = self.run.filler if filler is None else filler
        rng = Random(f"test {operations} {filler}")
        made = [
            self.task.example(rng, rng.choice(operations), held_out=True, filler=filler)
            for _ in range(count)
        ]
        made.sort(key=lambda example: len(example.prompt))
        right = 0
        same: list[bool] = []
        for start in range(0, count, 50):
            part = made[start : start + 50]
            found, said = self.answers([self.ids(e.prompt) for e in part], len(part[0].answer))
            right += sum(f == self.ids(e.answer)[0] for f, e in zip(found, part, strict=True))
            gold = [[self.ids(t) for t in e.thoughts(self.run.chunk_size)] for e in part]
            for ours, theirs in zip(gold, said, strict=False):
                same += [x == y for x, y in zip(ours, theirs, strict=True)]
        return right / count, sum(same) / max(len(same), 1)

    @torch.no_grad()
    def answers(
        self, prompts: list[list[int]], length_of_answers: int
    ) -> tuple[list[int], list[list[list[int]]]]:
        """The first token of each prompt's answer, and its thoughts. length_of_answers: in tokens,
        the end included; behind a chain of thought they are found from its end."""
        if self.run.mode == "thoughts":
            reading = read(self.model, prompts)
            return reading.logits.argmax(-1).tolist(), reading.thoughts
        length = max(map(len, prompts))
        pad, end = self.ids([PAD, END])
        ids = torch.tensor([[*[pad] * (length - len(p)), *p] for p in prompts])
        mask = (ids != pad).long()
        if self.run.mode == "none":
            places = (mask.cumsum(1) - 1).clamp(min=0)
            logits = self.model.backbone(ids, attention_mask=mask, position_ids=places).logits
            return logits[:, -1].argmax(-1).tolist(), []
        found = self.model.backbone.generate(  # type: ignore[operator]
            ids, attention_mask=mask, do_sample=False, max_new_tokens=2 * length, pad_token_id=end
        )
        ends = (found[:, length:] == end).int().argmax(1)
        first = (ends + 1 - length_of_answers).clamp(min=0)
        return found[:, length:].gather(1, first[:, None])[:, 0].tolist(), []

    def save(self, folder: Path) -> None:
        """Model and tokenizer, to be loaded by ThinkingModel.from_pretrained, and what a run needs
        to go on."""
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        state = {
            "run": asdict(self.run),
            "done": self.done,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        torch.save(state, folder / "training.pt")

    def resume(self, folder: Path) -> None:
        """Go on from what ``save`` wrote. Raises ValueError where that was another run."""
        state = torch.load(folder / "training.pt", weights_only=True)
        other = Run(**state["run"])
        for field in fields(Run):
            mine, theirs = getattr(self.run, field.name), getattr(other, field.name)
            if mine != theirs:
                raise ValueError(
                    f"{field.name}={mine!r} is not allowed: the run in {folder} has {theirs!r}"
                )
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.done = state["done"]


def schedule(step: int, steps: int) -> float:
    """Factor of the learning rate: 50 steps of warm-up, then a cosine to a twentieth."""
    warm = min(1.0, (step + 1) / 50)
    return warm * (0.525 + 0.475 * math.cos(math.pi * step / max(steps, 1)))


def make_model(run: Run, task: Task, tokenizer: PreTrainedTokenizerFast) -> ThinkingModel:
    """Random weights of the run's seed."""
    torch.manual_seed(run.seed)
    config = MistralConfig(
        vocab_size=len(tokenizer.vocab),
        hidden_size=run.hidden_size,
        intermediate_size=2 * run.hidden_size,
        num_hidden_layers=run.layers,
        num_attention_heads=run.hidden_size // 16,
        num_key_value_heads=run.hidden_size // 16,
        head_dim=16,
        max_position_embeddings=4096,
        sliding_window=run.window,
        initializer_range=run.hidden_size**-0.5,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=int(tokenizer.vocab[END]),
        pad_token_id=int(tokenizer.vocab[PAD]),
    )
    thinking = ThinkingConfig(
        end_token_id=int(tokenizer.vocab[END]),
        chunk_size=run.chunk_size,
        max_thought_tokens=task.longest,
    )
    return ThinkingModel.from_backbone(MistralForCausalLM(config), thinking).eval()
