"""GRPO on tiny models, its loss by ``tinyspec.canonical``: how far the log-probabilities that it is
made of are from those that the rollouts were drawn with.

    python -m tests.support.grpo [--steps 50] [--families llama ...]

prints, for each family and precision, with full weights and with LoRA, the largest difference of
all steps: of a plain forward, and of a canonical one.
"""

import argparse
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import tinyspec
from benchmarks.render import table
from tests.support.zoo import tiny
from tinyspec import EngineConfig

FAMILIES = ("llama", "qwen3", "gemma3_text", "gpt2", "phi3", "qwen3_moe", "gpt_oss")
PRECISIONS = ("fp32", "bf16", "bf16 autocast")
# Prompts, completions of each, their tokens; of prompts the padding on the left.
PROMPTS, GROUP, TOKENS, PADS = 3, 4, 8, (0, 2, 5)
TEMPERATURE = 0.9
LINEARS = (nn.Linear, Conv1D)
CONFIG = EngineConfig(reference_rows=16, max_rows=64, page_size=8)


class Step(NamedTuple):
    """The largest |log p_train - log p_rollout| of a plain and of a canonical forward."""

    plain: float
    exact: float


def steps(family: str, precision: str, count: int, lora: bool = False) -> list[Step]:
    """What ``count`` steps of AdamW showed."""
    model: Any = tiny(family)
    model = model.to(torch.bfloat16) if precision == "bf16" else model
    inner, wide = model, model.config.get_text_config().vocab_size
    if lora:
        import peft

        # Of experts PEFT merges weights in every pass, which is refused by name.
        linears = (name for name, m in model.named_modules() if isinstance(m, LINEARS))
        names = sorted({name.rpartition(".")[2] for name in linears if "attn" in name})
        config = peft.LoraConfig(r=4, target_modules=names, init_lora_weights=False)
        model = peft.get_peft_model(model, config)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3)
    tinyspec.patch(model, CONFIG, deterministic=True, seed=0, forward=True)
    generator, found = torch.Generator().manual_seed(0), []
    try:
        for _ in range(count):
            ids = torch.randint(3, wide, (PROMPTS, 12), generator=generator)
            mask = torch.ones_like(ids)
            for row, pads in enumerate(PADS):
                mask[row, :pads] = 0
            with _autocast(precision):
                found.append(_step(model, inner, ids, mask))
            optimizer.step()
            optimizer.zero_grad()
    finally:
        tinyspec.unpatch(model)
    return found


def _step(model: Any, inner: Any, ids: Tensor, mask: Tensor) -> Step:
    """Rollouts, and a backward."""
    drawn = {"do_sample": True, "temperature": TEMPERATURE, "top_k": None}
    asked = {"max_new_tokens": TOKENS, "num_return_sequences": GROUP, "output_logits": True}
    asked |= {"return_dict_in_generate": True, "pad_token_id": 0, "eos_token_id": None}
    out = model.generate(input_ids=ids, attention_mask=mask, **drawn, **asked)
    tokens = out.sequences[:, -TOKENS:]
    rollout = _logprobs(torch.stack(out.logits, 1), tokens)
    whole = torch.cat((mask.repeat_interleave(GROUP, 0), torch.ones_like(tokens)), 1)
    given = {"attention_mask": whole, "use_cache": False, "logits_to_keep": TOKENS + 1}
    trained = _logprobs(model(out.sequences, **given).logits[:, :-1], tokens)
    with torch.no_grad():
        places = (whole.cumsum(1) - 1).clamp(min=0)
        own = inner.forward.original(out.sequences, position_ids=places, **given)
        plain = own.logits[:, :-1].float().div(TEMPERATURE).log_softmax(-1)
        plain = plain.gather(2, tokens[..., None])[..., 0]
    reward = (tokens % 2).float().mean(1).view(-1, GROUP)
    advantage = (reward - reward.mean(1, keepdim=True)).view(-1, 1)
    (-(trained - trained.detach()).exp() * advantage).mean().backward()
    differences = [(each - rollout).abs().max().item() for each in (plain, trained.detach())]
    return Step(*differences)


def _logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    found: Tensor = tinyspec.token_logprobs(logits, tokens, TEMPERATURE)
    return found


def _autocast(precision: str) -> AbstractContextManager[Any]:
    on = precision == "bf16 autocast"
    return torch.autocast("cpu", torch.bfloat16) if on else nullcontext()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--families", nargs="+", default=FAMILIES)
    options = parser.parse_args()
    rows = []
    for family, precision, lora in product(options.families, PRECISIONS, (False, True)):
        found = steps(family, precision, options.steps, lora)
        plain, exact = (max(each) for each in zip(*found, strict=True))
        weights = "LoRA" if lora else "all"
        rows.append([family, precision, weights, len(found), f"{plain:.1e}", f"{exact:g}"])
        print(*rows[-1], flush=True)
    print(table(["family", "precision", "weights", "steps", "plain", "canonical"], rows))


if __name__ == "__main__":
    main()
