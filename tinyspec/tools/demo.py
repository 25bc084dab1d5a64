"""``tinyspec demo``: one request says something else in a crowd, with the flag it does not."""

from __future__ import annotations

import json
import sys
import textwrap
import time
from itertools import chain, count, cycle, islice
from pathlib import Path
from typing import Any

from tinyspec.engine.engine import Engine
from tinyspec.engine.trace import chrome_trace
from tinyspec.outputs import RequestOutput
from tinyspec.sampling_params import SamplingParams
from tinyspec.tools.diff import compare, first_place, summed_up
from tinyspec.tools.terminal import lines, styled
from tinyspec.tools.trace import find_verify, run_of

# The model in the package that tells stories, for demos and tests without a network.
BUNDLED = Path(__file__).resolve().parent / "storyteller"
# Chosen beforehand: with these seeds two tokens of the story are so close that the last bits decide
# between them. Where they decide alike, further seeds are tried, for so many seconds.
TEMPERATURE, PATIENCE = 0.8, 5.0
SEEDS = (39, 26, 163, 101, 162, 64)
WIDTH = 86
# Between what is the same and what is not, in text that is to be wrapped.
MARK = "\x00"


class Demo:
    """The request, the crowd around it, and what is printed of them."""

    def __init__(self, engine: Engine, crowd: int, max_new_tokens: int):
        self.engine, self.tokens = engine, max_new_tokens
        found = json.loads((BUNDLED / "demo_prompts.json").read_text(encoding="utf-8"))
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

    def pair(self, seed: int, deterministic: bool) -> list[RequestOutput]:
        """The request by itself, then among the others."""
        mine = SamplingParams(
            max_new_tokens=self.tokens,
            temperature=TEMPERATURE,
            seed=seed,
            logprobs=True,
            deterministic=deterministic,
        )
        alone = self.engine.generate(self.prompts[0], mine)
        return [*alone, self.engine.generate(self.prompts, [mine, *self.others])[0]]

    def find(self, seed: int | None, patience: float) -> tuple[int, list[RequestOutput], int]:
        """The first seed (from ``seed`` on, or of those chosen beforehand and all others) with
        which the plain request says something else in the crowd, its outputs, and how many were
        tried; the first of them where none does in time."""
        seeds = chain(SEEDS, count()) if seed is None else count(seed)
        begun, first = time.perf_counter(), next(seeds)
        pair = self.pair(first, deterministic=False)
        one, tried, found = first, 1, pair
        while _parts_at(found) is None and time.perf_counter() - begun < patience:
            one, tried = next(seeds), tried + 1
            found = self.pair(one, deterministic=False)
        return (first, pair, tried) if _parts_at(found) is None else (one, found, tried)

    def show(self, pair: list[RequestOutput]) -> None:
        """Both texts, one below the other, tokens that differ in colour."""
        at = _parts_at(pair)
        for name, output in zip(("alone", "in a crowd"), pair, strict=True):
            print(f"  {styled(sys.stdout, 'bold', name)}")
            words = self.marked(output.completions[0].token_ids, at)
            print(textwrap.indent(words, "    "))

    def marked(self, tokens: list[int], at: int | None) -> str:
        """Text in lines; from token ``at`` on in colour, or behind a sign."""
        decode = self.engine.tokenizer.decode
        same = decode(tokens[:at], skip_special_tokens=True)
        rest = decode(tokens, skip_special_tokens=True)[len(same) :]
        sign = MARK if sys.stdout.isatty() else ">>>"
        words = f"{same}{sign}{rest}" if rest else same
        head, _, tail = "\n".join(textwrap.wrap(words.strip(), WIDTH)).partition(MARK)
        parts = tail.split("\n")
        return head + "\n".join(styled(sys.stdout, "differs", line) for line in parts if line)


def _parts_at(pair: list[RequestOutput]) -> int | None:
    """The first token that differs; None where all are the same."""
    return first_place(*(output.completions[0].token_ids for output in pair))


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
    dtype = str(engine.model.dtype).removeprefix("torch.")
    print(f'One request, "{" ".join(one.prompts[0].split())}", in {dtype} at temperature')
    print(f"{TEMPERATURE} with a seed: alone, and among {crowd} others.\n")
    found, plain, tried = one.find(seed, patience)
    print(styled(sys.stdout, "bold", f"deterministic=False, seed {found}"))
    one.show(plain)
    pairs = list(zip(*(o.completions[0].logprobs or [] for o in plain), strict=False))
    at, more = _parts_at(plain), f" ({tried} seeds tried)" if tried > 1 else ""
    says = "no text differed on this machine" if at is None else f"another text from token {at + 1}"
    bits = f"the bits of {sum(a != b for a, b in pairs)} of {len(pairs)} log-probabilities differ"
    print(f"  {says}{' on' if at is not None else ''}{more}; {bits}\n")
    print(styled(sys.stdout, "bold", f"deterministic=True, seed {found}"))
    before = len(engine.trace)
    kept = one.pair(found, deterministic=True)
    one.show(kept)
    _, reason = summed_up(compare(kept[0], kept[1], 0).values())
    tokens = len(kept[0].completions[0].token_ids)
    verdict = (
        f"NOT THE SAME: {reason}: the promise is broken" if reason else "identical, bit for bit"
    )
    coloured = styled(sys.stdout, "rejected" if reason else "accepted", verdict)
    print(f"  {tokens} tokens and {tokens} log-probabilities: {coloured}\n")
    passes: list[Any] = engine.trace.passes()[before:]
    run = run_of(chrome_trace(passes, engine.tokenizer))
    verify = find_verify(run, {kept[1].request_id: "this request"})
    if verify is None:
        print("No pass of this run had drafts to verify (--verify always drafts).")
    else:
        print("\n".join(lines(verify, sys.stdout)))
    print(f"\nfingerprint {kept[0].fingerprint}")
    return 1 if reason else 0
