"""``tinyspec demo --thinking``: a small model that reasons while it reads, drawn as the figure of
Thinking States (arXiv 2602.08332, 2a), with the same thoughts however its prompt is read.

All that is drawn is of this run: thoughts are of its output, rounds of its trace.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from tinyspec.engine.engine import Engine
from tinyspec.engine.trace import PROMPT, TracedWork
from tinyspec.outputs import RequestOutput
from tinyspec.sampling_params import SamplingParams
from tinyspec.thinking.config import ThinkingConfig
from tinyspec.tools.diff import compare, summed_up
from tinyspec.tools.terminal import styled

# The model in the package that thinks (trained by ``python -m benchmarks.coin_reader.train``).
THINKER = Path(__file__).resolve().parent / "coin_reader"
COINS = "A coin's state is heads. Alice flips, then Bob flips. What's the state? A:"
# How the prompt is read, and how many chunks run at once; None: all of them.
WAYS = {"speculative": None, "sequential": 1}
# Of a line, of the labels in it, and of the narrowest column.
WIDTH, LABEL, LEAST = 100, 12, 8
# Of the figure, as far as a terminal has them.
COLOURS = {"Z": "canonical", "T C": "accepted", "S": "draft", "answer": "canonical"}
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
    tokenizer = next(iter(engines.values())).tokenizer
    print("\n".join(textwrap.wrap(f"A model that reasons while it reads: {prompt}", WIDTH)) + "\n")
    print("\n".join(_figure(tokenizer, config, one)))
    print("\n" + "\n".join(textwrap.wrap(KEY, WIDTH)) + "\n")
    halves = [
        _rounds(name, engines[name], output.request_id, config.chunk_size)
        for name, output in found.items()
    ]
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
    said = [tokenizer.decode(thought.token_ids) for thought in thoughts]
    empty = [thought.token_ids[0] == config.end_token_id for thought in thoughts]
    states = ["S0 = 0"]
    states += [f"S{n} = 0" if e else f"S{n} = C(Z{n})" for n, e in enumerate(empty, 1)]
    parts = [ids[n * size : (n + 1) * size] for n in range(len(thoughts))]
    parts.append(ids[len(thoughts) * size :])
    answer = (output.completions[0].text or "").strip()
    rows = {
        "": [*(f"chunk {n}" for n in range(len(thoughts))), "the rest"],
        "Z": [f"Z{n} = {text}" for n, text in enumerate(said, 1)],
        "T C": ["T \N{UPWARDS ARROW}  C \N{RIGHTWARDS ARROW}"] * len(thoughts),
        "S": states,
        "tokens": [tokenizer.decode(part) if part else "" for part in parts],
        "answer": [""] * len(thoughts) + [answer],
        "KV cache": ["\N{WHITE SQUARE}" * len(part) for part in parts],
    }
    places = {"Z": "L_out  ", "T C": " " * 7, "S": "L_in   "}
    widths = [max(map(len, column)) for column in zip_longest(*rows.values(), fillvalue="")]
    while sum(widths) > WIDTH - LABEL - 2 * len(widths) and max(widths) > LEAST:
        widths[widths.index(max(widths))] -= 1
    lines = []
    for name, cells in rows.items():
        label = places.get(name, "") + name
        wrapped = map(textwrap.wrap, cells, widths)
        for line in zip_longest(*wrapped, fillvalue=""):
            text = "  ".join(map(str.ljust, line, widths)).rstrip()
            lines.append(label.ljust(LABEL) + styled(sys.stdout, COLOURS.get(name, ""), text))
            label = ""
    return lines


def _rounds(name: str, engine: Engine, request_id: str, size: int) -> list[str]:
    """What each pass over the prompt ran, a mark for each chunk of ``size``."""
    traced: Sequence[Any] = engine.trace.passes()
    works: list[TracedWork] = [
        work
        for one in traced
        for work in one.works
        if work.request_id == request_id and work.kind == PROMPT
    ]
    lines, ran = [], 0
    for number, work in enumerate(works, 1):
        first, end = work.start // size, -(-(work.start + work.rows) // size)
        marks = "".join(STAYS if n * size < work.kv else AGAIN for n in range(first, end))
        lines.append(f"  round {number}  {' ' * first}{marks}")
        ran += end - first
    return [f"{name}: {len(works)} rounds, {ran} chunks run", *lines]
