"""``tinyspec demo``: bits that depend on the batch, then bits that do not, as measured."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path

from tinyspec.engine.engine import Engine
from tinyspec.outputs import RequestOutput
from tinyspec.sampling_params import SamplingParams
from tinyspec.tools.table import table

# The model in the package, for demos and tests without a network, and its prompts.
BUNDLED = Path(__file__).resolve().parent / "storyteller"
PROMPTS = BUNDLED / "demo_prompts.json"


def _compare(alone: RequestOutput, crowded: RequestOutput) -> tuple[int, int, bool]:
    """Tokens compared, log-probabilities whose bits differ, whether the tokens are the same."""
    one, other = alone.completions[0], crowded.completions[0]
    pairs = list(zip(one.logprobs or [], other.logprobs or [], strict=False))
    return len(pairs), sum(a != b for a, b in pairs), one.token_ids == other.token_ids


def _report(title: str, compared: tuple[int, int, bool]) -> None:
    count, different, same = compared
    verdict = "identical, bit for bit" if same and not different else f"{different} differ"
    tokens = "same tokens" if same else "OTHER TOKENS"
    print(f"{title:<22} {count} log-probabilities compared: {verdict}; {tokens}")


def demo(engine: Engine, crowd: int, max_new_tokens: int) -> int:
    """Returns 0 if the deterministic request has the same bits alone and among ``crowd`` others."""
    needle = SamplingParams(max_new_tokens=max_new_tokens, logprobs=True, temperature=0.7, seed=1)
    others = [
        SamplingParams(
            max_new_tokens=max_new_tokens,
            temperature=0.9 * (n % 2),
            seed=n,
            deterministic=n % 3 == 0,
        )
        for n in range(crowd)
    ]
    found_prompts = json.loads(PROMPTS.read_text(encoding="utf-8"))
    prompts = [found_prompts["request"], *islice(cycle(found_prompts["crowd"]), crowd)]
    print(f"One request (temperature 0.7, seed 1), alone and among {crowd} others\n")
    found = []
    for flag in (False, True):
        mine = replace(needle, deterministic=flag)
        alone = engine.generate(prompts[0], mine)[0]
        outputs = engine.generate(prompts, [mine, *others])
        found.append(_compare(alone, outputs[0]))
        _report(f"deterministic={flag}", found[-1])
    if not found[0][1]:
        print("(on this machine the plain request has the same bits at both batch sizes)")
    print("\nThe mixed batch:\n")
    rows: list[tuple[object, ...]] = [
        ("request", "kind", "drafted", "accepted", "rolled back", "verifies")
    ]
    for n, output in enumerate(outputs):
        stats, params = output.completions[0].stats, output.params
        kind = "sampled" if params.temperature else "greedy"
        kind += ", det." if params.deterministic else ", plain"
        counts = (stats.drafted, stats.accepted, stats.rolled_back, stats.verify_passes)
        rows.append((n, kind, *counts))
    print("\n".join(table(rows, right=range(2, 6))))
    print()
    for n, output in enumerate(outputs):
        text = " ".join(f"{prompts[n]}{output.completions[0].text}".split())
        print(f"{n}: {text}")
    print(f"\nfingerprint {outputs[0].fingerprint}")
    return 0 if found[1][1] == 0 and found[1][2] else 1
