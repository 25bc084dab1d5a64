"""torch.compile, in every way to apply it: set aside while an engine is open, then put back."""

import pytest
import torch

from tests.support.budget import first
from tests.support.loading import CONFIG, PROMPTS, greedy, serve
from tests.support.tiny import tiny
from tinyspec import Engine, UnsupportedModelError


@pytest.fixture(scope="module")
def expected():
    """Greedy tokens of the tiny llama by transformers, and its fingerprint as it is."""
    return greedy(tiny()), serve(tiny())


@pytest.fixture
def backend():
    """A backend that compiles nothing; ``.graphs`` are those it was given."""

    def eager(graph, _):
        eager.graphs.append(graph)
        return graph.forward

    eager.graphs = []
    torch._dynamo.reset()
    yield eager
    torch._dynamo.reset()


def compile_inside(model, backend):
    """Modules in wrappers, one within the other."""
    model.model.layers[1].self_attn = torch.compile(
        model.model.layers[1].self_attn, backend=backend
    )
    model.model.layers[0] = torch.compile(model.model.layers[0], backend=backend)
    model.model = torch.compile(model.model, backend=backend)
    return model


def compile_in_place(model, backend):
    for module in (*model.model.layers, model.model.rotary_emb, model):
        module.compile(backend=backend)
    return model


def compile_forwards(model, backend):
    """One of them of a class of torch."""
    for module in (model, model.model.layers[0].self_attn, model.lm_head):
        module.forward = torch.compile(module.forward, backend=backend)
    for module in (model.model.rotary_emb, model.model.layers[1].self_attn):
        module.forward = torch.compile(module.forward, backend=backend, fullgraph=True)
    return model


def compile_whole(model, backend):
    return torch.compile(model, backend=backend)


COMPILED = (compile_whole, compile_in_place, compile_forwards, compile_inside)


@pytest.mark.parametrize("compiled", first(2, COMPILED, 7), ids=lambda f: f.__name__)
def test_compiled_models_run_as_they_were(backend, compiled, expected):
    tokens, fingerprint = expected
    model = compiled(tiny(), backend)
    with torch.no_grad():
        assert serve(model, tokens) == fingerprint
        assert backend.graphs == []
        # Control: by itself the model runs compiled, before as after.
        model(torch.tensor([PROMPTS[1]]))
    assert backend.graphs


def test_hooks_on_wrappers_are_refused(backend):
    for compiled in (compile_whole, compile_inside):
        model = compiled(tiny(), backend)
        wrapper = model if compiled is compile_whole else model.model
        wrapper.register_forward_hook(lambda *_: None)
        with pytest.raises(UnsupportedModelError, match="has forward hooks, which"):
            Engine(model, config=CONFIG)
