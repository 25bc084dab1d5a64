"""``tinyspec demo``: one request says something else in a crowd, with the flag it does not; and a
model that reasons while it reads."""

from __future__ import annotations

import json
import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, count, cycle, islice, repeat, zip_longest
from pathlib import Path
from typing import Any

from tinyspec.engine.engine import Engine
from tinyspec.engine.trace import PROMPT, chrome_trace
from tinyspec.outputs import RequestOutput
from tinyspec.sampling_params import SamplingParams
from tinyspec.thinking.config import ThinkingConfig
from tinyspec.tools.diff import compare, first_place, summed_up
from tinyspec.tools.terminal import Diagram, lines, styled
from tinyspec.tools.trace import Run, find_verify, run_of

# The model in the package that tells stories, for demos and tests without a network.
BUNDLED = Path(__file__).resolve().parent / "storyteller"
# Chosen beforehand: with these seeds two tokens of the story are so close that the last bits decide
# between them. Where they decide alike, further seeds are tried, for so many seconds.
TEMPERATURE, PATIENCE = 0.8, 5.0
SEEDS = (39, 26, 163, 101, 162, 64)
# Of a text: the width of a line, and how many are shown.
WIDTH, LINES = 80, 2
WORDS = {True: "with a rollback", False: "without a rollback"}
# Between what is the same and what is not.
MARK = ">>>"

# The model in the package that thinks (trained by ``python -m benchmarks.coin_reader.train``).
THINKER = Path(__file__).resolve().parent / "coin_reader"
COINS = "A coin's state is heads. Alice flips, then Bob flips. What's the state? A:"
# How the prompt is read, and how many chunks run at once; None: all of them.
WAYS = {"speculative": None, "sequential": 1}
# Of a line, of the labels in it, and of the narrowest column.
PAGE, LABEL, LEAST = 100, 12, 8
# Of the figure, as far as a terminal has them.
Z, BLOCKS, S = "L_out  Z", "       T C", "L_in   S"
COLOURS = {Z: "canonical", BLOCKS: "accepted", S: "draft", "answer": "canonical"}
KEY = (
    "The state S is added to a chunk at L_in; T makes a thought Z of it at L_out, and C makes that "
    "the S of the next chunk. A thought that only ends gives none. The answer comes last."
)
STAYS, AGAIN = "\N{FULL BLOCK}", "\N{LIGHT SHADE}"


def verdict_on(one: RequestOutput, other: RequestOutput) -> tuple[str, str]:
    """What differs between two outputs of a request, and that in words and a colour."""
    _, reason = summed_up(compare(one, other, 0).values())
    told = f"DIFFERENT: {reason}" if reason else "identical, bit for bit"
    return reason, styled(sys.stdout, "rejected" if reason else "accepted", told)


class Demo:
    """The request, the crowd around it, and what is printed of them."""

    def __init__(self, engine: Engine, crowd: int, max_new_tokens: int):
        self.engine = engine
        found = json.loads((BUNDLED / "demo_prompts.json").read_text(encoding="utf-8"))
        self.prompts = [found["story"], *islice(cycle(found["crowd"]), crowd)]
        self.mine = SamplingParams(max_new_tokens=max_new_tokens, temperature=TEMPERATURE)
        self.others = [
            replace(self.mine, temperature=0.9 * (n % 2), seed=n, deterministic=n % 3 == 0)
            for n in range(crowd)
        ]

    def pair(self, seed: int, deterministic: bool) -> list[RequestOutput]:
        """The request by itself, then among the others."""
        mine = replace(self.mine, seed=seed, deterministic=deterministic, logprobs=True)
        alone = self.engine.generate(self.prompts[0], mine)
        return [*alone, self.engine.generate(self.prompts, [mine, *self.others])[0]]

    def show(self, pair: list[RequestOutput]) -> None:
        """Both texts, one below the other, or one where they are the same."""
        at = _parts_at(pair)
        names = ("alone", "in a crowd") if at is not None else ("both",)
        for name, output in zip(names, pair, strict=False):
            words = self.marked(output.completions[0].token_ids, at)
            print(f"  {name:<12}" + textwrap.indent(words, " " * 14).lstrip(" "))

    def marked(self, tokens: list[int], at: int | None) -> str:
        """Text in lines, of which few are shown; before token ``at`` stands a mark."""
        decode = self.engine.tokenizer.decode
        same = decode(tokens[:at], skip_special_tokens=True)
        rest = decode(tokens, skip_special_tokens=True)[len(same) :]
        found = textwrap.wrap((f"{same}{MARK}{rest}" if rest else same).strip(), WIDTH)
        first = max([0, *(n - 1 for n, line in enumerate(found) if MARK in line)])
        left = ("... " if first else "") + " ".join(found[first:])
        return "\n".join(textwrap.wrap(left, WIDTH, max_lines=LINES, placeholder=" ..."))


