"""Prompts that are thought about: the engine agrees with the sequential reading in every way, in
passes of all kinds, and beside a model that is read, trained and changed."""

import pytest
import torch

from benchmarks.coin_reader.reading import generate
from tests.engine.test_failed_passes import Fault
from tests.support.budget import first
from tests.support.cases import drain, whole
from tests.support.graphs import with_graphs
from tests.support.late_device import queue_of
from tests.support.mixes import bits
from tests.support.thinking import (
    END,
    NONE,
    all_bits,
    backbone,
    engine_of,
    exact,
    params,
    prompt_of,
    said,
    thinking_model,
)
from tinyspec import Engine, EngineConfig, SamplingParams
from tinyspec.errors import UnsupportedModelError
from tinyspec.runner import graphs
from tinyspec.thinking.model import IGNORED, ThinkingModel

WINDOWS = (1, 3, None)
PROMPTS = [prompt_of(n, n) for n in (3, 8, 21, 67, 80)]


def reference(model, tokens=8):
    """What the sequential reading thinks and answers; before an engine patches the model."""
    return [generate(model, prompt, tokens, None) for prompt in PROMPTS]


def active(thoughts):
    """Numbers of the chunks whose thoughts are not trivial."""
    return [n for n, ids in enumerate(thoughts) if len(ids) > 1]


@pytest.mark.parametrize("kind", first(1, ["gemma3_text", "llama", "qwen3", "mistral"], 3))
def test_speculative_and_sequential_agree(kind):
    model = thinking_model(kind)
    wanted = reference(model)
    assert any(active(thoughts) for thoughts, _ in wanted), "nothing is thought"
    assert any(len(active(t)) < len(t) for t, _ in wanted), "every chunk thinks"
    for window in WINDOWS:
        with engine_of(model, thinking_window=window) as engine:
            assert list(map(said, engine.generate(PROMPTS, params()))) == wanted
            assert said(engine.generate(PROMPTS[-1:], params())[0]) == wanted[-1]
            # Control: without thoughts the answers are others.
            plain = engine.generate(PROMPTS, params(thinking=False))
            assert [o.completions[0].token_ids for o in plain] != [answer for _, answer in wanted]
            assert all(output.thoughts is None for output in plain)
            assert whole(engine)


