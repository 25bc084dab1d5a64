"""What drafts are worth: deterministic requests with a drafter against plain ones without any.

    python -m benchmarks.bench_drafts [--dtype bfloat16] [--assistant 1] [--requests 1 4 16 64]
        [--temperatures 1 0] [--rounds 5] [--threads 2] [--folder DIR] [--smoke]

Target and assistant are the pair of ``benchmarks.storyteller.pair``, made first where they are not
there. All sides run in turns in one process: two engines, with the drafter and without, and at one
request transformers' own ``generate``, alone and with the assistant. Prompts ask for stories or
begin them and are read anew in every round; answers have 96 tokens. Before it is timed,
deterministic requests are shown to have the same tokens with and without the drafter.

Prints Markdown: medians over rounds of ratios, above 1 where deterministic requests with drafts are
faster. Beside them a, the part of drafts that were right where those before them were (accepted /
(accepted + rollbacks)), drafts and tokens of a verify, and what the formula (1 - a^(k+1)) / (1 - a)
/ (v + k d) predicts, where a draft for each takes d plain steps and a verify with k of each takes
v. The drafter "ngram" looks tokens up in the text, where it repeats itself and where it does not.
On a machine that does something else meanwhile the times mean nothing.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from operator import truediv
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from benchmarks.render import table
from benchmarks.storyteller import pair
from benchmarks.storyteller.questions import open_prompts
from benchmarks.workloads import random_tokens, timed
from tinyspec import Engine, EngineConfig, SamplingParams
from tinyspec.tools.demo import BUNDLED

TOKENS, REPEATED = 96, 24
# Fewer requests than these at once run one call after the other until there were as many.
LEAST = 4
HEADER = (
    *("text", "drafter", "requests", "T", "deterministic with drafts over plain", "predicted"),
    *("a", "drafts a verify", "tokens a verify", "plain with drafts over plain"),
    *("deterministic without over plain", "over `generate`", "over assisted `generate`"),
)
Prompts = list[list[int]]
Run = Callable[[], Prompts]


class Bench:
    """A model, without a drafter and with one: ``assistant``, or n-gram where that is None."""

    def __init__(self, model: Any, assistant: Any, smoke: bool):
        self.model, self.assistant = model, assistant
        self.tokens, config = TOKENS, EngineConfig(prefix_cache=False)
        if smoke:
            self.tokens, config = (
                8,
                replace(config, max_rows=64, reference_rows=16, verify="always"),
            )
        self.source = "ngram" if assistant is None else "assistant"
        drafters = None, "ngram" if assistant is None else assistant
        self.plain, self.drafting = (
            Engine(model, config=replace(config, drafter=one)) for one in drafters
        )
        for engine in () if smoke else (self.plain, self.drafting):
            engine.warm_up()

    def close(self) -> None:
        self.plain.close()
        self.drafting.close()

    def by_engine(
        self, engine: Engine, exact: bool, prompts: Prompts, size: int, heat: float
    ) -> Run:
        """``size`` prompts in a call."""
        given: dict[str, Any] = {"temperature": heat, "deterministic": exact, "ignore_eos": True}
        given |= {"max_new_tokens": self.tokens}
        params = [SamplingParams(**given, seed=number) for number in range(len(prompts))]

        def run() -> Prompts:
            found = []
            for first in range(0, len(prompts), size):
                some = slice(first, first + size)
                outputs = engine.generate(prompts[some], params[some])
                found += [output.completions[0].token_ids for output in outputs]
            return found

        return run

    def by_transformers(self, prompts: Prompts, heat: float, **more: Any) -> Run:
        """One prompt in a call; temperature ``heat``."""
        given = {"max_new_tokens": self.tokens, "do_sample": heat > 0, "pad_token_id": 1, **more}
        given |= {"temperature": heat, "top_k": 0} if heat else {}

        def run() -> Prompts:
            found = []
            for number, prompt in enumerate(prompts):
                torch.manual_seed(number)
                ids = torch.tensor([prompt])
                out = self.model.generate(ids, attention_mask=torch.ones_like(ids), **given)
                found.append(out[0, len(prompt) :].tolist())
            return found

        return run

    def row(self, text: str, prompts: Prompts, size: int, heat: float, rounds: int) -> list[Any]:
        """A line of the table. heat: the temperature."""
        given = prompts, size, heat
        ours = "deterministic with drafts"
        sides = {
            "plain": self.by_engine(self.plain, False, *given),
            "plain with drafts": self.by_engine(self.drafting, False, *given),
            "deterministic": self.by_engine(self.plain, True, *given),
            ours: self.by_engine(self.drafting, True, *given),
        }
        if size == 1 and self.assistant is not None:
            sides["generate"] = self.by_transformers(prompts, heat)
            sides["assisted"] = self.by_transformers(prompts, heat, assistant_model=self.assistant)
        found = {name: run() for name, run in sides.items()}  # warms up
        assert found["deterministic"] == found[ours], "drafts have changed tokens"
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        counts: Counter[str] = Counter()
        for _ in range(rounds):
            for name, run in sides.items():
                before = self.counts()
                seconds[name].append(timed(run))
                if name == ours:
                    counts += self.counts() - before

        def ratio(slow: str, fast: str) -> str:
            pairs = map(truediv, seconds.get(slow, ()), seconds[fast])
            return f"{median(pairs):.2f}" if slow in seconds else ""

        accepted = counts["accepted"] / max(counts["accepted"] + counts["rollbacks"], 1)
        verifies = max(counts["verifies"], 1)
        each = counts["drafted"] / verifies
        return [
            *(text, self.source, size, f"{heat:g}", ratio("plain", ours)),
            *(f"{self.predicted(size, each, accepted):.2f}", f"{accepted:.2f}", f"{each:.1f}"),
            *(f"{1 + counts['accepted'] / verifies:.1f}", ratio("plain", "plain with drafts")),
            *(ratio("plain", "deterministic"), ratio("generate", ours), ratio("assisted", ours)),
        ]

    def counts(self) -> Counter[str]:
        """What became of the drafter's drafts so far."""
        stats = self.drafting.stats()
        sums = stats.drafted_by, stats.accepted_by, stats.rollbacks_by
        names = "drafted", "accepted", "rollbacks"
        found = {name: by[self.source] for name, by in zip(names, sums, strict=True)}
        return Counter({**found, "verifies": stats.verify_passes})

    def costs(self, size: int, drafts: float) -> tuple[float, float, float]:
        """Seconds of a plain step of so many requests, of a verify with so many drafts of each, and
        of one draft for each, as the engines know them."""
        plain, own = self.plain.runner.buckets, self.drafting.runner.buckets
        verify = own.canonical_cost(own.canonical, round(size * (drafts + 1)))
        runner = self.drafting.core.assistant.runner
        draft = 0.0 if runner is None else runner.buckets.seconds(runner.buckets.fit(size))
        return plain.seconds(plain.fit(size)), verify, draft

    def predicted(self, size: int, drafts: float, accepted: float) -> float:
        """By the formula."""
        step, verify, draft = self.costs(size, drafts)
        tokens = sum(accepted**n for n in range(round(drafts) + 1))
        return tokens * step / (verify + drafts * draft)

    def cost_line(self, size: int, drafts: int) -> str:
        """A sentence about ``costs``."""
        step, verify, draft = (f"{1e3 * each:.1f} ms" for each in self.costs(size, drafts))
        forward = f"{1e3 * forward_seconds(self.model, self.assistant, size):.1f} ms"
        return (
            f"{size} requests: a plain step takes {step}, a verify of {size * (drafts + 1)} rows "
            f"{verify}, a draft for each {draft} (transformers' forward of the assistant {forward})"
        )


