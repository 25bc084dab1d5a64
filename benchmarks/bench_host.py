"""What the host does in one step, with the model's forward and the kernels stubbed.

Measured is the thread time of ``Engine.step()``: the schedule, the pass as tensors, the state of a
pass, sampling and commit around the kernels, records and events. The model has the module tree of
Qwen3-0.6B (28 layers, 311 parameters) at small widths. The forward returns the same logits at every
step and the sample kernel token 0, so tokens are well defined: every sequence repeats token 0, and
none of them stops. Deterministic requests have verify="padded": one token a step as plain ones, not
what "auto" would choose by measured costs. The looks at the model, of which a step makes one as it
begins and one before it commits deterministic tokens, are left out; one has a column of its own.
Run with

    pytest benchmarks/bench_host.py --full --benchmark-json=FILE [--rounds N]
    python benchmarks/render.py FILE
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.presets import PRESETS, drawn
from benchmarks.workloads import DEVICE, of_shapes
from tinyspec import Engine, EngineConfig, SamplingParams

VOCAB = 256
PROMPT, SMOKE_PROMPT = 32, 4
LAYERS, SMOKE_LAYERS = 28, 2
PARAMETERS = 311
SEQUENCES = (1, 16, 64, 256, 1024)
# Steps that are timed for each of ``--rounds``.
STEPS = 100
# Steps in which prompts are still computed while the first requests decode, at most.
PROMPT_STEPS = 1000
KINDS = ("plain", "deterministic", "sampled")
SAMPLED = {"temperature": 0.8, "top_p": 0.9, "logprobs": True}


def build(layers: int) -> Any:
    """Qwen3-0.6B's module tree with random weights, a few hundred kilobytes of them.

    layers: of its 28, how many.
    """
    shape = {**PRESETS["tiny"], "model_type": "qwen3", "num_hidden_layers": layers}
    more = {"max_position_embeddings": 4096, "tie_word_embeddings": False}
    model: Any = drawn({**shape, **more}, torch.float32, DEVICE)
    assert layers < LAYERS or len(list(model.parameters())) == PARAMETERS
    return model


def stub(engine: Engine) -> Callable[[], object]:
    """Stub what a step of ``engine`` computes; returns the check for a changed model that a step
    makes after code of the user's.
    """
    core, context, largest = engine.core, engine.served.context, engine.config.max_rows
    logits = torch.zeros(1, largest, VOCAB, device=DEVICE)
    tokens = torch.zeros(largest, dtype=torch.long, device=DEVICE)

    def forward(*, logits_to_keep: Any, **_: Any) -> SimpleNamespace:
        kept = isinstance(logits_to_keep, Tensor)
        return SimpleNamespace(logits=logits[:, : len(logits_to_keep)] if kept else logits)

    def sample(rows: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        return tokens[: len(rows)], None

    def unused(*_: Any, **__: Any) -> None:
        raise AssertionError("a decode step with a stubbed forward calls no such kernel")

    stubs = replace(
        context.kernels,
        sample=sample,
        **dict.fromkeys(("fused_kv_write", "paged_attention", "accept_truncate", "linear"), unused),
    )
    engine.runner.model = forward
    context.kernels = core.sampler.kernels = stubs
    context.check = lambda: None  # that every layer called attention
    return engine.contract.changed


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def stubbed(kind: str, smoke: bool) -> Iterator[tuple[Engine, Callable[[], object]]]:
    """An engine whose steps compute nothing, probed before, and its check for a changed model."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # thread time sees one
    most = max(SEQUENCES)
    settings = {"max_rows": 512, "max_sequences": 256} if smoke else {"max_sequences": most}
    config = EngineConfig(verify="padded", **settings)
    with Engine(build(SMOKE_LAYERS if smoke else LAYERS), config=config) as engine:
        asked = SamplingParams(max_new_tokens=2, deterministic=kind == "deterministic")
        engine.generate([[1, 2, 3]], asked)
        if asked.deterministic:
            engine.warm_up()
        check = stub(engine)
        engine.contract.changed = lambda: False  # type: ignore[method-assign]
        yield engine, check
    torch.set_num_threads(threads)


@pytest.mark.parametrize("sequences", SEQUENCES)
@pytest.mark.benchmark(
    group="host thread time of a step, forward and kernels stubbed", timer=time.thread_time
)
def bench_step(
    benchmark: Any,
    stubbed: tuple[Engine, Callable[[], object]],
    kind: str,
    sequences: int,
    smoke: bool,
    rounds: int,
) -> None:
    """One step that gives each of ``sequences`` requests one token.

    least_ms: the fastest step, which a busy machine changes least. us_a_sequence: of the median.
    held_ms, least_held_ms: a step of ``generate``, which sets torch's state and the handler of
    Ctrl-C once for all steps, as it runs no code of the caller's between them. model_check_ms: the
    check for a changed model, not part of the step. bucket: rows of the pass, padding included.
    """
    engine, model_check = stubbed
    if sequences > engine.config.max_sequences:
        pytest.skip("more sequences than a smoke test has")
    steps = 2 if smoke else STEPS * rounds
    prompt = SMOKE_PROMPT if smoke else PROMPT
    work = of_shapes("host", [(prompt, PROMPT_STEPS + 3 * steps + 8)] * sequences, VOCAB)
    changes = SAMPLED if kind == "sampled" else {"temperature": 0.0}
    asked = work.params(range(sequences) if kind == "deterministic" else ())
    numbers = [
        engine.add_request(list(ids), replace(one, **changes))
        for ids, one in zip(work.prompts, asked, strict=True)
    ]
    for _ in range(PROMPT_STEPS):
        engine.step()
        if engine.records[-1].rows["decode"] == sequences:
            break

    benchmark.pedantic(engine.step, rounds=steps, iterations=1, warmup_rounds=2)
    record = engine.records[-1]
    assert record.rows == {"prompt": 0, "decode": sequences, "draft": 0, "verify": 0}
    assert record.canonical == (kind == "deterministic")
    assert record.committed == sequences
    with engine.driver.turn("bench"), engine.runner.torch_state():
        held = _thread_seconds(engine.tracker.step, steps)
    for number in numbers:
        output = engine.abort(number)
        assert set(output.completions[0].token_ids) == {0}
    benchmark.extra_info["sequences"] = sequences
    benchmark.extra_info["bucket"] = record.bucket
    if benchmark.stats is not None:  # None where benchmarks are disabled
        benchmark.extra_info["least_ms"] = 1e3 * benchmark.stats.stats.min
        benchmark.extra_info["us_a_sequence"] = 1e6 * benchmark.stats.stats.median / sequences
    benchmark.extra_info["held_ms"] = 1e3 * median(held)
    benchmark.extra_info["least_held_ms"] = 1e3 * min(held)
    benchmark.extra_info["model_check_ms"] = 1e3 * median(_thread_seconds(model_check, steps))


def _thread_seconds(function: Callable[[], object], times: int) -> list[float]:
    """Thread time of each call of ``function``."""
    seconds = []
    for _ in range(times):
        began = time.thread_time()
        function()
        seconds.append(time.thread_time() - began)
    return seconds
