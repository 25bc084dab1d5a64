"""Makes (`--out DIR`) and scores (`--evaluate DIR`) the bundled model.

Run as `python -m benchmarks.storyteller.train`.

Trains a small Llama on the documents of `stories.py`, rounds the weights to bf16 and saves a folder
that the Auto classes load. Seeded, and on one thread, so that the same machine and versions make
the same folder. Does not know what the documents say.
"""

import argparse
import json
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.storyteller import questions as stories
from benchmarks.storyteller.evaluate import evaluate
from benchmarks.storyteller.induction_init import start_weights
from benchmarks.storyteller.tokenizer import MAX_LENGTH, VOCAB_SIZE, make_tokenizer

SEED = 1
STEPS = 1500
TOKENS_PER_STEP = 4096
ROW_LENGTH = 256
# Early documents are short, which is when the model learns to look things up; in the second half
# every tenth step has long rows, so that long chats are no surprise.
SHORT_DOCUMENT = 56
SHORT_SHARE = 0.25
LONG_ROW_LENGTH = 1024
LONG_EVERY = 10
COPY_SHARE = 0.05
COPY_WEIGHT = 0.5
PEAK_RATE = 0.003
LAST_RATE = 0.0001
# The embedding learns slowly, or it drowns the common value that the starting heads live on.
EMBEDDING_RATE_SHARE = 0.15
WARMUP_STEPS = 50
REPORT_EVERY = 50


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A new Llama of hidden width 128 with grouped queries and tied embeddings, in fp32."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    start_weights(model, SEED)
    return model


Encoded = tuple[list[int], list[float]]


def copy_document(rng: random.Random) -> Encoded:
    """A few random tokens three times over: what comes next is known from the second time on."""
    ids = [rng.randrange(2, VOCAB_SIZE) for _ in range(rng.randint(4, 24))]
    return ids * 3, [0.0] * len(ids) + [COPY_WEIGHT] * (2 * len(ids))


def encoded_documents(
    tokenizer: PreTrainedTokenizerFast, seed: str, max_length: int
) -> Iterator[Encoded]:
    """Token ids and loss weights of one document after another, without end."""
    rng = random.Random(seed)
    while True:
        documents = [stories.document(rng) for _ in range(64)]
        texts = [text for document in documents for text, _ in document]
        encoded = iter(tokenizer(texts)["input_ids"])
        for document in documents:
            ids: list[int] = []
            weights: list[float] = []
            for _, weight in document:
                piece = next(encoded)
                ids += piece
                weights += [weight] * len(piece)
            if rng.random() < COPY_SHARE:
                yield copy_document(rng)
            if len(ids) <= max_length:
                yield ids, weights


def packed_batch(
    documents: Iterator[Encoded], row_length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and weights [rows, row_length + 1]; a row starts with a document and cuts its last."""
    all_ids, all_weights = [], []
    for _ in range(TOKENS_PER_STEP // row_length):
        ids: list[int] = []
        weights: list[float] = []
        while len(ids) <= row_length:
            more_ids, more_weights = next(documents)
            ids += more_ids
            weights += more_weights
        all_ids.append(ids[: row_length + 1])
        all_weights.append(weights[: row_length + 1])
    return torch.tensor(all_ids), torch.tensor(all_weights)


def make_optimizers(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for the embedding and the norms."""
    parameters = list(model.named_parameters())
    matrices = [p for name, p in parameters if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in parameters if p.ndim != 2 or "embed" in name]
    muon = {"params": matrices, "share": 1.0}
    adam = {"params": others, "share": EMBEDDING_RATE_SHARE}
    return [
        torch.optim.Muon(
            [muon], lr=1.0, weight_decay=0.05, adjust_lr_fn="match_rms_adamw", momentum=0.95
        ),
        torch.optim.AdamW([adam], lr=1.0, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def rate(step: int, steps: int) -> float:
    """Learning rate: a short linear rise, then a cosine down to `LAST_RATE`."""
    cosine = 0.5 + 0.5 * math.cos(math.pi * step / steps)
    return min(1.0, (step + 1) / WARMUP_STEPS) * (LAST_RATE + (PEAK_RATE - LAST_RATE) * cosine)


def train(out: Path, steps: int) -> dict[str, float]:
    """Train, save the folder `out`, and return seconds and the last loss on answer tokens."""
    torch.manual_seed(SEED)
    tokenizer = make_tokenizer(SEED)
    model = make_model(tokenizer)
    optimizers = make_optimizers(model)
    short = encoded_documents(tokenizer, f"short {SEED}", SHORT_DOCUMENT)
    full = encoded_documents(tokenizer, f"full {SEED}", MAX_LENGTH)
    started = time.perf_counter()
    report: dict[str, float] = {}
    recent: list[float] = []
    for step in range(steps):
        is_long = step > steps // 2 and step % LONG_EVERY == 0
        documents = short if step < SHORT_SHARE * steps else full
        ids, weights = packed_batch(documents, LONG_ROW_LENGTH if is_long else ROW_LENGTH)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        losses = torch.nn.functional.cross_entropy(
            logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
        )
        target_weights = weights[:, 1:].flatten()
        ((losses * target_weights).sum() / target_weights.sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate(step, steps) * group["share"]
            optimizer.step()
            optimizer.zero_grad()
        recent.append(losses[target_weights == stories.ANSWER_WEIGHT].mean().item())
        if (step + 1) % REPORT_EVERY == 0 or step + 1 == steps:
            seconds = time.perf_counter() - started
            report = {"step": step + 1, "loss": sum(recent) / len(recent), "seconds": seconds}
            print(json.dumps({name: round(value, 4) for name, value in report.items()}), flush=True)
            recent = []
    save(model, tokenizer, out)
    return report


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write the folder, the weights rounded to bf16."""
    model.to(torch.bfloat16)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)
    tokenizer.save_pretrained(out)


def main() -> None:
    """Train into `--out` and score it, or score `--evaluate`; each result is a line of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--out", type=Path, help="train, and save the model in this folder")
    action.add_argument("--evaluate", type=Path, help="score the model in this folder")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--questions", type=int, default=1000)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.out:
        train(options.out, options.steps)
    folder = options.out or options.evaluate
    print(json.dumps(evaluate(folder, options.questions, getattr(torch, options.dtype))))


if __name__ == "__main__":
    main()
