"""Models with short convolutions: what a row sees of those before it is in its pages, whatever
happens to these. Control: with nothing in them other tokens follow."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.support import zoo
from tests.support.cases import bits_of, engine_of, greedy, model_of, one_by_one, run, text, whole
from tests.support.mixes import HalfLiar
from tests.support.recorded import as_on_a_gpu
from tinyspec import Engine, SamplingParams, UnsupportedModelError

PROMPTS = [text(n, seed=n) for n in (1, 2, 3, 15, 16, 17, 40)]
REQUESTS = [(prompt, greedy(24)) for prompt in PROMPTS]
REQUESTS += [(PROMPTS[4], greedy(24, temperature=0.9, seed=3, num_return_sequences=3))]


@pytest.fixture(scope="module")
def alone():
    with engine_of(model_of("convolutions"), prefix_cache=False, overlap=False) as engine:
        return one_by_one(engine, REQUESTS)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("wrong", [0.1, 0.6])
def test_rolled_back_at_every_offset(alone, page_size, wrong):
    """Drafts that are wrong at every place of a page and of the window, in a pool that preempts."""
    truths = [[*prompt, *bits[0][0]] for prompt, bits in zip(PROMPTS, alone, strict=False)]
    drafter = HalfLiar(truths, page_size, wrong)
    pages = -(-160 // page_size)
    settings = {"page_size": page_size, "num_pages": pages, "draft_window": 7, "drafter": drafter}
    with engine_of(model_of("convolutions"), **settings) as engine:
        for _ in range(2):  # cold, and from the prefix cache
            assert bits_of(run(engine, REQUESTS)) == alone
        stats = engine.stats()
        assert stats.rollbacks > 20 and stats.preemptions and stats.cached_prompt_tokens
        assert whole(engine)


def test_control_without_what_lies_in_pages(alone, monkeypatch):
    """Where every pass begins with nothing behind its rows, as a lost page would."""
    with engine_of(model_of("convolutions"), max_rows=16) as engine:
        kernels = engine.runner.kernels
        context = engine.served.context

        def forgetful(x, weight, bias, pool, *given):
            pool.zero_()
            return kernels.short_conv(x, weight, bias, pool, *given)

        context.kernels = replace(kernels, short_conv=forgetful)
        found = bits_of(run(engine, REQUESTS))
        assert not any(a == b for a, b in zip(found, alone, strict=True))


@pytest.mark.parametrize("settings", [{"kv_dtype": "fp8_e4m3"}, {"backend": "triton"}], ids=str)
def test_settings(settings, monkeypatch):
    """A cache of codes holds keys and values alone; what a GPU runs pads its passes."""
    if "backend" in settings:
        as_on_a_gpu(monkeypatch)
    with engine_of(model_of("convolutions"), **settings) as engine:
        assert {pool.dtype for pool in engine.runner.cache.rows} == {torch.float32}
        assert bits_of(run(engine, REQUESTS)) == one_by_one(engine, REQUESTS)


def test_another_convolution_is_refused():
    """One that computes something else, or that is not known as one."""

    class Doubled(type(model_of("convolutions").model.layers[0].conv)):
        def forward(self, *args, **kwargs):
            return 2 * super().forward(*args, **kwargs)

    for change in ("forward", "padding"):
        model = zoo.tiny("lfm2")
        layer = next(m for m in model.modules() if type(m).__name__ == "Lfm2ShortConv")
        if change == "forward":
            layer.__class__ = Doubled
        else:
            layer.conv = nn.Conv1d(64, 64, 3, groups=64, padding=1)
        with pytest.raises(UnsupportedModelError, match="of its 2 layers with a state 1 are known"):
            Engine(model)


def test_hooks():
    """On the module they run, on the convolution inside of it they would not."""
    model, called = zoo.tiny("lfm2"), []
    layer = next(m for m in model.modules() if type(m).__name__ == "Lfm2ShortConv")
    layer.register_forward_hook(lambda *_: called.append(1))
    with engine_of(model) as engine:
        engine.generate([[1, 2]], SamplingParams(max_new_tokens=2))
        assert called
        layer.conv.register_forward_hook(lambda *_: None)
        with pytest.raises(UnsupportedModelError, match=r"conv\.conv has forward hooks"):
            engine.generate([[1, 2]], SamplingParams(max_new_tokens=2))


def test_weights_that_change():
    """Of the convolution too: another fingerprint and other tokens."""
    model = model_of("convolutions")
    params = SamplingParams(max_new_tokens=12, deterministic=True)
    with engine_of(model) as engine:
        before = engine.fingerprint, engine.generate([PROMPTS[5]], params)[0].completions[0]
        conv = next(m for m in model.modules() if isinstance(m, nn.Conv1d))
        with torch.no_grad():
            conv.weight.mul_(-1)
        after = engine.generate([PROMPTS[5]], params)[0].completions[0]
        assert engine.fingerprint != before[0] and after.token_ids != before[1].token_ids
