"""A target and assistants to measure drafts with, made from the bundled model.

    python -m benchmarks.storyteller.pair [--folder DIR] [--parts target 1 2] [--steps N]

``target`` is the bundled model grown to 12 layers of width 512 by weights that keep its function:
vectors are four copies of themselves, matrices four by four copies of a quarter, and inserted
layers add nothing. Noise of 2 % of each matrix's spread then makes every weight count. ``1`` and
``2`` are assistants of so many layers, which learn the bundled model's distribution (KL) on its
documents: six minutes each on one core. Seeded, so that the same machine and versions make the same
folders; those that are there are kept. Does not know who drafts with them.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from benchmarks.storyteller.train import Encoded, encoded_documents, packed_batch
from tinyspec.tools.demo import BUNDLED

FOLDER = Path.home() / ".cache" / "tinyspec" / "draft-pair"
COPIES, INSERTED, NOISE = 4, 2, 0.02
# The grown model's logits are those of the bundled one but for rounding.
TOLERANCE = 1e-4
STEPS, WARMUP_STEPS, ROW_LENGTH = 1000, 40, 256
PEAK_RATE, LAST_SHARE = 0.002, 0.03
# Which layers an assistant of so many starts from.
STARTS = {1: (0,), 2: (0, 3)}
SEED = 1


def bundled(folder: Path = BUNDLED) -> LlamaForCausalLM:
    """The model that both are made from, in fp32, or another one."""
    model: LlamaForCausalLM = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


def of_layers(small: LlamaForCausalLM, layers: tuple[int, ...], **settings: Any) -> Any:
    """A new model with the config of ``small`` but for ``settings``; and the name in ``small`` of
    what each of its parameters is made from, whose ``layers`` stand in its own."""
    config = deepcopy(small.config)
    config.update({"num_hidden_layers": len(layers), **settings})
    model = LlamaForCausalLM(config).eval()
    sources = {}
    for name in model.state_dict():
        parts = name.split(".")
        if parts[1] == "layers":
            parts[2] = str(layers[int(parts[2])])
        sources[name] = ".".join(parts)
    return model, sources


@torch.no_grad()
def grown(small: LlamaForCausalLM) -> LlamaForCausalLM:
    """The target: every layer of ``small`` four times as wide, two that add nothing behind it."""
    layers = tuple(n for n in range(small.config.num_hidden_layers) for _ in range(INSERTED + 1))
    sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    wider = {name: COPIES * getattr(small.config, name) for name in sizes}
    model, sources = of_layers(small, layers, **wider, tie_word_embeddings=False)
    weights = small.state_dict()
    for name, own in model.state_dict().items():
        weight = weights[sources[name]]
        if name == "lm_head.weight" or "embed" in name:
            made = weight.repeat(1, COPIES) / (COPIES if name == "lm_head.weight" else 1)
        elif weight.dim() == 1:
            made = weight.repeat(COPIES)
        else:
            made = weight.repeat(COPIES, COPIES) / COPIES
        adds = name.endswith(("o_proj.weight", "down_proj.weight"))
        if adds and int(name.split(".")[2]) % (INSERTED + 1):
            made = torch.zeros_like(made)
        own.copy_(made)
    ids, _ = packed_batch(documents(), ROW_LENGTH)
    difference = (model(ids).logits - small(ids).logits).abs().max().item()
    assert difference < TOLERANCE, f"logits differ by {difference}"
    generator = torch.Generator().manual_seed(SEED)
    spread = {name: p.std().item() for name, p in model.named_parameters() if p.dim() > 1}
    typical = spread["model.layers.0.self_attn.o_proj.weight"]
    for name, parameter in model.named_parameters():
        if name in spread and "embed" not in name:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter += NOISE * (spread[name] or typical) * noise
    return model


def documents() -> Iterator[Encoded]:
    """What the bundled model was trained on, other ones."""
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED)
    return encoded_documents(tokenizer, f"pair {SEED}", ROW_LENGTH)


def divergence(logits: Tensor, wanted: Tensor) -> Tensor:
    """KL of the distributions of ``logits`` from those ``wanted``, a token."""
    target = wanted.log_softmax(-1)
    return (target.exp() * (target - logits.log_softmax(-1))).sum(-1).mean()


def distilled(small: LlamaForCausalLM, layers: int, steps: int) -> LlamaForCausalLM:
    """An assistant of so many layers that has learnt the distribution of ``small``."""
    model, sources = of_layers(small, STARTS[layers])
    weights = small.state_dict()
    model.load_state_dict({name: weights[source] for name, source in sources.items()})
    texts = documents()
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.0)
    for step in range(steps):
        cosine = 0.5 + 0.5 * math.cos(math.pi * step / steps)
        rate = PEAK_RATE * min(1.0, (step + 1) / WARMUP_STEPS)
        for group in optimizer.param_groups:
            group["lr"] = rate * (LAST_SHARE + (1 - LAST_SHARE) * cosine)
        ids, _ = packed_batch(texts, ROW_LENGTH)
        with torch.no_grad():
            wanted = small(ids, use_cache=False).logits
        loss = divergence(model(ids, use_cache=False).logits, wanted)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 100 == 0:
            print(f"{layers} layers, step {step + 1}: KL {loss.item():.4f}", flush=True)
    return model


def made(part: str, folder: Path = FOLDER, steps: int = STEPS) -> Path:
    """The folder of ``part``, made unless it is there."""
    path = folder / part
    if not (path / "config.json").exists():
        torch.manual_seed(SEED)
        small = bundled()
        model = grown(small) if part == "target" else distilled(small, int(part), steps)
        model.save_pretrained(path)
        AutoTokenizer.from_pretrained(BUNDLED).save_pretrained(path)
    return path


def main() -> None:
    """Make what is not there, and print where it is."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parts = ["target", *map(str, STARTS)]
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--steps", type=int, default=STEPS, help="of an assistant's training")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for part in options.parts:
        print(made(part, options.folder, options.steps), flush=True)


if __name__ == "__main__":
    main()
