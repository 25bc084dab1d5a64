"""GRPO by TRL whose loss sees the log-probabilities that the rollouts were drawn with, bit for bit.

    python benchmarks/recipes/rl_exact.py --steps 50
    python benchmarks/recipes/rl_exact.py --steps 50 --lora

The bundled model is paid for different words, by TRL's ``GRPOTrainer`` as it is: first the plain
way, then with the two lines marked below. Both print, for every step, the largest
|log p_train - log p_rollout| over all tokens: log p_rollout from the logits that ``generate``
sampled from, log p_train as TRL's loss gets it. Needs ``pip install trl peft``.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
import warnings
from collections.abc import Callable
from unittest import mock

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

import tinyspec
from tinyspec.integrations.trl import patch_trainer  # 1
from tinyspec.tools.demo import BUNDLED

PROMPTS = [
    f"User: Tell me a story about a {animal}.\nAssistant:"
    for animal in ("fox", "dog", "bee", "small green turtle")
]
GROUP, TEMPERATURE = 4, 0.9


def reward(completion_ids: list[list[int]], **_: object) -> list[float]:
    """Different words are paid for."""
    return [float(len(set(ids))) for ids in completion_ids]


def plain_logprobs(logits: torch.Tensor, ids: torch.Tensor, temperature: float) -> torch.Tensor:
    """Log-probabilities of ``ids`` as torch gives them."""
    return (logits.float() / temperature).log_softmax(-1).gather(-1, ids[..., None]).squeeze(-1)


class MeasuredTrainer(GRPOTrainer):
    """GRPO that notes the largest difference of every loss. logprobs: of logits and ids."""

    def __init__(self, logprobs: Callable[..., torch.Tensor] = plain_logprobs, **settings):
        super().__init__(**settings)
        self.logprobs, self.largest = logprobs, []

    def _generate_single_turn(self, prompt_ids, *rest):
        """Rollouts by TRL's own call of ``model.generate``, and what they were drawn with."""
        model = self.accelerator.unwrap_model(self.model)
        own, drawn = model.generate, []

        def generate(generation_config, **given):
            config = copy.deepcopy(generation_config)
            config.return_dict_in_generate = config.output_logits = True
            output = own(**given, generation_config=config)
            logits = torch.stack(output.logits, dim=1)
            tokens = output.sequences[:, -logits.shape[1] :]
            drawn.extend(self.logprobs(logits, tokens, self.temperature))
            return output.sequences

        with mock.patch.object(model, "generate", generate):
            completion_ids, _ = super()._generate_single_turn(prompt_ids, *rest)
        pairs = zip(drawn, completion_ids, strict=True)
        return completion_ids, [values[: len(ids)].tolist() for values, ids in pairs]

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        found = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        self.seen = found[0].detach()
        return found

    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        differences = (self.seen - inputs["sampling_per_token_logps"]).abs()
        self.largest.append(differences[inputs["completion_mask"].bool()].max().item())
        return loss


def train(exact: bool, steps: int, tokens: int, lora: bool, dtype: str) -> list[float]:
    """The largest difference of every step."""
    model = AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=getattr(torch, dtype))
    peft_config = None
    if lora:
        from peft import LoraConfig

        peft_config = LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear")
    with tempfile.TemporaryDirectory() as folder:
        trainer = MeasuredTrainer(
            logprobs=tinyspec.token_logprobs if exact else plain_logprobs,
            model=model,
            reward_funcs=reward,
            args=GRPOConfig(
                output_dir=folder,
                per_device_train_batch_size=GROUP * len(PROMPTS),
                num_generations=GROUP,
                max_completion_length=tokens,
                temperature=TEMPERATURE,
                learning_rate=1e-3 if lora else 1e-4,
                max_steps=steps,
                use_cpu=True,
                bf16=False,
                report_to="none",
                save_strategy="no",
                logging_strategy="no",
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
            processing_class=AutoTokenizer.from_pretrained(BUNDLED),
            peft_config=peft_config,
        )
        if exact:
            patch_trainer(trainer)  # 2
        trainer.train()
    return trainer.largest


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=40, help="of a rollout")
    parser.add_argument("--lora", action="store_true", help="train an adapter alone")
    parser.add_argument("--dtype", default="float32", help="of the weights")
    parser.add_argument("--smoke", action="store_true", help="3 steps of few tokens")
    given = parser.parse_args(arguments)
    steps, tokens = (3, 12) if given.smoke else (given.steps, given.tokens)
    warnings.filterwarnings("ignore")
    plain, ours = (train(exact, steps, tokens, given.lora, given.dtype) for exact in (False, True))
    print("step  plain     tinyspec   largest |log p_train - log p_rollout|")
    for step, (before, after) in enumerate(zip(plain, ours, strict=True), start=1):
        print(f"{step:4}  {before:.2e}  {after:.2e}")
    assert len(plain) == steps and max(plain) > 0, "a control: the plain way differs"
    assert not any(ours), "training sees other numbers than the rollouts"
    print(f"plain: up to {max(plain):.2e}; with tinyspec exactly 0 in all {steps} steps")


if __name__ == "__main__":
    main()
