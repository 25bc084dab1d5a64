"""``tinyspec demo``: one request says something else in a crowd; with the flag it does not."""

from __future__ import annotations

import json
import sys
import textwrap
import time
from dataclasses import dataclass
from itertools import chain, count, cycle, islice
from pathlib import Path
from typing import Any

from tinyspec.engine.engine import Engine
from tinyspec.outputs import Completion, RequestOutput
from tinyspec.sampling_params import SamplingParams
from tinyspec.tools.comparison import first_place
from tinyspec.tools.terminal import Style, table
from tinyspec.tools.trace_run import run_of_passes
from tinyspec.tools.verify_picture import describe, lines

# The model in the package, for demos and tests without a network, and its prompts.
BUNDLED = Path(__file__).resolve().parent / "storyteller"
PROMPTS = BUNDLED / "demo_prompts.json"
# Chosen beforehand: with these seeds two tokens of the story are so close that the last bits decide
# between them. Where they decide alike, further seeds are tried, for so many seconds.
TEMPERATURE, PATIENCE = 0.8, 5.0
SEEDS = (39, 26, 163, 101, 162, 64)
WIDTH = 86
# Between what is the same and what is not, in text that is to be wrapped.
MARK = "\x00"


@dataclass
class Pair:
    """One request alone and in a crowd, and the outputs of the whole crowd."""

    alone: RequestOutput
    crowd: list[RequestOutput]

    @property
    def completions(self) -> tuple[Completion, Completion]:
        return self.alone.completions[0], self.crowd[0].completions[0]

    @property
    def parts_at(self) -> int | None:
        """The first token that differs; None where all are the same."""
        return first_place(*(completion.token_ids for completion in self.completions))

    @property
    def logprobs_differ(self) -> tuple[int, int]:
        """Of how many log-probabilities the bits differ, and how many were compared."""
        pairs = list(zip(*(c.logprobs or [] for c in self.completions), strict=False))
        return sum(a != b for a, b in pairs), len(pairs)

    @property
    def identical(self) -> bool:
        return self.parts_at is None and self.logprobs_differ[0] == 0


class Demo:
    """The request, the crowd around it, and what is printed of them."""

    def __init__(self, engine: Engine, crowd: int, max_new_tokens: int):
        self.engine, self.tokens = engine, max_new_tokens
        self.style = Style(sys.stdout)
        found = json.loads(PROMPTS.read_text(encoding="utf-8"))
        self.prompts = [found["story"], *islice(cycle(found["crowd"]), crowd)]
        self.others = [
            SamplingParams(
                max_new_tokens=max_new_tokens,
                temperature=0.9 * (n % 2),
                seed=n,
                deterministic=n % 3 == 0,
            )
            for n in range(crowd)
        ]

    def pair(self, seed: int, deterministic: bool) -> Pair:
        """The request by itself, then among the others."""
        mine = SamplingParams(
            max_new_tokens=self.tokens,
            temperature=TEMPERATURE,
            seed=seed,
            logprobs=True,
            deterministic=deterministic,
        )
        alone = self.engine.generate(self.prompts[0], mine)[0]
        return Pair(alone, self.engine.generate(self.prompts, [mine, *self.others]))

    def find(self, seed: int | None, patience: float) -> tuple[int, Pair, int]:
        """The first seed (from ``seed`` on, or of those chosen beforehand and all others) with
        which the plain request says something else in the crowd, its outputs, and how many were
        tried; the first of them where none does in time."""
        seeds = chain(SEEDS, count()) if seed is None else count(seed)
        first = next(seeds)
        pair = self.pair(first, deterministic=False)
        begun, tried, found = time.perf_counter(), 1, (first, pair)
        while found[1].parts_at is None and time.perf_counter() - begun < patience:
            seed = next(seeds)
            found, tried = (seed, self.pair(seed, deterministic=False)), tried + 1
        return (first, pair, tried) if found[1].parts_at is None else (*found, tried)

    def say(self, text: str = "") -> None:
        print(self.style.signs(text))

    def show(self, pair: Pair) -> None:
        """Both texts, one below the other, tokens that differ in colour."""
        one, other = pair.completions
        for name, mine, its in (("alone", one, other), ("in a crowd", other, one)):
            self.say(f"  {self.style('bold', name)}")
            words = self._marked(mine.token_ids, its.token_ids)
            self.say(textwrap.indent(words, "    "))

    def _marked(self, mine: list[int], its: list[int]) -> str:
        """Text of tokens in lines; those that differ in colour, or from a sign on."""
        differ = [n >= len(its) or token != its[n] for n, token in enumerate(mine)]
        start = differ.index(True) if True in differ else len(mine)
        decode = self.engine.tokenizer.decode
        same = decode(mine[:start], skip_special_tokens=True)
        rest = decode(mine, skip_special_tokens=True)[len(same) :]
        sign = MARK if self.style.colour else ">>>"
        words = f"{same}{sign}{rest}" if rest else same
        head, _, tail = "\n".join(textwrap.wrap(words.strip(), WIDTH)).partition(MARK)
        coloured = "\n".join(self.style("differs", line) for line in tail.split("\n") if line)
        return head + coloured


