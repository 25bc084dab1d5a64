"""What tells that a model has changed: every kind of change is seen, and nothing else is."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.support.budget import first
from tests.support.changes import FOLLOWED, Halves, llama, model_for
from tests.support.tiny import FAMILIES, prompts, tiny
from tinyspec import Engine, EngineConfig, SamplingParams
from tinyspec.determinism import contract as contract_module
from tinyspec.determinism.model_state import description, function_settings
from tinyspec.model import outline
from tinyspec.model.fused_layer import FusedNorm
from tinyspec.model.shadow import standing_in

CONFIG = EngineConfig(reference_rows=8, max_rows=16)
NAME = dict(ids=lambda f: f.__name__)


@pytest.mark.parametrize("change", FOLLOWED, **NAME)
def test_every_change_is_seen(change, two_threads):
    model = model_for(change)
    with Engine(model, config=CONFIG) as engine:
        contract, before = engine.contract, engine.fingerprint
        assert contract.refresh() is None
        change(model)
        with engine.runner.torch_state():
            assert contract.changed() and contract.refresh()
            assert not contract.changed() and contract.refresh() is None
        assert engine.fingerprint != before


@pytest.mark.parametrize("family", first(3, FAMILIES, 1))
def test_passes_change_nothing(family):
    """Nor does a model that is in training mode, or is used by itself."""
    model = tiny(family).train()
    with Engine(model, config=CONFIG) as engine:
        for params in (SamplingParams(max_new_tokens=3), SamplingParams(temperature=1.0)):
            engine.generate(prompts(3), params)
            assert engine.contract.refresh() is None
        model.eval()
        model(torch.tensor(prompts(1)), labels=torch.tensor(prompts(1))).loss.backward()
        assert engine.contract.refresh() is None


def test_what_passes_change_is_no_setting():
    """A module or hook of the user's may count, in passes and by itself."""
    model = llama()
    with Engine(model, config=CONFIG) as engine:
        own, before = model.model.layers[1].mlp.up_proj, engine.fingerprint
        assert own.calls == 0, "passes count on their own"
        engine.generate(prompts(2), SamplingParams(max_new_tokens=2))
        model(torch.tensor(prompts(1)))
        assert own.calls == 1 and engine.fingerprint == before
        own.factor = 0.75
        assert engine.contract.refresh() == "model.layers.1.mlp.up_proj.factor"
        assert engine.fingerprint != before


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [("hooks", 1.0, 2.0), ("kept", torch.ones(2), torch.zeros(2))],
    ids=["beside torch's own", "tensors have no plain equality"],
)
def test_lists(name, before, after):
    model = llama()
    own = model.model.layers[1].mlp.up_proj
    setattr(own, name, [before, before])
    with Engine(model, config=CONFIG) as engine:
        assert engine.contract.refresh() is None
        getattr(own, name)[1] = after
        assert engine.contract.refresh() == f"model.layers.1.mlp.up_proj.{name}"
        assert engine.contract.refresh() is None


def test_a_class_and_hooks_of_all_modules(monkeypatch):
    model = tiny()
    with Engine(model, config=CONFIG) as engine:
        before, kind = engine.fingerprint, type(model.model.layers[0].mlp)
        whole = kind.forward
        with monkeypatch.context() as patches:
            patches.setattr(kind, "forward", lambda self, x: whole(self, x) * 0.5)
            assert engine.fingerprint != before
        assert engine.fingerprint == before
        with nn.modules.module.register_module_forward_hook(lambda *_: None):
            assert engine.fingerprint != before
        assert engine.fingerprint == before


@pytest.mark.parametrize("kept", ["in inference mode", "verify_weights", "by nobody"])
def test_digests_are_taken_where_they_are_asked_for(kept, monkeypatch):
    """Quick looks read no bits of weights: only digests tell that these were written to."""
    with torch.inference_mode(kept == "in inference mode"):
        model = tiny()
    config = replace(CONFIG, verify_weights=kept == "verify_weights")
    with Engine(model, config=config) as engine:
        contract, before = engine.contract, engine.fingerprint
        assert contract.digests is (kept != "by nobody")
        for name in ("checksum", "digest_weights"):  # none is taken
            for module in (outline, contract_module):
                monkeypatch.setattr(module, name, None, raising=False)
        with torch.inference_mode(kept == "in inference mode"):
            model.lm_head.weight.data.mul_(1.5)
        assert not contract.changed() and contract.refresh(digest=False) is None
        monkeypatch.undo()
        assert contract.changed(digest=True) is contract.digests
        assert contract.refresh() == ("the weights" if contract.digests else None)
        assert not contract.changed(digest=True) and contract.refresh() is None
        assert (engine.fingerprint != before) is contract.digests


# In a process of its own: here, engines of other tests may be open.
COUNTED = """
import gc
import torch
from torch.optim import optimizer
from tests.determinism.test_model_state import CONFIG, Engine, tiny

def hooks():
    return len(optimizer._global_optimizer_pre_hooks), len(optimizer._global_optimizer_post_hooks)

class Under(torch.optim.Optimizer):
    def step(self, closure=None):
        assert engine.contract.changed(), "it has begun"
        assert engine.contract.refresh() == "the weights" and not engine.contract.changed()

model = tiny()
assert hooks() == (0, 0)
with Engine(model, config=CONFIG) as engine:
    with Engine(tiny(), config=CONFIG):
        assert hooks() == (1, 1)
    assert hooks() == (1, 1) and not engine.contract.changed()
    Under(model.parameters(), {}).step()
    assert engine.contract.changed(), "it has ended"
assert hooks() == (0, 0)
dropped = Engine(model, config=CONFIG)
assert hooks() == (1, 1)
del dropped
gc.collect()
assert hooks() == (0, 0)
print("seen to the end")
"""


def test_optimizers_are_counted_as_long_as_an_engine_is_open():
    """When a step begins and when it ends."""
    child = subprocess.run([sys.executable, "-c", COUNTED], capture_output=True, text=True)
    assert child.stdout == "seen to the end\n", child.stderr


# Descriptions


def test_private_numbers_of_a_users_class():
    """Also where a stand-in is of that class; of the libraries' classes they are bookkeeping."""

    class Louder(nn.LayerNorm):
        _factor = None

    for kind, seen in ((Louder, True), (nn.LayerNorm, False)):
        module = kind(4)
        module._factor = 2.0
        for own in (module, standing_in(module, FusedNorm)):
            found = function_settings(nn.Sequential(own))
            assert found.get("0._factor") == (2.0 if seen else None)


def test_descriptions_hold_no_address():
    """They go into the fingerprint: another process must find the same. What holds tensors was
    computed, perhaps from an address; other values of the user's are settings."""
    model = llama()
    own = model.model.layers[1].mlp.up_proj
    own.kept, own.sizes = (123, torch.ones(2)), (1, [2, 3])
    found = function_settings(model)
    assert " at 0x" not in repr(found) + repr(description(Halves()))
    assert found["model.layers.0.mlp.down_proj.scaling"] == [["en", 1.0], ["fr", 1.0]]
    assert "model.layers.1.mlp.up_proj.kept" not in found
    assert found["model.layers.1.mlp.up_proj.sizes"] == [1, [2, 3]]