class Liar:
    """A drafter that knows the answer to one request: it lies about the last draft of the first
    verify, and tells the truth afterwards."""

    def __init__(self, output: RequestOutput):
        self.prompt = len(output.prompt_token_ids)
        self.known = [*output.prompt_token_ids, *output.completions[0].token_ids]

    def propose(self, sequences: list[Sequence[int]], n: int) -> list[list[int]]:
        drafts = [self.known[len(tokens) :][:n] for tokens in sequences]
        if drafts[0] and len(sequences[0]) <= self.prompt + 1:
            # Another token of this text, so that it can be read.
            drafts[0][-1] = next(token for token in self.known if token != drafts[0][-1])
        return drafts


def outcomes(engine: Engine, since: int, names: dict[str, str]) -> dict[bool, Diagram | None]:
    """A verify with a rollback (True) and one without, of the passes after the first ``since``."""
    run = run_of(chrome_trace(engine.trace.passes()[since:], engine.tokenizer))
    return {rollback: find_verify(run, rollback, names) for rollback in WORDS}


def show_outcomes(one: Demo, seed: int, since: int, pair: list[RequestOutput]) -> bool:
    """Both outcomes of a verify of this run; what the fast path has not given, by a liar. Whether
    lies left the tokens as they were."""
    alone, crowd = (output.request_id for output in pair)
    names = {alone: "this request alone", crowd: "this request in the crowd"}
    found, same = outcomes(one.engine, since, names), True
    lacking = [WORDS[each] for each in found if found[each] is None]
    if lacking:
        setting = replace(one.engine.config, verify="always", drafter=Liar(pair[0]))
        with Engine(one.engine.model, one.engine.tokenizer, setting) as lied_to:
            mine = replace(one.mine, seed=seed, deterministic=True)
            (again,) = lied_to.generate(one.prompts[:1], mine)
            supplied = outcomes(lied_to, 0, {again.request_id: names[alone]})
        found = {each: found[each] or supplied[each] for each in found}
        same = _parts_at([again, pair[0]]) is None
        result = "the same tokens" if same else "OTHER TOKENS: the promise is broken"
        told = f"The fast path gave no verify {' nor '.join(lacking)} in this run, so a drafter "
        told += f"that lies on purpose, once, drafts below: {result}."
        print(textwrap.fill(told, 98))
    for each, diagram in found.items():
        short = f"The request is too short for a verify {WORDS[each]}: give --max-new-tokens 12."
        print("\n".join(lines(diagram, sys.stdout) if diagram else [short]) + "\n")
    return same


def _parts_at(pair: list[RequestOutput]) -> int | None:
    """The first token that differs; None where all are the same."""
    return first_place(*(output.completions[0].token_ids for output in pair))


def demo(
    engine: Engine,
    crowd: int,
    max_new_tokens: int,
    patience: float = PATIENCE,
    rollback: bool = False,
) -> int:
    """Returns 0 if the deterministic request has the same bits alone and among ``crowd`` others,
    whatever the plain one does. engine: with ``EngineConfig(trace=True)``. rollback: only a verify
    with a rollback and one without are shown."""
    one = Demo(engine, crowd, max_new_tokens)
    found = SEEDS[0] if rollback else show_plain(one, patience)
    before = len(engine.trace)
    kept = one.pair(found, deterministic=True)
    reason, verdict = verdict_on(*kept)
    tokens = len(kept[0].completions[0].token_ids)
    if not rollback:
        print(styled(sys.stdout, "bold", f"deterministic=True, seed {found}"), end=", ")
        print(f"{tokens} tokens and {tokens} log-probabilities: {verdict}")
        one.show(kept)
        print()
    if not show_outcomes(one, found, before, kept):
        reason = reason or "a drafter that lied has changed them"
    proven = f"Proven: deterministic=True kept all {tokens} tokens and log-probabilities"
    proven = f"The promise is broken: {reason}" if reason else proven
    print(f"{proven}, alone and among {crowd} others.")
    print(f"Next: tinyspec {'trace --help' if rollback else 'demo --rollback'}")
    return 1 if reason else 0


