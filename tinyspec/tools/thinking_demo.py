"""``tinyspec demo --thinking``: a small model that reasons while it reads, drawn as the figure of
Thinking States (arXiv 2602.08332, 2a), with the same thoughts however its prompt is read.

All that is drawn is of this run: thoughts are of its output, rounds of its trace.
"""

from __future__ import annotations

import sys
import textwrap
from itertools import chain, repeat, zip_longest
from pathlib import Path
from typing import Any

from tinyspec.engine.engine import Engine
from tinyspec.engine.trace import PROMPT
from tinyspec.outputs import RequestOutput
from tinyspec.sampling_params import SamplingParams
from tinyspec.thinking.config import ThinkingConfig
from tinyspec.tools.diff import compare, summed_up
from tinyspec.tools.terminal import styled
from tinyspec.tools.trace import Run

# The model in the package that thinks (trained by ``python -m benchmarks.coin_reader.train``).
THINKER = Path(__file__).resolve().parent / "coin_reader"
COINS = "A coin's state is heads. Alice flips, then Bob flips. What's the state? A:"
# How the prompt is read, and how many chunks run at once; None: all of them.
WAYS = {"speculative": None, "sequential": 1}
# Of a line, of the labels in it, and of the narrowest column.
WIDTH, LABEL, LEAST = 100, 12, 8
# Of the figure, as far as a terminal has them.
Z, BLOCKS, S = "L_out  Z", "       T C", "L_in   S"
COLOURS = {Z: "canonical", BLOCKS: "accepted", S: "draft", "answer": "canonical"}
KEY = (
    "The state S is added to a chunk at L_in; T makes a thought Z of it at L_out, and C makes that "
    "the S of the next chunk. A thought that only ends gives none. The answer comes last."
)
STAYS, AGAIN = "\N{FULL BLOCK}", "\N{LIGHT SHADE}"


def demo_thinking(engines: dict[str, Engine], config: ThinkingConfig, prompt: str = COINS) -> int:
    """engines: of one model and its tokenizer, by the names of WAYS, with
    ``EngineConfig(trace=True)``. Returns 0 if both have the same thoughts and answers, bit for
    bit."""
    params = SamplingParams(
        max_new_tokens=8, thinking=True, deterministic=True, logprobs=True, prompt_logprobs=True
    )
    found = {name: engine.generate([prompt], params)[0] for name, engine in engines.items()}
    one, other = found.values()
    print("\n".join(textwrap.wrap(f"A model that reasons while it reads: {prompt}", WIDTH)) + "\n")
    print("\n".join(_figure(next(iter(engines.values())).tokenizer, config, one)))
    print("\n" + "\n".join(textwrap.wrap(KEY, WIDTH)) + "\n")
    halves = [_rounds(name, engines[name], found[name], config.chunk_size) for name in found]
    for left, right in zip_longest(*halves, fillvalue=""):
        print(f"{left:{WIDTH // 2}}{right}".rstrip())
    print(f"{STAYS} a chunk that stays, {AGAIN} one that ran before a thought was known, in vain")
    _, reason = summed_up(compare(one, other, 0).values())
    verdict = f"DIFFERENT: {reason}" if reason else "identical, bit for bit"
    verdict = styled(sys.stdout, "rejected" if reason else "accepted", verdict)
    print(f"\nthoughts, answers and log-probabilities of both ways: {verdict}")
    return 1 if reason else 0


def _figure(tokenizer: Any, config: ThinkingConfig, output: RequestOutput) -> list[str]:
    """A column for each chunk and one for the rest of the prompt, L_out above L_in."""
    ids, size, thoughts = output.prompt_token_ids, config.chunk_size, output.thoughts or []
    empty = [thought.token_ids[0] == config.end_token_id for thought in thoughts]
    states = [f"S{n} = 0" if e else f"S{n} = C(Z{n})" for n, e in enumerate([True, *empty])]
    parts = [ids[n * size : (n + 1) * size] for n in range(len(thoughts) + 1)]
    rows = {
        "": [*(f"chunk {n}" for n in range(len(thoughts))), "the rest"],
        Z: [f"Z{n} = {tokenizer.decode(z.token_ids)}" for n, z in enumerate(thoughts, 1)],
        BLOCKS: ["T \N{UPWARDS ARROW}  C \N{RIGHTWARDS ARROW}"] * len(thoughts),
        S: states,
        "tokens": [tokenizer.decode(part) if part else "" for part in parts],
        "answer": [*[""] * len(thoughts), (output.completions[0].text or "").strip()],
        "KV cache": ["\N{WHITE SQUARE}" * len(part) for part in parts],
    }
    widths = [max(map(len, column)) for column in zip_longest(*rows.values(), fillvalue="")]
    while sum(widths) > WIDTH - LABEL - 2 * len(widths) and max(widths) > LEAST:
        widths[widths.index(max(widths))] -= 1
    lines = []
    for name, cells in rows.items():
        wrapped = zip_longest(*map(textwrap.wrap, cells, widths), fillvalue="")
        texts = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in wrapped]
        for label, text in zip(chain([name], repeat("")), texts, strict=False):
            lines.append(label.ljust(LABEL) + styled(sys.stdout, COLOURS.get(name, ""), text))
    return lines


def _rounds(name: str, engine: Engine, output: RequestOutput, size: int) -> list[str]:
    """What each pass over the prompt ran, a mark for each chunk of ``size``."""
    parts = Run(engine.trace.passes(), {}).of((output.request_id, 0))
    works = [work for _, work in parts if work.kind == PROMPT]
    lines, ran = [], 0
    for number, work in enumerate(works, 1):
        first, end = work.start // size, -(-(work.start + work.rows) // size)
        marks = "".join(STAYS if n * size < work.kv else AGAIN for n in range(first, end))
        lines.append(f"  round {number}  {' ' * first}{marks}")
        ran += end - first
    return [f"{name}: {len(works)} rounds, {ran} chunks run", *lines]
