"""The drop-in on models in wrappers: PEFT, torch.compile, accelerate, quantized weights."""

import copy

import pytest
import torch

import tinyspec
from tests.support import zoo
from tests.support.budget import first
from tests.support.drop_in import patched
from tests.support.tiny import tiny

IDS = torch.tensor([[5, 17, 3, 99, 42, 8], [0, 0, 7, 7, 30, 61]])
MASK = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]])


def generate(model, **settings):
    return model.generate(
        input_ids=IDS, attention_mask=MASK, max_new_tokens=12, pad_token_id=0, **settings
    )


@pytest.fixture
def adapted():
    """A LoRA model whose adapter makes a difference."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"])
    torch.manual_seed(0)
    model = peft.get_peft_model(tiny(), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    return model.eval()


def test_an_adapter_in_its_wrapper(adapted):
    twin = copy.deepcopy(adapted)
    expected = generate(twin)
    tinyspec.patch(adapted)
    assert torch.equal(generate(adapted), expected)
    with adapted.disable_adapter(), twin.disable_adapter():
        bare = generate(twin)
        assert torch.equal(generate(adapted), bare)
        assert not torch.equal(bare, expected)
    assert torch.equal(generate(adapted), expected)
    alone = adapted.generate(IDS[:1], max_new_tokens=12, deterministic=True)
    assert torch.equal(generate(adapted, deterministic=True)[:1], alone)
    tinyspec.unpatch(adapted)
    assert "generate" not in vars(adapted.get_base_model())
    assert torch.equal(generate(adapted), expected)


def test_an_adapter_for_each_row_is_transformers_own_affair(adapted, caplog):
    """PEFT's hooks are on the layers for that call; the next one is served."""
    peft = pytest.importorskip("peft")
    adapted.add_adapter("other", peft.LoraConfig(r=4, target_modules=["o_proj", "q_proj"]))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B.other" in name:
                parameter.normal_(std=0.3)
    twin = copy.deepcopy(adapted)
    tinyspec.patch(adapted)
    for names in (["default", "other"], ["__base__", "default"]):
        expected = generate(twin, adapter_names=names)
        assert not torch.equal(expected, generate(twin))
        before = copy.copy(adapted.get_base_model().generate.stats())
        assert torch.equal(generate(adapted, adapter_names=names), expected)
        assert "transformers' own generate runs" in caplog.text
        assert torch.equal(generate(adapted), generate(twin))
        assert adapted.get_base_model().generate.stats() != before, "served"
    # After an error PEFT leaves its hooks where they are.
    with pytest.raises(NotImplementedError, match="deterministic"):
        generate(adapted, adapter_names=names, deterministic=True)


def test_an_adapter_put_on_between_calls():
    peft = pytest.importorskip("peft")
    model = tiny()
    tinyspec.patch(model)
    before = generate(model)
    torch.manual_seed(0)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["o_proj"])).eval()
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.5)
    twin = copy.deepcopy(wrapped)
    expected = generate(twin)
    assert not torch.equal(expected, before)
    assert torch.equal(generate(wrapped), expected)
    assert torch.equal(generate(model), expected)
    merged = wrapped.merge_and_unload()
    assert torch.equal(generate(merged), generate(twin.merge_and_unload()))


@pytest.mark.parametrize("way", first(1, ["in place", "wrapper", "one layer", "forward"], 3))
def test_compiled(way):
    model = tiny()
    expected = generate(model)
    outer = model
    if way == "wrapper":
        outer = torch.compile(model, backend="eager")
    elif way == "in place":
        model.compile(backend="eager")
    elif way == "one layer":
        model.model.layers[1].compile(backend="eager")
    else:
        model.forward = torch.compile(model.forward, backend="eager")
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    tinyspec.patch(outer)
    for _ in range(2):
        assert torch.equal(generate(outer), expected)
        now = {name: set(vars(module)) for name, module in model.named_modules()}
        assert {name for name in now if now[name] - before[name]} <= {""}
    tinyspec.unpatch(outer)
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    assert torch.equal(generate(outer), expected)


def test_on_one_device_by_accelerate(tmp_path):
    pytest.importorskip("accelerate")
    tiny().save_pretrained(tmp_path)
    model = type(tiny()).from_pretrained(tmp_path, device_map={"": "cpu"}, dtype="auto")
    expected = generate(model)
    tinyspec.patch(model)
    assert torch.equal(generate(model), expected)
    tinyspec.unpatch(model)
    assert torch.equal(generate(model), expected)


@pytest.mark.parametrize("kind", first(2, ["phi3", "gpt2", "gpt_neox", "qwen3"], 1))
def test_mixed_precision_by_accelerate(kind):
    """Its autocast is not on in passes: bits and fingerprint are those without it."""
    accelerate = pytest.importorskip("accelerate")
    model, own = zoo.tiny(kind), zoo.tiny(kind)
    accelerate.Accelerator(mixed_precision="bf16", cpu=True).prepare_model(model)
    asked = {"deterministic": True, "return_dict_in_generate": True, "output_logits": True}
    asked |= {"max_new_tokens": 5, "pad_token_id": 0}
    found = []
    for each in (own, model):
        with patched(each):
            out = each.generate(IDS[:1], **asked)
            bits = torch.cat([out.sequences.float(), *out.logits], 1)
            found.append((bits, each.generate.fingerprint))
    assert torch.equal(found[0][0], found[1][0]) and found[0][1] == found[1][1]
    # The control: in a forward of the model's own it is on.
    with torch.no_grad():
        assert not torch.equal(model(IDS).logits, own(IDS).logits)


def test_quantized_weights():
    quantization = pytest.importorskip("torchao.quantization")
    model = tiny()
    quantization.quantize_(model.model, quantization.Int8WeightOnlyConfig())
    twin = copy.deepcopy(model)
    tinyspec.patch(model)
    expected = torch.cat(
        [
            twin.generate(IDS[:1], max_new_tokens=12, pad_token_id=0),
            torch.cat(
                [IDS[1:, :2], twin.generate(IDS[1:, 2:], max_new_tokens=12, pad_token_id=0)], 1
            ),
        ]
    )
    assert torch.equal(generate(model), expected)
    tinyspec.unpatch(model)
