"""Auditing somebody else's transcript: did this model say that, bit for bit?

    python benchmarks/recipes/audit_transcript.py

Alice serves a model and publishes what it said. Bob has the same model and machine, but not her
batch, and computes her transcript again in a few passes. Then he audits one in which she has
changed a single token, and one with a log-probability that is off by its last bit.
"""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

import tinyspec
from tinyspec import Engine, RequestOutput, SamplingParams
from tinyspec.tools.demo import BUNDLED

PROMPTS = [
    "User: Tell me a story about a bee.\nAssistant:",
    "One dark day a dog named Leo woke up.",
]


def publish(file: Path) -> None:
    """Alice: a transcript, one output a line, generated in a crowd of others."""
    params = SamplingParams(
        max_new_tokens=60, temperature=0.9, seed=7, deterministic=True, logprobs=True
    )
    others = [SamplingParams(max_new_tokens=n, temperature=1.0, seed=n) for n in range(20, 30)]
    with Engine.from_pretrained(BUNDLED, "bfloat16", "cpu") as engine:
        prompts = [*PROMPTS, *["Once there was a fox"] * len(others)]
        outputs = engine.generate(prompts, [params] * len(PROMPTS) + others)
    lines = [output.to_json() for output in outputs[: len(PROMPTS)]]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def read(file: Path) -> list[RequestOutput]:
    return [
        RequestOutput.from_json(line) for line in file.read_text(encoding="utf-8").split("\n")[:-1]
    ]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "transcript.jsonl"
        publish(file)
        with Engine.from_pretrained(BUNDLED, "bfloat16", "cpu") as engine:
            report = tinyspec.audit(engine, read(file))
            print(f"as published\n{report}\n")
            assert report
            token, bit = read(file), read(file)
            token[1].completions[0].token_ids[12] += 1
            logprobs = bit[0].completions[0].logprobs
            logprobs[5] = math.nextafter(logprobs[5], 0.0)
            for what, outputs in (("one token changed", token), ("one bit changed", bit)):
                report = tinyspec.audit(engine, outputs)
                print(f"{what}\n{report}\n")
                assert not report, "a change was not found"
    print("The transcript as published is this model's; both changes were found.")


if __name__ == "__main__":
    main()
