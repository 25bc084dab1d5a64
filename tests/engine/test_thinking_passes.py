"""Thinking in passes of other kinds: on a late device, beside graphs, of other dtypes, failing."""

import pytest
import torch

from benchmarks.coin_reader.reading import generate
from tests.engine.test_failed_passes import watched
from tests.support.cases import drain, whole
from tests.support.graphs import with_graphs
from tests.support.late_device import queue_of
from tests.support.thinking import all_bits, engine_of, exact, params, prompt_of, said
from tests.support.thinking import thinking_model as new_model
from tinyspec.runner import graphs

PROMPTS = [prompt_of(n, n) for n in (21, 67, 80, 5)]
REQUESTS = [*((p, exact(20)) for p in PROMPTS), *((p, exact(30, thinking=False)) for p in PROMPTS)]


def served(model, requests=REQUESTS, **settings):
    with engine_of(model, **settings) as engine:
        outputs = engine.generate([p for p, _ in requests], [w for _, w in requests])
        assert whole(engine)
        return [all_bits(output) for output in outputs]


@pytest.mark.usefixtures("late_device")
def test_overlap():
    """Passes are under way while others are fetched, but none behind one that is thought about."""
    model = new_model()
    expected = served(model, overlap=False)
    with engine_of(model, thinking_window=2) as engine:
        outputs = engine.generate([p for p, _ in REQUESTS], [w for _, w in REQUESTS])
        assert [all_bits(output) for output in outputs] == expected
        assert queue_of(engine).most == 2


def test_beside_graphs(monkeypatch):
    """Passes with states run eagerly, others are replayed; at fixed addresses, poisoned pages."""
    monkeypatch.setattr(graphs, "EAGER_PASSES", 1)
    log = with_graphs(monkeypatch)
    fixed = {"backend": "triton", "max_sequences": 8, "max_rows": 64, "max_model_len": 128}
    model = new_model()
    expected = served(model, cuda_graphs=False, **fixed)
    log.captures = log.replays = 0
    found = served(model, cuda_graphs=True, **fixed)
    assert found == expected and log.captures and log.replays
    thoughts = [len(t.token_ids) > 1 for each, _ in found[:4] for t in each]
    assert any(thoughts) and not all(thoughts)


@pytest.mark.parametrize("settings", [{"kv_dtype": "fp8_e4m3"}, {}], ids=["fp8", "bf16"])
def test_other_dtypes(settings):
    """The contract holds; and sequential and speculative agree where all passes are canonical."""
    model = new_model(quiet=1.0)
    if not settings:
        model = model.to(torch.bfloat16)
    expected = served(model, **settings)
    for window in (1, 3, None):
        assert served(model, REQUESTS[::-1], thinking_window=window, **settings) == expected[::-1]
    assert any(len(t.token_ids) > 1 for each, _ in expected[:4] for t in each)


def test_a_pass_that_raises():
    """The request that holds the token fails by itself, in passes of ever fewer rows; the others
    think as before."""
    model = new_model()
    token = next(t for t in range(2, 64) if all(t not in prompt for prompt in PROMPTS))
    wanted = [generate(model, prompt, 4, None) for prompt in PROMPTS]
    sees = watched(model.backbone.get_input_embeddings())
    bad = [*PROMPTS[1][:44], token, *PROMPTS[1][45:]]
    with engine_of(model) as engine:
        sees["token"] = token
        ids = [engine.add_request(prompt, params(4)) for prompt in (*PROMPTS, bad)]
        done = drain(engine)
        for name, (thoughts, answer) in zip(ids, wanted, strict=False):
            # A token of an answer or of a thought may be the one that is refused.
            if token not in [*answer, *(t for thought in thoughts for t in thought)]:
                assert said(done[name]) == (thoughts, answer)
        error = done[ids[-1]].completions[0].error
        assert f"saw {token}" in error and len(done[ids[-1]].thoughts) <= 5
        assert whole(engine)
