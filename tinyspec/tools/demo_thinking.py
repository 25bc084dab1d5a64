"""``tinyspec demo --thinking``: a small model reasons while it reads; its rounds are counted."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tinyspec.engine.engine import Engine
from tinyspec.outputs import RequestOutput, Thought
from tinyspec.sampling_params import SamplingParams
from tinyspec.thinking.config import ThinkingConfig
from tinyspec.tools.terminal import Style, table

# A model that was trained by ``python -m benchmarks.coin_reader.train parity``.
BUNDLED = Path(__file__).resolve().parent / "coin_reader"
PROMPT = (
    "A coin's state is heads. Alice flips the coin. The wind moves over the hill. A bird sings "
    "near the town. One cloud rests behind the wood. Bob flips the coin. What's the state? A:"
)
# How the prompt is read, and how many chunks run at once; None: all of them.
WAYS = {"speculative": None, "sequential": 1}
WIDTH = 86


def rounds(thoughts: Sequence[Thought], window: int | None, end: int) -> Iterator[tuple[int, int]]:
    """The chunks of each round, and how many of them stay: those up to the first whose thought is
    not trivial. end: the token that ends a thought."""
    done = 0
    while done < len(thoughts):
        here = thoughts[done : None if window is None else done + window]
        stay = next((n for n, t in enumerate(here, 1) if t.token_ids[0] != end), len(here))
        yield len(here), stay
        done += stay


def demo_thinking(engines: dict[str, Engine], config: ThinkingConfig, prompt: str) -> int:
    """engines: of one model and its tokenizer, by the names of WAYS. Returns 0 if both have the
    same thoughts and answers, bit for bit."""
    params = SamplingParams(
        max_new_tokens=8, thinking=True, deterministic=True, logprobs=True, prompt_logprobs=True
    )
    found = {name: engine.generate([prompt], params)[0] for name, engine in engines.items()}
    style = Style(sys.stdout)
    same = _bits(found["speculative"]) == _bits(found["sequential"])
    verdict = "identical, bit for bit" if same else "DIFFERENT"
    shown = [
        *textwrap.wrap(f"A model that reasons while it reads: {prompt!r}", WIDTH),
        "",
        *_chunks(engines["speculative"].tokenizer, config, found["speculative"], style),
        "",
        *_rounds(config, found),
        "",
        f"thoughts, answers and log-probabilities of both ways: {verdict}",
    ]
    print("\n".join(map(style.signs, shown)))
    return 0 if same else 1


def _chunks(
    tokenizer: Any, config: ThinkingConfig, output: RequestOutput, style: Style
) -> list[str]:
    """A line for each chunk: what is read, the state that is added to it, what is thought of it."""
    ids, size = output.prompt_token_ids, config.chunk_size
    rows: list[tuple[object, ...]] = [("", "reads", "with the state of", "thinks")]
    before = "nothing"
    for thought in output.thoughts or []:
        text = tokenizer.decode(ids[thought.chunk * size :][:size])
        said = tokenizer.decode(thought.token_ids)
        rows.append((f"chunk {thought.chunk}", text, before, f"T → {said}"))
        trivial = thought.token_ids[0] == config.end_token_id
        before = "nothing" if trivial else f"C({said})"
    if rest := ids[len(ids) // size * size :]:
        rows.append(("the rest", tokenizer.decode(rest), before, ""))
    answer = style("bold", (output.completions[0].text or "").strip())
    return [*table(rows), "", f"answer: {answer}"]


def _rounds(config: ThinkingConfig, found: dict[str, RequestOutput]) -> list[str]:
    """Both ways, chunk by chunk: ``█`` ran and stays, ``░`` ran and is computed again."""
    lines = []
    for name, window in WAYS.items():
        thoughts = found[name].thoughts or []
        drawn = list(rounds(thoughts, window, config.end_token_id))
        count = found[name].completions[0].stats.thinking_passes
        lines.append(f"{name}: {count} rounds, {sum(ran for ran, _ in drawn)} chunks run")
        done = 0
        for number, (ran, stay) in enumerate(drawn, 1):
            cells = " " * done + "█" * stay + "░" * (ran - stay)
            lines.append(f"  round {number:<3} {cells}")
            done += stay
    return lines


def _bits(output: RequestOutput) -> tuple[object, ...]:
    completion = output.completions[0]
    thoughts = [thought.token_ids for thought in output.thoughts or []]
    return thoughts, completion.token_ids, completion.logprobs, output.prompt_logprobs
