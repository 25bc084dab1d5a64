"""Prompts that are thought about: the engine agrees with the sequential reading in every way."""

import pytest
import torch

from benchmarks.coin_reader.reading import generate
from tests.support.cases import drain, whole
from tests.support.thinking import KINDS, NONE, engine_of, params, prompt_of, said, thinking_model
from tinyspec import Engine, EngineConfig, SamplingParams
from tinyspec.errors import UnsupportedModelError
from tinyspec.thinking.model import ThinkingModel

WINDOWS = (1, 2, 4, 8, None)
PROMPTS = [prompt_of(n, n) for n in (3, 8, 21, 67, 80)]


def reference(model, tokens=8):
    """What the sequential reading thinks and answers; before an engine patches the model."""
    return [generate(model, prompt, tokens, None) for prompt in PROMPTS]


def active(thoughts):
    """Numbers of the chunks whose thoughts are not trivial."""
    return [n for n, ids in enumerate(thoughts) if len(ids) > 1]


@pytest.mark.parametrize("kind", KINDS)
def test_speculative_and_sequential_agree(kind):
    model = thinking_model(kind)
    wanted = reference(model)
    assert any(active(thoughts) for thoughts, _ in wanted), "nothing is thought"
    assert any(len(active(t)) < len(t) for t, _ in wanted), "every chunk thinks"
    for window in WINDOWS:
        with engine_of(model, thinking_window=window) as engine:
            together = engine.generate(PROMPTS, params())
            alone = [engine.generate([prompt], params())[0] for prompt in PROMPTS]
            assert [said(output) for output in together] == wanted
            assert [said(output) for output in alone] == wanted
            assert whole(engine)


def test_thoughts_change_the_answer():
    """Control: the plain model answers otherwise, and so do other thoughts."""
    model = thinking_model()
    wanted = [answer for _, answer in reference(model)]
    with engine_of(model) as engine:
        plain = engine.generate(PROMPTS, params(thinking=False))
    assert [output.completions[0].token_ids for output in plain] != wanted
    assert all(output.thoughts is None for output in plain)
    with torch.no_grad():
        for parameter in model.compression.parameters():
            parameter.mul_(1.5)
    assert [answer for _, answer in reference(model)] != wanted


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


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_trivial_thoughts_give_the_plain_model(kind):
    model = thinking_model(kind, NONE)
    with engine_of(model) as engine:
        for exact in (False, True):
            changes = {"deterministic": exact, "logprobs": exact}
            found = engine.generate(PROMPTS, params(**changes))
            plain = engine.generate(PROMPTS, params(thinking=False, **changes))
            for one, other in zip(found, plain, strict=True):
                assert all(thought.token_ids == [1] for thought in one.thoughts)
                assert one.completions[0].token_ids == other.completions[0].token_ids
                assert one.completions[0].logprobs == other.completions[0].logprobs


def test_whatever_passes_hold():
    """Passes smaller than a window, chunks in parts, chunks that fill no page."""
    model = thinking_model(chunk_size=6, max_thought_tokens=8)
    wanted = reference(model)
    for settings in (
        {"max_rows": 20},
        {"max_rows": 17, "thinking_window": None},
        {"max_sequences": 2},
        {"overlap": True},
        {"drafter": "ngram"},
    ):
        with engine_of(model, **settings) as engine:
            found = engine.generate(PROMPTS, params())
            assert [said(output) for output in found] == wanted, settings
            assert whole(engine)


@pytest.mark.parametrize("window", [1, 8])
def test_preempted(window):
    """While they think and while they decode; a thought that is known is not made again."""
    model = thinking_model()
    prompts = [prompt_of(length, length) for length in (40, 80, 41)]
    wanted = [generate(model, prompt, 60, None) for prompt in prompts]
    with engine_of(model, thinking_window=window, num_pages=10) as engine:
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
    model = thinking_model()
    prompt = PROMPTS[-1]
    found = []
    for window in (1, None):
        with engine_of(model, thinking_window=window) as engine:
            settings = params(prompt_logprobs=True, deterministic=True)
            found.append(engine.generate([prompt], settings)[0].prompt_logprobs)
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