def demo(
    engine: Engine,
    crowd: int,
    max_new_tokens: int,
    seed: int | None = None,
    patience: float = PATIENCE,
) -> int:
    """Returns 0 if the deterministic request has the same bits alone and among ``crowd`` others,
    whatever the plain one does. engine: with ``EngineConfig(trace=True)``."""
    one = Demo(engine, crowd, max_new_tokens)
    say, style = one.say, one.style
    dtype = str(engine.model.dtype).removeprefix("torch.")
    say(f'One request, "{" ".join(one.prompts[0].split())}", in {dtype} at temperature')
    say(f"{TEMPERATURE} with a seed: alone, and among {crowd} others.\n")
    found, plain, tried = one.find(seed, patience)
    say(style("bold", f"deterministic=False, seed {found}"))
    one.show(plain)
    _tell_plain(one, plain, tried)
    say(style("bold", f"deterministic=True, seed {found}"))
    before = len(engine.trace)
    kept = one.pair(found, deterministic=True)
    one.show(kept)
    compared = kept.logprobs_differ[1]
    verdict = f"{style('rejected', 'NOT THE SAME')}: the promise is broken"
    if kept.identical:
        verdict = style("accepted", "identical, bit for bit")
    say(f"  {compared} tokens and {compared} log-probabilities: {verdict}\n")
    _tell_verify(one, kept, before)
    _tell_crowd(one, kept)
    say(f"\nfingerprint {kept.alone.fingerprint}")
    return 0 if kept.identical else 1


def _tell_plain(one: Demo, pair: Pair, tried: int) -> None:
    differ, compared = pair.logprobs_differ
    more = f" ({tried} seeds tried)" if tried > 1 else ""
    at = pair.parts_at
    if at is None:
        says = "no text differed on this machine"
    else:
        says = f"{one.style('rejected', 'another text')} from token {at + 1} on"
    one.say(f"  {says}{more}; the bits of {differ} of {compared} log-probabilities differ\n")


def _tell_verify(one: Demo, pair: Pair, before: int) -> None:
    """One verify of the run with the flag."""
    passes: list[Any] = one.engine.trace.passes()[before:]
    run = run_of_passes(passes, one.engine.tokenizer)
    found = describe(run, prefer=pair.crowd[0].request_id)
    if found is None:
        one.say("No pass of this run had drafts to verify (--verify always drafts).\n")
        return
    mine = {pair.crowd[0].request_id: "this request", pair.alone.request_id: "this request, alone"}
    found.name = mine.get(found.name, found.name)
    print("\n".join(lines(found, one.style)), end="\n\n")


def _tell_crowd(one: Demo, pair: Pair) -> None:
    one.say("The crowd:\n")
    rows: list[tuple[object, ...]] = [
        ("request", "kind", "tokens", "drafted", "accepted", "rolled back", "verifies")
    ]
    for n, output in enumerate(pair.crowd):
        completion = output.completions[0]
        stats, params = completion.stats, output.params
        kind = "sampled" if params.temperature else "greedy"
        kind += ", deterministic" if params.deterministic else ", plain"
        counts = (stats.drafted, stats.accepted, stats.rolled_back, stats.verify_passes)
        rows.append((n, kind, len(completion.token_ids), *counts))
    for line in table(rows, right=range(2, 7)):
        one.say(f"  {line}".rstrip())
