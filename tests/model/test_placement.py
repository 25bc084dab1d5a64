"""Where a model lies: one device is served, hooks of accelerate or not; all else is refused."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM

from tests.support.loading import CONFIG, greedy, load, refused, saved, serve
from tests.support.tiny import tiny
from tinyspec import Engine
from tinyspec.model.cpu_linears import CpuLinear

accelerate = pytest.importorskip("accelerate")
hooks = pytest.importorskip("accelerate.hooks")

CPU = torch.device("cpu")
PARTS = ("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head")
WAYS = {"device_map": "auto"}, {"device_map": {"": "cpu"}}, {"tp_plan": "auto"}


@pytest.mark.parametrize("how", WAYS, ids=str)
def test_onto_one_device(tmp_path, how):
    """By a device map; a plan for tensors shards nothing in one process."""
    model = load(saved(tmp_path), **how)
    device_map = dict(getattr(model, "hf_device_map", {}))
    fingerprint = serve(model, greedy(tiny()))
    assert getattr(model, "hf_device_map", {}) == device_map
    assert fingerprint == serve(tiny()), "where a model came from is not part of it"


def test_hooks_that_only_move_tensors(tmp_path):
    """Of one device: attention runs without its hook, the linears with theirs."""
    model = accelerate.dispatch_model(tiny(), {"": "cpu"}, force_hooks=True)
    attention, linear = model.model.layers[0].self_attn, model.lm_head
    assert hasattr(attention, "_hf_hook") and "forward" in vars(linear)
    calls = []
    whole = linear._hf_hook.pre_forward
    linear._hf_hook.pre_forward = lambda *a, **k: (calls.append(1), whole(*a, **k))[1]
    serve(model, greedy(tiny()))
    assert calls
    with Engine(model, config=CONFIG):
        assert model.lm_head is linear
        assert not any(isinstance(module, CpuLinear) for module in model.modules())


def test_several_hooks_on_one_module():
    model = tiny()
    for _ in range(2):
        hooks.add_hook_to_module(model, hooks.AlignDevicesHook(CPU), append=True)
    assert type(model._hf_hook) is hooks.SequentialHook
    serve(model, greedy(tiny()))
    hooks.add_hook_to_module(model, hooks.AlignDevicesHook(CPU, offload=True), append=True)
    refused(model, "offloaded.*AlignDevicesHook")


def test_a_forward_below_accelerates_is_the_users():
    model = tiny()
    attention = model.model.layers[0].self_attn
    attention.forward = lambda *args, **kwargs: None
    hooks.add_hook_to_module(attention, hooks.AlignDevicesHook(CPU))
    refused(model, "a forward over its attention's interface raised TypeError")


def test_offloading_is_refused(tmp_path):
    """To a disk, as ``from_pretrained`` leaves it, and to a CPU."""
    where = dict.fromkeys(PARTS, "cpu") | {"model.layers.1": "disk"}
    folder, offload = saved(tmp_path / "model"), str(tmp_path / "offload")
    for model in (
        load(folder, device_map=where, offload_folder=offload),
        accelerate.cpu_offload(tiny(), execution_device=CPU),
        accelerate.cpu_offload_with_hook(tiny(), CPU)[0],
    ):
        refused(model, "is offloaded.*; load it onto one device")


def test_other_devices_are_refused():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny().config)
    refused(model, "model.embed_tokens.weight has no data .*meta device")
    model = tiny()
    model.model.layers[1].mlp.up_proj.to("meta")
    refused(model, "model.layers.1.mlp.up_proj.weight has no data")
    # Of several, where no hook of accelerate's moves anything either.
    model = tiny()
    with FakeTensorMode():
        head = torch.empty(*model.lm_head.weight.shape, device="cuda")
        model.lm_head.weight = nn.Parameter(head)
    refused(model, r"it is on more than one device \(cpu, cuda:0\)")
