"""Whether deterministic requests keep their bits on this device, on models of a real shape.

    python -m benchmarks.measure_bits --preset qwen3-0.6b --journal FILE [--smoke]

Needles alone, among crowds, without graphs and under a LoRA adapter; what ``tinyspec.canonical``
gives for the tokens of generation. Appends a line a case: ``off`` counts requests, or
log-probabilities, with any other bit, and is wrong where it is not 0. The control counts plain
requests, whose bits may differ. Knows engines, not kernels.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import replace
from functools import partial
from typing import Any

import torch

import tinyspec
from benchmarks import journal, presets
from benchmarks.workloads import DEVICE
from tinyspec import Engine, EngineConfig, SamplingParams

Requests = list[tuple[list[int], SamplingParams]]
Bits = list[tuple[list[int], Any]]
RANKS = (4, 16)
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "down_proj"]


def requests(
    vocab: int, count: int, seed: int, length: int, deterministic: bool | None
) -> Requests:
    """With prompts up to ``length`` and outputs up to 60 tokens, greedy and sampled."""
    rng, found = random.Random(seed), []
    for _ in range(count):
        prompt = [rng.randrange(3, vocab) for _ in range(rng.randint(1, length))]
        params = SamplingParams(
            max_new_tokens=rng.randint(30, 60),
            temperature=rng.choice((0.0, 0.7, 1.2)),
            seed=rng.randrange(1000),
            deterministic=rng.random() < 0.4 if deterministic is None else deterministic,
            logprobs=True,
        )
        found.append((prompt, params))
    return found


def served(engine: Engine, asked: Requests, count: int) -> Bits:
    """Of the first ``count`` of them."""
    outputs = engine.generate([p for p, _ in asked], [s for _, s in asked])
    return [(o.completions[0].token_ids, o.completions[0].logprobs) for o in outputs[:count]]


def judged(off: int, of: int, **more: Any) -> dict[str, Any]:
    """A line, wrong where anything is off."""
    return {"off": off, "of": of, **more, **({"result": "wrong"} if off else {})}


class Crossing:
    """The cases of one model. crowd: requests beside the needles."""

    def __init__(self, preset: str, lines: journal.Journal, smoke: bool):
        self.lines, self.preset = lines, "tiny" if smoke else preset
        self.ranks = RANKS[:1] if smoke else RANKS
        self.model: Any = presets.build(self.preset, torch.bfloat16, DEVICE)
        self.config = EngineConfig(max_model_len=1024)
        vocab, length = self.model.config.vocab_size, 60 if smoke else 700
        self.needles = requests(vocab, 3 if smoke else 8, 0, length, True)
        self.crowd = partial(
            requests, vocab, 4 if smoke else 100, length=length, deterministic=None
        )

    def run(self) -> None:
        case = f"{self.preset}, {{}}".format
        for graphs in (None, False):
            name = "" if graphs is None else ", without graphs"
            run = partial(self._crossed, replace(self.config, cuda_graphs=graphs))
            self.lines.run("bits", case("alone and in crowds" + name), run, least=10)
        self.lines.run("bits", case("control: plain requests"), self._control, least=5)
        self.lines.run("bits", case("canonical forward"), self._forward, least=5)
        for rank in self.ranks:
            run = partial(self._adapted, rank)
            self.lines.run("bits", case(f"LoRA of rank {rank}"), run, least=10)

    def _crossed(self, config: EngineConfig) -> dict[str, Any]:
        count = len(self.needles)
        with Engine(self.model, config=config) as engine:
            alone = [served(engine, [needle], 1)[0] for needle in self.needles]
            crowds = [served(engine, self.needles + self.crowd(seed), count) for seed in (1, 2)]
            stats, graphs = engine.stats(), len(engine.runner.graphs)
        off = sum(a != b for found in crowds for a, b in zip(alone, found, strict=True))
        return judged(off, 2 * count, graphs=graphs, rollbacks=stats.rollbacks)

    def _control(self) -> dict[str, Any]:
        plain = [(prompt, replace(p, deterministic=False)) for prompt, p in self.needles]
        with Engine(self.model, config=self.config) as engine:
            alone = [served(engine, [needle], 1)[0] for needle in plain]
            among = served(engine, plain + self.crowd(1), len(plain))
        return {"plain_off": sum(map(tuple.__ne__, alone, among)), "of": len(plain)}

    def _forward(self) -> dict[str, Any]:
        asked = [(prompt, replace(p, temperature=1.0)) for prompt, p in self.needles]
        with Engine(self.model, config=self.config) as engine:
            found = served(engine, asked, len(asked))
        whole = [prompt + tokens for (prompt, _), (tokens, _) in zip(asked, found, strict=True)]
        width = max(map(len, whole))
        ids = torch.tensor([[0] * (width - len(row)) + row for row in whole], device=DEVICE)
        mask = torch.tensor([[0] * (width - len(r)) + [1] * len(r) for r in whole], device=DEVICE)
        with torch.no_grad(), tinyspec.canonical(self.model):
            logits = self.model(ids, attention_mask=mask, use_cache=False).logits
        off = 0
        for row, (tokens, logprobs) in enumerate(found):
            n = len(tokens)
            own = tinyspec.token_logprobs(logits[row, -n - 1 : -1], ids[row, -n:], 1.0).tolist()
            off += sum(a != b for a, b in zip(own, logprobs, strict=True))
        return judged(off, sum(len(tokens) for tokens, _ in found))

    def _adapted(self, rank: int) -> dict[str, Any]:
        import peft

        # PEFT merges what adapts the weights of experts in every pass, which is not served.
        linears = LINEARS[:-1] if hasattr(self.model.config, "num_experts") else LINEARS
        config = peft.LoraConfig(r=rank, target_modules=linears, init_lora_weights=False)
        adapted = peft.get_peft_model(self.model, config)
        try:
            own, self.model = self.model, adapted.eval()
            return self._crossed(self.config)
        finally:
            self.model = own
            adapted.unload()


def main(arguments: list[str] | None = None) -> int:
    """Cross one model."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--preset", choices=presets.PRESETS, required=True)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes")
    journal.add_options(parser)
    options = parser.parse_args(arguments)
    lines = journal.Journal.of(options)
    Crossing(options.preset, lines, options.smoke).run()
    return int(lines.failed)


if __name__ == "__main__":
    raise SystemExit(main())
