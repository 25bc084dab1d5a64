"""``tinyspec demo --thinking``: a small model reasons while it reads; its rounds are counted."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from tinyspec.config import EngineConfig
from tinyspec.engine.engine import Engine
from tinyspec.outputs import RequestOutput, Thought
from tinyspec.sampling_params import SamplingParams
from tinyspec.thinking.model import ThinkingModel
from tinyspec.tools.table import table
from tinyspec.tools.terminal import Style

# A model that was trained by ``python -m tinyspec.thinking.train parity``.
BUNDLED = Path(__file__).resolve().parent / "coin_reader"
PROMPT = "A coin's state is heads. Alice flips the coin. Bob flips the coin. What's the state? A:"
# How the prompt is read: name, chunks that run at once (None: all of them).
WAYS = (("speculative", None), ("sequential", 1))
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


def demo_thinking(model: ThinkingModel, tokenizer: object, prompt: str) -> int:
    """Returns 0 if both ways of reading have the same thoughts and answers, bit for bit."""
    params = SamplingParams(
        max_new_tokens=8, thinking=True, deterministic=True, logprobs=True, prompt_logprobs=True
    )
    found: dict[str, RequestOutput] = {}
    for name, window in WAYS:
        config = EngineConfig(thinking_window=window)
        with Engine(model, tokenizer, config) as engine:
            found[name] = engine.generate([prompt], params)[0]
    output = found["speculative"]
    style = Style(sys.stdout)
    print("\n".join(textwrap.wrap(f"A model that reasons while it reads: {prompt!r}", WIDTH)))
    print("\n" + "\n".join(map(style.signs, _chunks(model, tokenizer, output, style))))
    print("\n" + "\n".join(map(style.signs, _rounds(model, found))))
    same = _bits(found["speculative"]) == _bits(found["sequential"])
    verdict = "identical, bit for bit" if same else "DIFFERENT"
    print(f"\nthoughts, answers and log-probabilities of both ways: {verdict}")
    return 0 if same else 1


def _chunks(
    model: ThinkingModel, tokenizer: object, output: RequestOutput, style: Style
) -> list[str]:
    """A line for each chunk: what is read, the state that is added to it, what is thought of it."""
    config = model.thinking_config
    ids, size = output.prompt_token_ids, config.chunk_size
    rows: list[tuple[object, ...]] = [("", "reads", "with the state of", "thinks")]
    before = "nothing"
    for thought in output.thoughts or []:
        start = thought.chunk * size
        text = tokenizer.decode(ids[start : start + size])  # type: ignore[attr-defined]
        said = tokenizer.decode(thought.token_ids)  # type: ignore[attr-defined]
        rows.append((f"chunk {thought.chunk}", text, before, f"T → {said}"))
        trivial = thought.token_ids[0] == config.end_token_id
        before = "nothing" if trivial else f"C({said})"
    if rest := ids[len(ids) // size * size :]:
        rows.append(("the rest", tokenizer.decode(rest), before, ""))  # type: ignore[attr-defined]
    answer = style("bold", (output.completions[0].text or "").strip())
    return [*table(rows), "", f"answer: {answer}"]


def _rounds(model: ThinkingModel, found: dict[str, RequestOutput]) -> list[str]:
    """Both ways, chunk by chunk: ``█`` ran and stays, ``░`` ran and is computed again."""
    end = model.thinking_config.end_token_id
    lines = []
    for name, window in WAYS:
        thoughts = found[name].thoughts or []
        drawn = list(rounds(thoughts, window, end))
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
