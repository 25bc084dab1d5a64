"""What a soak is judged by: bits of every request alone, pages, and memory from round to round."""

from __future__ import annotations

import ctypes
import gc
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.support import zoo
from tests.support.cases import engine_of, greedy, states_whole, text, whole
from tests.support.drop_in import PAD, SMALL, patched
from tests.support.mixes import bits
from tests.support.sensitive import ShapeSensitiveLinear, replace_linears
from tests.support.tiny import tiny
from tinyspec import Engine, RequestOutput, SamplingParams

SETTINGS = {"page_size": 8, "num_pages": 120}
STYLES: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.9, "seed": 3},
    {"temperature": 1.1, "seed": 8, "top_k": 12, "num_return_sequences": 2},
    {"repetition_penalty": 1.2},
    {"stop_token_ids": tuple(range(0, 128, 9))},
)
# Deterministic requests of the Engine, and calls of the patched model.
REQUESTS = [(text(2 + 9 * n, seed=n), greedy(6 + 3 * n, **style)) for n, style in enumerate(STYLES)]
PLAIN = SamplingParams(max_new_tokens=9, temperature=0.8, seed=1)
PROMPTS = [text(4 + 11 * n, seed=10 + n) for n in range(3)]
SAMPLED = {"do_sample": True, "temperature": 2.0, "seed": [4, 5, 6], "max_new_tokens": 9}
CALL = {**SAMPLED, "deterministic": True, "pad_token_id": PAD}
IDS = torch.tensor([text(12, seed=20)])
# Seeds of the weights that each model has in turn.
OF_THE_ENGINE, OF_THE_PATCHED = (0, 1), (2, 3)
MB = 1 << 20


class _Mallinfo(ctypes.Structure):
    """glibc's ``struct mallinfo2``, from malloc.h."""

    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = tuple((name, ctypes.c_size_t) for name in names.split())


def allocated() -> int:
    """Bytes that glibc's malloc has given out; 0 of another. Not the process's size: what is free
    within its arenas (eight a core at most, for as many threads) grows for minutes while what is in
    use does not."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        return 0
    mallinfo.restype = _Mallinfo
    found = mallinfo()
    return found.uordblks + found.hblkhd


def logits(model: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        return model(IDS).logits


class Truth:
    """What each request and call gives alone, in models of the same weights that nobody shares.
    of_engine, of_patched: the models' kinds."""

    def __init__(self, of_engine: str = "llama", of_patched: str = "llama") -> None:
        self.kinds = dict.fromkeys(OF_THE_ENGINE, of_engine)
        self.kinds |= dict.fromkeys(OF_THE_PATCHED, of_patched)
        self.weights = {seed: self.make(seed).state_dict() for seed in self.kinds}
        self.logits = {seed: logits(self.make(seed)) for seed in self.kinds}
        self.bits: dict[str, list[Any]] = {}  # by fingerprint
        self.rows: dict[int, Tensor] = {}  # by weights
        for seed in OF_THE_ENGINE:
            with engine_of(self.make(seed), **SETTINGS) as engine:
                alone = [engine.generate([prompt], params)[0] for prompt, params in REQUESTS]
                self.bits[engine.fingerprint] = [bits(output) for output in alone]
        for seed in OF_THE_PATCHED:
            with patched(self.make(seed), SMALL) as model:
                rows = [
                    model.generate([prompt], **{**CALL, "seed": CALL["seed"][n]})[0, len(prompt) :]
                    for n, prompt in enumerate(PROMPTS)
                ]
            self.rows[seed] = torch.stack(rows)

    def make(self, seed: int) -> PreTrainedModel:
        kind = self.kinds[seed]
        model = tiny(seed=seed) if kind == "llama" else zoo.tiny(kind, seed=seed)
        return replace_linears(model, ShapeSensitiveLinear)


class Judge:
    """Collects what is wrong, in words, and counts what was right."""

    def __init__(self, truth: Truth):
        self.truth = truth
        self.wrong: list[str] = []
        self.counts: Counter[str] = Counter()
        self.memory: list[tuple[int, int, int]] = []

    def check(self, kind: str, right: object, what: str = "") -> None:
        self.counts[kind] += 1
        if not right:
            self.wrong.append(f"{kind}: {what or 'is wrong'}")

    def output(self, number: int, output: RequestOutput, asked: tuple[str, ...] = ()) -> None:
        """``asked``: parts of the errors that were asked for; one that has ended so is right."""
        ended = [c for c in output.completions if c.finish_reason == "abort"]
        if ended:
            errors = [str(c.error) for c in ended]
            right = all(any(part in error for part in asked) for error in errors)
            return self.check("named errors", right, "; ".join(errors))
        alone = self.truth.bits.get(output.fingerprint)
        what = "not the bits of the request alone" if alone else "of weights that nobody has"
        right = alone is not None and bits(output) == alone[number]
        return self.check("outputs", right, f"{what}: {output.fingerprint_parts}")

    def plain(self, output: RequestOutput) -> None:
        reasons = {c.finish_reason for c in output.completions}
        self.check("plain outputs", reasons <= {"stop", "length"}, str(output.completions))

    def rows(self, seed: int, found: Tensor) -> None:
        longest = max(map(len, PROMPTS))
        self.check("rows", torch.equal(found[:, longest:], self.truth.rows[seed]))

    def model(self, kind: str, seed: int, model: PreTrainedModel) -> None:
        self.check(kind, torch.equal(logits(model), self.truth.logits[seed]))

    def pages(self, engine: Engine) -> None:
        self.check("pages", whole(engine), f"{engine.pool.num_held} are held by nobody's request")
        self.check("states", states_whole(engine), "one that can be kept is not, nor is it free")

    def remember(self) -> None:
        """Bytes of all tensors, objects, and bytes of malloc, between two rounds."""
        gc.collect()
        objects = gc.get_objects()
        storages = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
            for t in objects
            if Tensor in type(t).__mro__ and t.layout == torch.strided
        }
        self.memory.append((sum(storages.values()), len(objects), allocated()))

    def flat(self) -> None:
        """The last third of all rounds takes no more than the one before; the first warms up."""
        third = len(self.memory) // 3
        middle, last = self.memory[third : 2 * third], self.memory[2 * third :]
        allowed = (MB // 8, 2000, 2 * MB)
        names = ("bytes of tensors", "objects", "bytes of malloc")
        for n, name in enumerate(names):
            before, after = (max(row[n] for row in part) for part in (middle, last))
            right = after <= before + allowed[n]
            self.check("memory", right, f"{name} grew from {before} to {after}")
