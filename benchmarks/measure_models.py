"""Models of a named shape on this device: decode steps, doctor, workloads.

    python -m benchmarks.measure_models steps doctor --preset llama-3.1-8b --journal FILE [--smoke]

Appends a line a case. Weights are random, so no output means anything; prompts and lengths do not
depend on them. Knows engines, not kernels.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from statistics import quantiles
from typing import Any

import torch

from benchmarks import journal, presets, roofline
from benchmarks.bench_generate import by_generate, by_manager, by_tinyspec, patched
from benchmarks.roofline import Device
from benchmarks.workloads import DEVICE, Workload, difference, of_shapes, serve, timed
from tinyspec import Engine, EngineConfig, SamplingParams, doctor

BATCHES = (1, 4, 16, 64)
CONTEXT, STEPS = 1024, 20
# Tokens of every request before its passes are timed: they are captured and their costs known then.
SETTLED = 64
REFERENCES = (64, 128, 256)
# Requests of nano-vllm's workload where all 256 take too long.
FEWER = {"llama-3.1-8b": 64}
MODEL_LEN = 4096
# Types whose steps roofline.py knows the work of.
DENSE = ("llama", "qwen3")
# nano-vllm's bench.py with its seed, tokens a second, TB/s of the device's memory (roofline.py, and
# the makers' data sheets): what others published, on Qwen3-0.6B.
PUBLISHED = {
    "nano-vllm, RTX 4070 laptop": (1434, 0.256),
    "mini-sglang, A10G": (3038, 0.6),
    "vLLM, A100": (9530, 2.039),
}
# What determinism takes of the tokens a second, as others published.
PUBLISHED_TAX = {
    "LLM-42, all deterministic, of its workloads least": 16,
    "LLM-42, most": 42,
    "vLLM, batch invariant, Qwen3-1.7B, H100 NVL": 58,
    "vLLM, after tuning, least": 22,
    "SGLang, decode-verify-rollback, Qwen3.5-35B, H20, one request": 9,
}


def nano(vocab: int, smoke: bool) -> Workload:
    """The workload of nano-vllm's bench: 256 prompts of 100 to 1,024 tokens, as many out; the same
    lengths, and 133,966 tokens out in all."""
    rng = random.Random(0)
    count, least, most, ids = (4, 3, 12, vocab - 1) if smoke else (256, 100, 1024, 10000)
    prompts = tuple(
        tuple(rng.randint(0, ids) for _ in range(rng.randint(least, most))) for _ in range(count)
    )
    lengths = tuple(rng.randint(least, most) for _ in range(count))
    return Workload("nano-vllm", prompts, lengths, (0,) * count)


class Sections:
    """Measurements of one model. device: where the floor is known, with measured rates or not."""

    def __init__(self, preset: str, lines: journal.Journal, smoke: bool):
        torch.manual_seed(0)
        began = time.perf_counter()
        self.model: Any = presets.build(preset, torch.bfloat16, DEVICE)
        self.preset, self.lines, self.smoke = preset, lines, smoke
        self.vocab, self.shape = self.model.config.vocab_size, self.model.config
        length = min(MODEL_LEN, self.shape.max_position_embeddings)
        self.config = EngineConfig(max_model_len=length)
        # Tokens a second of the last workload without deterministic requests.
        self.plain_rate: float | None = None
        self.device = known_device(lines) if self.shape.model_type in DENSE else None
        seconds = time.perf_counter() - began
        lines.add("models", preset, seconds=round(seconds, 1))

    def engine(self, **settings: Any) -> Engine:
        return Engine(self.model, config=replace(self.config, **settings))

    def steps(self) -> None:
        """Time of a step that gives each sequence one token, the host's part included."""
        context = 32 if self.smoke else CONTEXT
        with self.engine(prefix_cache=False) as engine:
            engine.warm_up()
            for batch in BATCHES[:2] if self.smoke else BATCHES:
                run = partial(self._steps, engine, batch, context, ())
                self.lines.run("steps", f"{self.preset}, batch {batch}", run)
            batch = 2 if self.smoke else 64
            run = partial(self._steps, engine, batch, context, range(batch))
            name = f"{self.preset}, batch {batch}, deterministic"
            self.lines.run("steps", name, run, least=10)

    def _steps(self, engine: Engine, batch: int, context: int, chosen: Any) -> dict[str, Any]:
        numbers = self._decoding(engine, batch, context, chosen)
        count = 3 if self.smoke else STEPS
        before = copy.deepcopy(engine.stats())
        seconds = timed(lambda: [engine.step() for _ in range(count)])
        passed = difference(engine.stats(), before)
        tokens = passed.committed
        for number in numbers:
            engine.abort(number)
        if passed.rows.get("prompt"):
            raise RuntimeError(f"{passed.rows['prompt']} prompt rows in the passes that were timed")
        found = {
            "ms": round(1e3 * seconds / count, 3),
            "tokens_per_second": round(tokens / seconds, 1),
            "ways": str({way: n for way, n in passed.ways.items() if n}),
        }
        if self.device is not None:
            floor = roofline.floor(roofline.decode(self.shape, batch, context), self.device)
            # For a token each: where steps draft or verify, they commit another number.
            over = seconds / max(1, tokens) * batch / floor
            found |= {"floor_ms": round(1e3 * floor, 3), "over_floor": round(over, 2)}
        return found

    def _decoding(self, engine: Engine, batch: int, context: int, chosen: Any) -> list[str]:
        """Requests that all decode, with ``context`` tokens or a few more, and have got ``SETTLED``
        tokens each since the last prompt row."""
        out = context // 2 + 16 * STEPS
        work = of_shapes("steps", [(context, out)] * batch, self.vocab)
        asked = zip(work.prompts, work.params(chosen), strict=True)
        numbers = [engine.add_request(list(prompt), params) for prompt, params in asked]
        settled = 0
        while settled < SETTLED * batch:
            assert engine.has_unfinished()
            engine.step()
            record = engine.records[-1]
            busy = record.rows["prompt"] or record.waiting or record.running < batch
            settled = 0 if busy else settled + record.committed
        return numbers

    def reference(self) -> None:
        """Steps of deterministic requests by the size of the reference bucket."""
        # Short: where only 64 rows are canonical prompts go by as many, with rows that decode.
        context, batches = (32, (2,)) if self.smoke else (64, (1, 64))
        for rows in REFERENCES:
            with self.engine(prefix_cache=False, reference_rows=rows) as engine:
                for batch in batches:
                    run = partial(self._steps, engine, batch, context, range(batch))
                    name = f"{self.preset}, reference_rows={rows}, batch {batch}"
                    self.lines.run("steps by reference_rows", name, run, least=10)

    def doctor(self) -> None:
        def examine() -> dict[str, Any]:
            found = json.loads(doctor(self.model, self.config, fresh=True).to_json())
            buckets = (found["facts"] or {}).get("buckets", [])
            canonical = sum(bucket["canonical"] for bucket in buckets)
            shown = {"ok": found["ok"], "canonical": canonical, "buckets": len(buckets)}
            return shown | {"problems": found["problems"], "report": found}

        self.lines.run("doctor", self.preset, examine, least=10)

    def nano(self) -> None:
        """nano-vllm's workload by the share of requests that is deterministic, after two that
        capture the graphs of its passes; tax_percent: what a share takes of the tokens a second
        that there are without."""
        work = nano(self.vocab, self.smoke).first(FEWER.get(self.preset))
        with self.engine(prefix_cache=False) as engine:
            engine.warm_up()
            for share in (0, 100):
                serve(engine, work, work.params(work.chosen(share)))
            for share in (0, 10, 50, 100):
                params = [replace(p, temperature=0.6) for p in work.params(work.chosen(share))]
                run = partial(self._served, engine, work, params)
                name = f"{self.preset}, {share} % deterministic"
                self.lines.run("nano-vllm's workload", name, run, least=10)
        for name, (rate, terabytes) in PUBLISHED.items():
            found = {"tokens_per_second": rate, "per_GB": round(rate / terabytes / 1e3, 2)}
            self.lines.add("nano-vllm's workload", f"published: {name}", **found)
        for name, tax in PUBLISHED_TAX.items():
            self.lines.add("nano-vllm's workload", f"published: {name}", tax_percent=tax)

    def _served(
        self, engine: Engine, work: Workload, params: list[SamplingParams]
    ) -> dict[str, Any]:
        served = serve(engine, work, params)
        rate = work.tokens / served.seconds
        plain = [s for s, p in zip(served.latencies, params, strict=True) if not p.deterministic]
        if len(plain) == len(params):
            self.plain_rate = rate
        found: dict[str, Any] = {"tokens_per_second": round(rate, 1)}
        if self.device is not None:
            found["per_GB"] = round(rate / self.device.bandwidth * 1e9, 2)
        if len(plain) > 1:
            found["plain_p99_s"] = round(quantiles(plain, n=100)[-1], 3)
        if self.plain_rate is not None:
            found["tax_percent"] = round(100 * (1 - rate / self.plain_rate), 1)
        return found | {"passes": sum(served.stats.passes.values())}

    def compare(self) -> None:
        """Ragged greedy requests: a patched ``generate``, transformers' own, ``generate_batch``.
        A fourth of the tokens, for which transformers' own takes 21 s on an H200."""
        whole = nano(self.vocab, self.smoke)
        for count in (4,) if self.smoke else (64, 256):
            lengths = tuple(length // 4 + 1 for length in whole.lengths[:count])
            work = replace(whole.first(count), lengths=lengths)
            seconds: dict[str, float] = {}
            for name in SIDES:
                run = partial(self._side, name, work, seconds)
                case = f"{self.preset}, {count} requests: {name}"
                self.lines.run("ragged requests", case, run, least=2 if self.smoke else 20)

    def _side(self, name: str, work: Workload, seconds: dict[str, float]) -> dict[str, Any]:
        short = replace(work, prompts=work.prompts[:2], lengths=(4, 4))
        with side(name, self.model, short) as warm:
            warm(short)
        if DEVICE == "cuda":
            torch.cuda.empty_cache()
        with side(name, self.model, work) as run:
            found: list[Any] = []
            seconds[name] = timed(lambda: found.append(run(work)))
        assert list(map(len, found[0])) == list(work.lengths)
        line = {"seconds": round(seconds[name], 3)}
        line["tokens_per_second"] = round(work.tokens / seconds[name], 1)
        if "tinyspec" in seconds:
            line["over_tinyspec"] = round(seconds[name] / seconds["tinyspec"], 2)
        return line


def known_device(lines: journal.Journal) -> Device | None:
    """This device with the ceilings that the journal has, if roofline.py knows it."""
    device = roofline.here()
    if device is None or not lines.path.exists():
        return device
    found = {
        line["case"]: line for line in journal.read(lines.path) if line["section"] == "ceilings"
    }
    copy = found.get("copy", {}).get("GB_per_s")
    matrix = next((f["TFLOP_per_s"] for f in found.values() if "TFLOP_per_s" in f), None)
    if copy is None or matrix is None:
        return device
    return device.with_measured(1e9 * copy, 1e12 * matrix)


SIDES = ("tinyspec", "generate", "generate_batch")


@contextmanager
def side(name: str, model: Any, work: Workload) -> Iterator[Callable[[Workload], Any]]:
    """One of ``SIDES``: what serves a workload."""
    if name == "tinyspec":
        with patched(model, EngineConfig(prefix_cache=False)) as served:
            yield partial(by_tinyspec, served)
    elif name == "generate":
        yield partial(by_generate, model)
    else:
        with by_manager(model, work) as (run, _):
            yield run


SECTIONS = ("steps", "reference", "doctor", "compare", "nano")


def main(arguments: list[str] | None = None) -> int:
    """Measure the sections that are named, in their order."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("sections", nargs="+", choices=SECTIONS)
    parser.add_argument("--preset", choices=presets.PRESETS, required=True)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes")
    journal.add_options(parser)
    options = parser.parse_args(arguments)
    lines = journal.Journal.of(options)
    sections = Sections("tiny" if options.smoke else options.preset, lines, options.smoke)
    for name in options.sections:
        getattr(sections, name)()
    return int(lines.failed)


if __name__ == "__main__":
    raise SystemExit(main())