@torch.inference_mode()
def forward_seconds(target: Any, model: Any, size: int, rounds: int = 11) -> float:
    """Median of transformers' forward of one token of each of ``size`` sequences, three times
    behind one of the target, whose weights have taken the place of others in the caches."""
    cache = DynamicCache(config=model.config)
    model(torch.ones(size, 64, dtype=torch.int64), past_key_values=cache, use_cache=True)
    one = torch.ones(size, 1, dtype=torch.int64)
    found = []
    for _ in range(rounds):
        target(one, use_cache=False)
        for _ in range(3):
            found.append(timed(lambda: model(one, past_key_values=cache, use_cache=True)))
    return median(found)


def loaded(options: argparse.Namespace) -> tuple[Any, Any]:
    """Target and assistant; where it is a smoke test, the bundled model and a part of it."""
    if options.smoke:
        target = pair.bundled()
        assistant = pair.distilled(target, 1, steps=0)
    else:
        folders = (pair.made(part, options.folder) for part in ("target", options.assistant))
        target, assistant = (
            AutoModelForCausalLM.from_pretrained(folder, dtype=options.dtype).eval()
            for folder in folders
        )
    for model in (target, assistant):
        model.generation_config.eos_token_id = None
    return target, assistant


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--assistant", choices=[*map(str, pair.STARTS)], default="2")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[1.0, 0.0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--folder", type=Path, default=pair.FOLDER)
    parser.add_argument("--smoke", action="store_true", help="small sizes; reports nothing")
    options = parser.parse_args()
    if options.smoke:
        options.requests, options.temperatures, options.rounds = [1, 3], [1.0], 1
    torch.set_num_threads(options.threads)
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED)
    model, assistant = loaded(options)
    stories = [
        tokenizer(prompt).input_ids for prompt in open_prompts(max(LEAST, *options.requests), 0)
    ]
    rng = random.Random(0)
    repeats = [list(random_tokens(rng, REPEATED, model.config.vocab_size)) * 2 for _ in stories]
    print(f"{options.dtype}, assistant of {options.assistant} layers, {options.threads} threads\n")
    print(table(HEADER, []))

    def show(bench: Bench, text: str, prompts: Prompts, sizes: list[int], heat: float) -> None:
        for size in sizes:
            some = prompts[: max(size, LEAST)]
            cells = bench.row(text, some, size, heat, options.rounds)
            print("| " + " | ".join(map(str, cells)) + " |", flush=True)

    bench = Bench(model, assistant, options.smoke)
    for heat in options.temperatures:
        show(bench, "stories", stories, options.requests, heat)
    lines = [bench.cost_line(size, 3) for size in options.requests]
    bench.close()
    bench = Bench(model, None, options.smoke)
    show(bench, "repeats", repeats, options.requests[:2], 0.0)
    show(bench, "stories", stories, options.requests[:2], 1.0)
    bench.close()
    print("", *lines, sep="\n")


if __name__ == "__main__":
    main()