def show_plain(one: Demo, patience: float) -> int:
    """What the plain request says alone and in the crowd; the seed it was shown with: the first, of
    those chosen beforehand and then of all, with which that differs, or where none does in time the
    last."""
    dtype = str(one.engine.model.dtype).removeprefix("torch.")
    print(f'One request, "{" ".join(one.prompts[0].split())}", in {dtype} at temperature')
    print(f"{TEMPERATURE} with a seed: alone, and among {len(one.others)} others.\n")
    begun, tried = time.perf_counter(), 0
    for found in chain(SEEDS, count()):
        plain, tried = one.pair(found, deterministic=False), tried + 1
        at = _parts_at(plain)
        if at is not None or time.perf_counter() - begun >= patience:
            break
    print(styled(sys.stdout, "bold", f"deterministic=False, seed {found}"))
    one.show(plain)
    pairs = list(zip(*(o.completions[0].logprobs or [] for o in plain), strict=False))
    more = f" ({tried} seeds tried)" if tried > 1 else ""
    says = "no text differed on this machine" if at is None else f"another text from token {at + 1}"
    bits = f"the bits of {sum(a != b for a, b in pairs)} of {len(pairs)} log-probabilities differ"
    print(f"  {says}{' on' if at is not None else ''}{more}; {bits}\n")
    return found


def demo_thinking(engines: dict[str, Engine], config: ThinkingConfig, prompt: str = COINS) -> int:
    """A small model that reasons while it reads, drawn as the figure of Thinking States (arXiv
    2602.08332, 2a), with the same thoughts however its prompt is read. All that is drawn is of this
    run: thoughts are of its output, rounds of its trace.

    engines: of one model and its tokenizer, by the names of WAYS, with
    ``EngineConfig(trace=True)``. Returns 0 if both have the same thoughts and answers, bit for bit.
    """
    params = SamplingParams(
        max_new_tokens=8, thinking=True, deterministic=True, logprobs=True, prompt_logprobs=True
    )
    found = {name: engine.generate([prompt], params)[0] for name, engine in engines.items()}
    one, other = found.values()
    print("\n".join(textwrap.wrap(f"A model that reasons while it reads: {prompt}", PAGE)) + "\n")
    print("\n".join(_figure(next(iter(engines.values())).tokenizer, config, one)))
    print("\n" + "\n".join(textwrap.wrap(KEY, PAGE)) + "\n")
    halves = [_rounds(name, engines[name], found[name], config.chunk_size) for name in found]
    for left, right in zip_longest(*halves, fillvalue=""):
        print(f"{left:{PAGE // 2}}{right}".rstrip())
    print(f"{STAYS} a chunk that stays, {AGAIN} one that ran before a thought was known, in vain")
    reason, verdict = verdict_on(one, other)
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
    while sum(widths) > PAGE - LABEL - 2 * len(widths) and max(widths) > LEAST:
        widths[widths.index(max(widths))] -= 1
    found = []
    for name, cells in rows.items():
        wrapped = zip_longest(*map(textwrap.wrap, cells, widths), fillvalue="")
        texts = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in wrapped]
        for label, text in zip(chain([name], repeat("")), texts, strict=False):
            found.append(label.ljust(LABEL) + styled(sys.stdout, COLOURS.get(name, ""), text))
    return found


def _rounds(name: str, engine: Engine, output: RequestOutput, size: int) -> list[str]:
    """What each pass over the prompt ran, a mark for each chunk of ``size``."""
    parts = Run(engine.trace.passes(), {}).of((output.request_id, 0))
    works = [work for _, work in parts if work.kind == PROMPT]
    rounds, ran = [], 0
    for number, work in enumerate(works, 1):
        first, end = work.start // size, -(-(work.start + work.rows) // size)
        marks = "".join(STAYS if n * size < work.kv else AGAIN for n in range(first, end))
        rounds.append(f"  round {number}  {' ' * first}{marks}")
        ran += end - first
    return [f"{name}: {len(works)} rounds, {ran} chunks run", *rounds]
