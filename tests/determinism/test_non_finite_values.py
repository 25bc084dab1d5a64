"""A value that overflows outside of the window of a row does not reach it, in whatever pass the row
runs.

In a model of fp16 the values of one token overflow in the last layer, so that nothing but attention
can carry them to other rows.
"""

from random import Random

import pytest
import torch

from tests.support.mixes import bits, crowd
from tests.support.tiny import VOCAB, tiny
from tinyspec import Engine, EngineConfig, SamplingParams
from tinyspec.kernels.twins import attention as twin

SPECIAL = 5
PARAMS = SamplingParams(max_new_tokens=6, deterministic=True, logprobs=True)


def overflowing():
    """A Mistral of two layers with a window of 24; the value of SPECIAL, first of a prompt, is inf
    in the last one."""
    model = tiny("mistral", torch.float16)
    projection = model.model.layers[-1].self_attn.v_proj
    seen = []
    hook = projection.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        model(torch.tensor([[SPECIAL]]))
        hook.remove()
        direction = seen[0][0, 0].float()
        # fp16 ends at 65504: beyond it in this direction alone.
        projection.weight[0] = (80_000 * direction / direction.square().sum()).half()
        values = projection(seen[0])
    assert not values.isfinite().all() and values[..., 1:].isfinite().all()
    return model


def prompt_of(length):
    others = [token for token in range(VOCAB) if token != SPECIAL]
    return [SPECIAL, *Random(1).choices(others, k=length - 1)]


def run(config, neighbours=()):
    """Bits of a request alone or among neighbours."""
    requests = [(prompt_of(200), PARAMS), *neighbours]
    with Engine(overflowing(), config=config) as engine:
        output = engine.generate(*map(list, zip(*requests, strict=True)))[0]
    return bits(output), [logprob for c in output.completions for logprob in c.logprobs]


def all_runs():
    """Alone in passes of many rows and of few, and in crowds."""
    generator = Random(0)
    for max_rows in (512, 48):
        config = EngineConfig(reference_rows=16, max_rows=max_rows)
        for size in (0, 5):
            yield run(config, crowd(generator, size))


def test_alone_and_in_crowds():
    first, *others = all_runs()
    assert all(logprob == logprob for logprob in first[1])
    assert all(found[0] == first[0] for found in others)


def test_control_without_a_second_look(monkeypatch):
    monkeypatch.setattr(twin, "all_finite", lambda *_: True)
    with pytest.raises(AssertionError):
        test_alone_and_in_crowds()