def rounds_of(thoughts, window):
    """By the definition: each round looks at a number of chunks, up to the first that thinks. It is
    halved where the first or the first quarter thinks, and whole again where all are trivial."""
    done, rounds, width = 0, 0, window
    while done < len(thoughts):
        end = len(thoughts) if window is None else min(done + width, len(thoughts))
        thinking = next((n for n in range(done, end) if len(thoughts[n]) > 1), None)
        if window is not None and thinking is None:
            width = window
        elif window is not None and (thinking == done or 4 * (thinking + 1 - done) <= end - done):
            width = max(1, width // 2)
        done = end if thinking is None else thinking + 1
        rounds += 1
    return rounds


def test_trivial_thoughts_give_the_plain_model():
    with engine_of(thinking_model(quiet=NONE)) as engine:
        for wanted in (params, exact):
            found = engine.generate(PROMPTS[1:4], wanted())
            plain = engine.generate(PROMPTS[1:4], wanted(thinking=False))
            assert {tuple(t.token_ids) for one in found for t in one.thoughts} == {(1,)}
            assert list(map(bits, found)) == list(map(bits, plain))


TIGHT = [
    {"max_rows": 20},
    {"max_rows": 17, "thinking_window": None},
    {"max_sequences": 2},
    {"overlap": True},
    {"drafter": "ngram"},
]


def test_whatever_passes_hold():
    """Passes smaller than a window, chunks in parts, chunks that fill no page."""
    model = thinking_model(chunk_size=6, max_thought_tokens=8)
    wanted = reference(model)
    for settings in [*TIGHT, {"verify": "always", "drafter": backbone("llama")}]:
        with engine_of(model, **settings) as engine:
            found = engine.generate(PROMPTS, params())
            assert [said(output) for output in found] == wanted, settings
            assert whole(engine)


@pytest.mark.parametrize("window", first(1, [8, 1], 2))
def test_preempted(window):
    """While they think and while they decode; a thought that is known is not made again."""
    model = thinking_model()
    prompts = [prompt_of(length, length) for length in (40, 80, 41)]
    wanted = [generate(model, prompt, 60, None) for prompt in prompts]
    with engine_of(model, thinking_window=window, num_pages=12) as engine:
        ids = [engine.add_request(prompt, params(60)) for prompt in prompts]
        for _ in range(2):
            engine.step()
            assert any(r.thoughts.unthought for r in engine.tracker.requests.values())
            engine.admission.preempt_all()
        done = drain(engine)
        outputs = [done[name] for name in ids]
        assert [said(output) for output in outputs] == wanted
        passes = [output.completions[0].stats.thinking_passes for output in outputs]
        assert passes == [rounds_of(t, window) for t, _ in wanted]
        assert max(output.completions[0].stats.preemptions for output in outputs) > 2
        assert whole(engine)


def test_completions_of_one_prompt_share_its_thoughts():
    model = thinking_model()
    (thoughts, answer) = reference(model)[-1]
    with engine_of(model, max_sequences=2) as engine:
        (output,) = engine.generate([PROMPTS[-1]], params(num_return_sequences=3))
        assert said(output) == (thoughts, answer)
        assert [c.token_ids for c in output.completions] == [answer] * 3
        passes = [c.stats.thinking_passes for c in output.completions]
        assert passes[0] == rounds_of(thoughts, 8) and passes[1:] == [0, 0]


def test_prompt_logprobs():
    """Of every token by a row with the states that it ends with."""
    model, found = thinking_model(), []
    for window in (1, None):
        with engine_of(model, thinking_window=window) as engine:
            (output,) = engine.generate(PROMPTS[-1:], exact(1, prompt_logprobs=True))
            found.append(output.prompt_logprobs)
    assert found[0] == found[1] and None not in found[0][1:]


def test_logits_that_are_not_finite():
    """A request whose thought has none fails by name; others go on."""
    model = thinking_model()
    prompt = PROMPTS[-1]
    with torch.no_grad():
        model.thinking.norm.weight.fill_(torch.nan)
    with engine_of(model) as engine:
        found, short = engine.generate([prompt, prompt[:5]], params())
    assert found.completions[0].error == "the thought of chunk 0 has no finite logits"
    assert short.completions[0].error is None and short.thoughts == []


def test_refused():
    model = thinking_model()
    with Engine(model.backbone) as engine:
        with pytest.raises(ValueError, match=r"thinking=True is not allowed: .*False with a model"):
            engine.generate([[1, 2]], params())
        with pytest.raises(ValueError, match="thinking=1 is not allowed"):
            SamplingParams(thinking=1)
    wide = thinking_model(chunk_size=40)
    with pytest.raises(ValueError, match=r"max_rows=16 is not allowed: at least .* chunk_size=40"):
        engine_of(wide, max_rows=16)
    with pytest.raises(ValueError, match="thinking_window=0 is not allowed"):
        EngineConfig(thinking_window=0)
    half = thinking_model()
    half.compression.bfloat16()
    with pytest.raises(ValueError, match=r"compression='torch.bfloat16 on cpu' is not allowed"):
        Engine(half)
    with pytest.raises(UnsupportedModelError):
        Engine(torch.nn.Linear(2, 2))
    assert isinstance(model, ThinkingModel)


# Passes of other kinds

MIXED = [prompt_of(n, n) for n in (21, 67, 80, 5)]
REQUESTS = [*((p, exact(9)) for p in MIXED), *((p, exact(12, thinking=False)) for p in MIXED)]


def served(model, requests=REQUESTS, **settings):
    with engine_of(model, **settings) as engine:
        outputs = engine.generate([p for p, _ in requests], [w for _, w in requests])
        assert whole(engine)
        return [all_bits(output) for output in outputs]


@pytest.mark.usefixtures("late_device")
def test_overlap():
    """Passes are under way while others are fetched, but none behind one that is thought about."""
    model = thinking_model()
    expected = served(model, overlap=False)
    with engine_of(model, thinking_window=2) as engine:
        outputs = engine.generate([p for p, _ in REQUESTS], [w for _, w in REQUESTS])
        assert [all_bits(output) for output in outputs] == expected
        assert queue_of(engine).most == 2


def test_beside_graphs(monkeypatch):
    """Passes with states run eagerly, others are replayed; at fixed addresses, poisoned pages."""
    monkeypatch.setattr(graphs, "EAGER_PASSES", 1)
    log = with_graphs(monkeypatch)
    fixed = {"backend": "triton", "max_sequences": 8, "max_rows": 32, "max_model_len": 128}
    model = thinking_model()
    few = [(p, exact(6, thinking=w.thinking)) for p, w in (*REQUESTS[:2], REQUESTS[4])]
    expected = served(model, few, cuda_graphs=False, **fixed)
    log.captures = log.replays = 0
    found = served(model, few, cuda_graphs=True, **fixed)
    assert found == expected and log.captures and log.replays
    thoughts = [len(t.token_ids) > 1 for each, _ in found[:2] for t in each]
    assert any(thoughts) and not all(thoughts)


@pytest.mark.parametrize("settings", first(1, [{}, {"kv_dtype": "fp8_e4m3"}], 4))
def test_other_dtypes(settings):
    """The contract holds; and sequential and speculative agree where all passes are canonical."""
    model = thinking_model(quiet=1.0)
    if not settings:
        model = model.to(torch.bfloat16)
    expected = served(model, thinking_window=None, **settings)
    assert served(model, REQUESTS[::-1], thinking_window=1, **settings) == expected[::-1]
    assert any(len(t.token_ids) > 1 for each, _ in expected[:4] for t in each)


def test_a_pass_that_raises():
    """The request that holds the token fails by itself, in passes of ever fewer rows; the others
    think as before."""
    model = thinking_model()
    token = next(t for t in range(2, 64) if all(t not in prompt for prompt in MIXED))
    wanted = [generate(model, prompt, 4, None) for prompt in MIXED]
    fault = Fault(model.backbone.get_input_embeddings())
    bad = [*MIXED[1][:44], token, *MIXED[1][45:]]
    with engine_of(model) as engine:
        fault.arm_for(token)
        ids = [engine.add_request(prompt, params(4)) for prompt in (*MIXED, bad)]
        done = drain(engine)
        for name, (thoughts, answer) in zip(ids, wanted, strict=False):
            # A token of an answer or of a thought may be the one that is refused.
            if token not in [*answer, *(t for thought in thoughts for t in thought)]:
                assert said(done[name]) == (thoughts, answer)
        error = done[ids[-1]].completions[0].error
        assert f"saw {token}" in error and len(done[ids[-1]].thoughts) <= 5
        assert whole(engine)


# The model by itself beside an engine


def loss_of(model):
    """Of a batch with gold thoughts and answers."""
    ids = torch.tensor([prompt_of(28, n) for n in range(4)])
    gold = torch.tensor([[5, END, IGNORED], [END, IGNORED, IGNORED], [7, 8, END]])
    labels = torch.full_like(ids, IGNORED)
    labels[:, -2:] = ids[:, -2:]
    return model(ids, gold.expand(4, 3, 3), labels).loss


def answer(engine):
    output = engine.generate([PROMPTS[3]], exact())[0]
    return all_bits(output), output.fingerprint


def test_read_trained_and_changed_beside_an_engine():
    """Gold states reach the model's own layers, whoever ran last; the engine follows each step, and
    another dtype."""
    model, other = thinking_model(), thinking_model()
    loss, said = loss_of(other), generate(other, PROMPTS[3], 8, None)
    with engine_of(model) as engine:
        found = answer(engine)
        assert torch.equal(loss_of(model), loss) and answer(engine) == found
        assert generate(model, PROMPTS[3], 8, None) == said and answer(engine) == found
        for each in (model, other):
            each.train()
            optimizer = torch.optim.AdamW(each.parameters(), lr=1e-2)
            for _ in range(2):
                optimizer.zero_grad()
                loss_of(each).backward()
                optimizer.step()
        trained = answer(engine)
        assert trained != found and model.training
        model.to(torch.bfloat16)
        halved = answer(engine)
        assert halved != trained
    with engine_of(other) as engine:
        assert answer(engine) == trained
    with engine_of(other.to(torch.bfloat16)) as engine:
        assert answer(engine) == halved
