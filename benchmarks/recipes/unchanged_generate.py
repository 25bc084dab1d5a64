"""Old ``model.generate`` code, unchanged: one line before it frees answers from the batch.

    python benchmarks/recipes/unchanged_generate.py

``answers`` is code as it stands in many projects. It is run three times: by transformers, by
tinyspec as it is, and by tinyspec where everything is deterministic unless a call says otherwise.
"""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import tinyspec
from tinyspec.tools.demo import BUNDLED

PROMPTS = [
    "User: What is the last item: drum, coin, hat, spoon?\nAssistant:",
    "User: Sort this list: 3, 2, 9, 8.\nAssistant:",
    "User: Tell me a story about a turtle.\nAssistant:",
    "One cold night a mouse named Yara woke up.",
]


def answers(model, tokenizer, prompts, **options):
    """The code that was there before."""
    batch = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
    with torch.no_grad():
        out = model.generate(**batch, max_new_tokens=40, **options)
    return tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED)
    model = AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32).eval()
    before = answers(model, tokenizer, PROMPTS, do_sample=False)

    tinyspec.patch(model)
    after = answers(model, tokenizer, PROMPTS, do_sample=False)
    tinyspec.unpatch(model)
    print(
        f"greedy, by transformers and by tinyspec: {sum(map(str.__eq__, before, after))} of 4 equal"
    )
    assert before == after

    tinyspec.patch(model, deterministic=True)
    sampling = {"do_sample": True, "temperature": 0.8}
    together = answers(model, tokenizer, PROMPTS, **sampling, seed=[1, 2, 3, 4])
    alone = [
        answers(model, tokenizer, [prompt], **sampling, seed=seed)[0]
        for seed, prompt in enumerate(PROMPTS, start=1)
    ]
    tinyspec.unpatch(model)
    assert together == alone
    print("sampled with deterministic=True, four together and each alone: 4 of 4 equal")
    for text in together:
        print(f"  {' '.join(text.split())[:76]}")


if __name__ == "__main__":
    main()
