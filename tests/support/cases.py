"""What the tests of the contract have in common: models by dtype and kind, and their requests."""

import random
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from transformers import PreTrainedModel

from tests.support import zoo
from tests.support.mixes import bits
from tests.support.pages import unowned
from tests.support.sensitive import ShapeSensitiveLinear, replace_linears
from tests.support.tiny import VOCAB, tiny
from tinyspec import Engine, EngineConfig, RequestOutput, SamplingParams

REFERENCE = 16
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Model types by what their layers keep beside keys and values.
HYBRIDS = {"convolutions": "lfm2", "delta rule": "qwen3_5_text", "mamba 2": "bamba"}
KINDS = ("as is", "shape-sensitive", *HYBRIDS)
Requests = list[tuple[list[int], SamplingParams]]


def model_of(kind: str, dtype: str = "fp32", positions: int = 512) -> PreTrainedModel:
    """A new tiny llama, its linears sensitive to the row count or as they are; or a hybrid, or
    another type, with such linears."""
    if kind not in ("as is", "shape-sensitive"):
        model = zoo.tiny(HYBRIDS.get(kind, kind)).to(DTYPES[dtype])
        return replace_linears(model, ShapeSensitiveLinear)
    model = tiny("llama", DTYPES[dtype])
    model.config.max_position_embeddings = positions
    return model if kind == "as is" else replace_linears(model, ShapeSensitiveLinear)


def engine_of(model: PreTrainedModel, **settings: object) -> Engine:
    """An engine with small passes, so that their sizes vary."""
    return Engine(model, config=EngineConfig(**{"reference_rows": REFERENCE, **settings}))


def cost(engine: Engine, seconds: Callable[[int], float] = float) -> None:
    """Let the scheduler reckon with these seconds of a bucket (its rows) instead of measured ones,
    so that it decides the same everywhere."""
    buckets = engine.runner.buckets
    buckets.seconds = lambda bucket, canonical=False: seconds(bucket)


def steady(model: PreTrainedModel, **settings: object) -> Engine:
    """An engine whose passes are the same on every machine, as large as they can be."""
    engine = engine_of(model, **settings)
    cost(engine)
    return engine


def text(length: int, seed: int = 0) -> list[int]:
    """Random tokens."""
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


def greedy(tokens: int = 12, **changes: object) -> SamplingParams:
    """Deterministic, with log-probabilities."""
    settings = {"max_new_tokens": tokens, "deterministic": True, "logprobs": True, **changes}
    return SamplingParams(**settings)


def run(engine: Engine, requests: Requests) -> list[RequestOutput]:
    """All of them in one call."""
    return engine.generate([p for p, _ in requests], [s for _, s in requests])


def bits_of(outputs: list[RequestOutput]) -> list[object]:
    return [bits(output) for output in outputs]


def one_by_one(engine: Engine, requests: Requests) -> list[object]:
    """The bits of each of them alone."""
    return [bits(engine.generate([prompt], params)[0]) for prompt, params in requests]


def whole(engine: Engine) -> bool:
    """Nobody holds a page, and every page is free or idle, once."""
    pool = engine.pool
    return pool.num_held == 0 and sorted(unowned(pool)) == list(range(pool.num_pages))


def states_whole(engine: Engine) -> bool:
    """Every state that can be kept is kept or free, once."""
    states = engine.admission.checkpoints
    numbers = sorted([*states.kept.values(), *states._free])
    return numbers == list(range(engine.config.max_sequences, states.count))


def drain(engine: Engine) -> dict[str, RequestOutput]:
    """Steps until nothing is left, which must not take for ever; outputs by request id."""
    done: dict[str, RequestOutput] = {}
    for _ in range(5000):
        if not engine.has_unfinished():
            return done
        done |= {output.request_id: output for output in engine.step()}
    raise AssertionError("the engine does not drain")


def facts_of(engine: Engine) -> dict[str, Any]:
    """What a new proof finds, without what is measured by time."""
    found = asdict(engine.contract.probe(fresh=True, attention_rows=1))
    for bucket in found["buckets"]:
        del bucket["seconds"], bucket["proof"]
    for kind in found["attention"]:
        del kind["checked"]  # as many rows as there is time for
    return found
