"""``tinyspec demo --thinking``: a small model that reasons while it reads, with the same thoughts
however its prompt is cut."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import Any

from tinyspec.engine.engine import Engine
from tinyspec.outputs import RequestOutput
from tinyspec.sampling_params import SamplingParams
from tinyspec.thinking.config import ThinkingConfig
from tinyspec.tools.diff import compare, summed_up
from tinyspec.tools.terminal import styled, table

# The model in the package that thinks (trained by ``python -m benchmarks.coin_reader.train``).
THINKER = Path(__file__).resolve().parent / "coin_reader"
WIDTH = 86
COINS = (
    "A coin's state is heads. Alice flips the coin. The wind moves over the hill. A bird sings "
    "near the town. One cloud rests behind the wood. Bob flips the coin. What's the state? A:"
)
# How the prompt is read, and how many chunks run at once; None: all of them.
WAYS = {"speculative": None, "sequential": 1}


def demo_thinking(engines: dict[str, Engine], config: ThinkingConfig, prompt: str = COINS) -> int:
    """engines: of one model and its tokenizer, by the names of WAYS. Returns 0 if both have the
    same thoughts and answers, bit for bit."""
    params = SamplingParams(
        max_new_tokens=8, thinking=True, deterministic=True, logprobs=True, prompt_logprobs=True
    )
    found = {name: engine.generate([prompt], params)[0] for name, engine in engines.items()}
    one, other = found.values()
    tokenizer = next(iter(engines.values())).tokenizer
    print("\n".join(textwrap.wrap(f"A model that reasons while it reads: {prompt!r}", WIDTH)), "\n")
    print("\n".join(_chunks(tokenizer, config, one)))
    answer = (one.completions[0].text or "").strip()
    print(f"\nanswer: {styled(sys.stdout, 'bold', answer)}\n")
    for name, output in found.items():
        passes = output.completions[0].stats.thinking_passes
        print(f"{name}: {len(output.thoughts or [])} chunks in {passes} rounds")
    _, reason = summed_up(compare(one, other, 0).values())
    verdict = f"DIFFERENT: {reason}" if reason else "identical, bit for bit"
    print(f"\nthoughts, answers and log-probabilities of both ways: {verdict}")
    return 1 if reason else 0


def _chunks(tokenizer: Any, config: ThinkingConfig, output: RequestOutput) -> list[str]:
    """A line for each chunk: what is read, the state that is added to it, what is thought of it."""
    ids, size = output.prompt_token_ids, config.chunk_size
    rows: list[tuple[object, ...]] = [("", "reads", "with the state of", "thinks")]
    before = "nothing"
    for thought in output.thoughts or []:
        text = tokenizer.decode(ids[thought.chunk * size :][:size])
        said = tokenizer.decode(thought.token_ids)
        arrow = "\N{RIGHTWARDS ARROW}"
        rows.append((f"chunk {thought.chunk}", text, before, f"T {arrow} {said}"))
        trivial = thought.token_ids[0] == config.end_token_id
        before = "nothing" if trivial else f"C({said})"
    if rest := ids[len(ids) // size * size :]:
        rows.append(("the rest", tokenizer.decode(rest), before, ""))
    return table(rows)
