"""Plain greedy requests give transformers' own tokens; patching leaves no trace."""

from dataclasses import replace

import pytest
import torch

from tests.support.budget import first
from tests.support.tiny import FAMILIES, hf_greedy, prompts, tiny
from tests.support.tolerances import LOGPROBS, close
from tinyspec import Engine, EngineConfig, SamplingParams

GREEDY = SamplingParams(max_new_tokens=40)


@pytest.mark.crossed(1)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("page_size", [16, 128])
def test_greedy_equals_transformers(family, page_size):
    model = tiny(family)
    expected = [hf_greedy(model, prompt, 40) for prompt in prompts(8)]
    with Engine(model, config=EngineConfig(page_size=page_size)) as engine:
        outputs = engine.generate(prompts(8), GREEDY)
    assert [output.completions[0].token_ids for output in outputs] == expected


def test_control_another_model_differs():
    expected = [hf_greedy(tiny(seed=1), prompt, 40) for prompt in prompts(3)]
    with Engine(tiny()) as engine:
        outputs = engine.generate(prompts(3), GREEDY)
    assert [output.completions[0].token_ids for output in outputs] != expected


@pytest.mark.parametrize("family", first(3, FAMILIES, 0.8))
def test_logprobs_agree_with_a_plain_forward(family):
    model = tiny(family)
    prompt = prompts(5)[4]
    params = replace(GREEDY, deterministic=True, logprobs=True)
    with Engine(model) as engine:
        completion = engine.generate([prompt], params)[0].completions[0]
    with torch.no_grad():
        logits = model(torch.tensor([prompt + completion.token_ids])).logits[0].float()
    rows = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    expected = rows.gather(1, torch.tensor(completion.token_ids)[:, None]).squeeze(1)
    assert close(torch.tensor(completion.logprobs), expected, LOGPROBS)


@pytest.mark.parametrize("family", FAMILIES)
def test_unpatch_leaves_no_trace(family):
    model = tiny(family).train()
    model.get_input_embeddings().eval()
    # Modules in a mode that the module around them is not in.
    next(m for n, m in model.named_modules() if n.endswith(("q_proj", "c_attn", "dense"))).eval()
    before = {name: id(module) for name, module in model.named_modules()}
    training = {name: module.training for name, module in model.named_modules()}
    weights = {name: p.data_ptr() for name, p in model.named_parameters()}
    implementation = model.config._attn_implementation
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    ids = torch.tensor(prompts(5)[3:4])
    model.eval()
    with torch.no_grad():
        logits = model(ids).logits
    for name, module in model.named_modules():
        module.training = training[name]
    with Engine(model) as engine:
        assert {name: p.data_ptr() for name, p in model.named_parameters()} == weights
        engine.generate(prompts(3), GREEDY)
        assert {n: m.training for n, m in model.named_modules()}.items() >= {
            (n, t)
            for n, t in training.items()
            if n in dict(model.named_modules()) and "rotary" not in n
        }
    assert {name: id(module) for name, module in model.named_modules()} == before
    assert {name: module.training for name, module in model.named_modules()} == training
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    assert model.config._attn_implementation == implementation
    model.eval()
    with torch.no_grad():
        assert torch.equal(model(ids).logits, logits)


def test_state_dict_is_the_same_while_patched():
    model = tiny("qwen3")
    names = set(model.state_dict())
    with Engine(model):
        assert set(model.state_dict()) == names


def test_the_users_settings_come_back():
    model = tiny()
    torch.set_float32_matmul_precision("medium")
    try:
        with Engine(model) as engine:
            pinned = engine.generate(prompts(3), replace(GREEDY, deterministic=True, logprobs=True))
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
    with Engine(model) as engine, torch.autocast("cpu", torch.bfloat16):
        plain = engine.generate(prompts(3), replace(GREEDY, deterministic=True, logprobs=True))
    assert [o.completions[0].logprobs for o in pinned] == [o.completions[0].logprobs for o in plain]
