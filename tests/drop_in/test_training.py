"""Training, evaluation, saving and loading around ``model.generate`` of a patched model.

Everything else of the model is what it is on an unpatched copy, bit for bit, and the next call sees
every change.
"""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import tinyspec
from tests.support.drop_in import PAD, SMALL, greedy, patched, random_ids
from tests.support.tiny import FAMILIES, VOCAB, tiny
from tests.support.tolerances import LOGITS, OTHER_WEIGHTS, close

PROMPT = random_ids(11)
BATCH = torch.tensor([random_ids(24, seed) for seed in range(3)])
ROLLOUT = {"do_sample": True, "seed": 3, "max_new_tokens": 6, "pad_token_id": PAD}


def others(family: str = "llama", seed: int = 5):
    """Another model's weights; those that begin as ones (norms) are others, too."""
    model = tiny(family, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.3 + 1.4 * torch.rand(parameter.shape, generator=generator))
    return model


def train(model, steps: int, between) -> list[object]:
    """Losses and gradients of a loop that calls ``between`` before every optimizer step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    seen: list[object] = []
    torch.manual_seed(1)
    for step in range(steps):
        model.train()
        between(model, step)
        loss = model(BATCH, labels=BATCH).loss
        loss.backward()
        seen += [loss.detach().clone(), *(p.grad.clone() for p in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return seen


@pytest.mark.parametrize(
    "family",
    [
        *FAMILIES[:2],
        *(pytest.param(f, marks=pytest.mark.slow("crosses", 1.5)) for f in FAMILIES[2:]),
    ],
)
def test_a_loop_that_generates_between_steps(family):
    twin = tiny(family)
    expected, found = [], []

    def evaluate(model, _):
        expected.append(greedy(model.eval(), PROMPT))
        model.train()

    plain = train(twin, 4, evaluate)

    def rollout(model, step):
        assert all(module.training for module in model.modules())
        found.append(greedy(model, PROMPT))
        model.generate(BATCH, **ROLLOUT, deterministic=bool(step % 2))
        assert all(module.training for module in model.modules())

    with patched(tiny(family)) as model:
        # transformers' own generate drops out in train mode; tinyspec evaluates.
        ours = train(model, 4, rollout)
    assert found == expected
    assert len({tuple(tokens) for tokens in found}) > 1
    assert len(ours) == len(plain)
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


def test_control_other_weights_have_other_losses():
    plain = train(tiny(), 2, lambda model, _: None)
    other = train(tiny(seed=1), 2, lambda model, _: None)
    assert not any(torch.equal(a, b) for a, b in zip(plain, other, strict=True))


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant):
    losses = []
    for is_patched in (False, True):
        model = tiny()
        if is_patched:
            tinyspec.patch(model, SMALL)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        losses.append(
            train(model, 3, lambda model, _, on=is_patched: greedy(model, PROMPT) if on else None)
        )
        assert model.is_gradient_checkpointing
    assert all(torch.equal(a, b) for a, b in zip(*losses, strict=True))
    model.eval()
    unpatched = copy.deepcopy(model)
    assert greedy(model, PROMPT) == greedy(unpatched, PROMPT)


def test_hooks_of_trainers_keep_the_engine():
    """A fresh one each step only marks embeddings for gradients. Control: one that does more."""
    model = tiny()
    tinyspec.patch(model, SMALL, deterministic=True)
    first = greedy(model, PROMPT)
    served = model.generate._engine.runner.model
    fingerprint = model.generate.fingerprint
    embeddings = model.get_input_embeddings()

    def by_trl(module, given, output):
        output.requires_grad_(True)

    def doubled(module, given, output):
        return output.requires_grad_(True) * 2

    for enable in (model.enable_input_require_grads, model.gradient_checkpointing_enable):
        enable()
        handle = embeddings.register_forward_hook(by_trl)
        assert greedy(model, PROMPT) == first
        model.disable_input_require_grads()
        handle.remove()
        assert greedy(model, PROMPT) == first
    assert model.generate._engine.runner.model is served
    assert model.generate.fingerprint == fingerprint
    embeddings.register_forward_hook(doubled)
    assert greedy(model, PROMPT) != first
    assert model.generate._engine.runner.model is not served
    tinyspec.unpatch(model)


def test_modes_stay_module_by_module():
    with patched(tiny("gpt2")) as model:
        for rate in (module for module in model.modules() if isinstance(module, nn.Dropout)):
            rate.p = 0.5
        twin = tiny("gpt2")
        for mode in (True, False):
            model.train(mode)
            model.transformer.h[0].train(not mode)
            before = {name: module.training for name, module in model.named_modules()}
            assert greedy(model, PROMPT) == greedy(twin, PROMPT)
            assert {name: module.training for name, module in model.named_modules()} == before
        model.train()
        torch.manual_seed(2)
        first = model(BATCH).logits
        torch.manual_seed(3)
        assert not torch.equal(model(BATCH).logits, first)  # dropout is at work
        torch.manual_seed(2)
        greedy(model, PROMPT)
        assert torch.equal(model(BATCH).logits, first)


@pytest.mark.crossed(0.7)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_neox"])
def test_evaluation_mixes_likelihoods_and_generate(family, dtype):
    twin = tiny(family, dtype)
    with patched(tiny(family, dtype)) as model, torch.no_grad():
        for step in range(3):
            ids = BATCH[:, : 8 + step * 5]
            assert torch.equal(model(ids).logits, twin(ids).logits)
            mask = torch.ones_like(ids)
            mask[0, :3] = 0
            found, expected = (m(ids, attention_mask=mask, use_cache=True) for m in (model, twin))
            assert torch.equal(found.logits, expected.logits)
            model.generate(ids, **ROLLOUT, deterministic=[True, False, True])
            # A cache from before a call of generate is as good as ever.
            more = (
                m(ids[:, :1], past_key_values=one.past_key_values).logits
                for m, one in ((model, found), (twin, expected))
            )
            assert torch.equal(*more)
            hidden = (m(ids, output_hidden_states=True).hidden_states[-1] for m in (model, twin))
            assert torch.equal(*hidden)


def load(model, other):
    model.load_state_dict(other.state_dict())
    return model


def assign(model, other):
    model.load_state_dict(copy.deepcopy(other.state_dict()), assign=True)
    return model


def replace_parameters(model, other):
    for name, parameter in other.named_parameters():
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, nn.Parameter(parameter.detach().clone()))
    return model


def half_way(model, other):
    """Only what attention itself owns."""
    for mine, its in zip(model.modules(), other.modules(), strict=True):
        if type(mine).__name__.endswith("Attention"):
            mine.load_state_dict(copy.deepcopy(its.state_dict()), assign=True)
    return model


@pytest.mark.crossed(0.5)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("change", [load, assign, replace_parameters, half_way])
def test_loaded_weights_are_seen(family, change):
    other = others(family)
    with patched(tiny(family)) as model:
        before = logits_of(model)
        change(model, other)
        twin = copy.deepcopy(model)
        expected = greedy(twin, PROMPT)
        with torch.no_grad():
            logits = twin(torch.tensor([PROMPT])).logits[0, -1]
        for deterministic in (False, True):
            assert greedy(model, PROMPT, deterministic=deterministic) == expected
            found = logits_of(model, deterministic=deterministic)
            assert close(found, logits, LOGITS)
        assert not close(before, logits, OTHER_WEIGHTS)


def logits_of(model, **settings) -> torch.Tensor:
    """Logits of the first token behind PROMPT."""
    found = model.generate(
        torch.tensor([PROMPT]),
        max_new_tokens=1,
        pad_token_id=PAD,
        return_dict_in_generate=True,
        output_logits=True,
        **settings,
    )
    return found.logits[0][0]


def test_weights_changed_tells_of_writes_through_data():
    with patched(tiny()) as model:
        first = greedy(model, PROMPT, deterministic=True)
        before = model.generate.fingerprint
        for parameter, other in zip(model.parameters(), others().parameters(), strict=True):
            parameter.data.copy_(other)
        model.generate.weights_changed()
        assert greedy(model, PROMPT, deterministic=True) == greedy(others(), PROMPT) != first
        assert model.generate.fingerprint != before


def test_save_and_load(tmp_path):
    with patched(tiny()) as model:
        first = greedy(model, PROMPT)
        model.save_pretrained(tmp_path / "patched")
        tiny().save_pretrained(tmp_path / "plain")
        for file in (tmp_path / "plain").iterdir():
            assert (tmp_path / "patched" / file.name).read_bytes() == file.read_bytes()
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "patched")
        assert greedy(loaded, PROMPT) == first
        assert list(model.state_dict()) == list(tiny().state_dict())
        with patched(loaded):
            assert greedy(loaded, PROMPT) == first


def pickled(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_copy_of_a_patched_model_is_not_patched(copied, family):
    with patched(tiny(family)) as model:
        first = greedy(model, PROMPT)
        twin = copied(model)
        assert not isinstance(twin.generate, type(model.generate))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
        assert greedy(twin, PROMPT) == first != greedy(model, PROMPT)
        assert torch.equal(twin(BATCH).logits, tiny(family)(BATCH).logits)
        # It can be trained, copied, patched and unpatched like any other.
        tinyspec.unpatch(twin)
        with patched(twin):
            assert greedy(twin, PROMPT) == first
        assert greedy(copied(twin), PROMPT) == first
        # An instance's methods may stay, if they are those of the class.
        methods = {"generate", "generate_batch"}
        assert vars(twin).keys() - methods == vars(tiny(family)).keys()
        assert all(getattr(twin, m).__func__ is getattr(type(twin), m) for m in methods)


def test_dtypes_between_calls():
    twin = tiny()
    with patched(tiny()) as model:
        for dtype in (torch.float32, torch.bfloat16, torch.float32, torch.float64, torch.float32):
            model.to(dtype), twin.to(dtype)
            assert {p.dtype for p in model.parameters()} == {dtype}
            assert torch.equal(model(BATCH).logits, twin(BATCH).logits)
            if dtype == torch.float32:
                assert greedy(model, PROMPT) == greedy(twin, PROMPT)
            elif dtype == torch.bfloat16:
                found = greedy(model, PROMPT, deterministic=True)
                with patched(tiny().to(dtype)) as other:
                    other.load_state_dict(model.state_dict())
                    assert greedy(other, PROMPT, deterministic=True) == found


@pytest.mark.parametrize("family", FAMILIES)
def test_a_dtype_and_back(family):
    """Rounds weights, and the frequencies of RoPE as well, which show far from the beginning."""
    prompt = random_ids(300)
    twin = tiny(family)
    with patched(tiny(family)) as model:
        assert greedy(model, prompt) == greedy(twin, prompt)
        for one in (model, twin):
            one.to(torch.bfloat16).to(torch.float32)
        assert greedy(model, prompt) == greedy(twin, prompt)


def test_more_tokens_between_calls():
    with patched(tiny()) as model:
        greedy(model, PROMPT)
        model.resize_token_embeddings(VOCAB + 40)
        twin = copy.deepcopy(model)
        prompt = [VOCAB + 3, *PROMPT, VOCAB + 39]
        assert greedy(model, prompt) == greedy(twin, prompt)
        model.resize_token_embeddings(VOCAB)
        assert greedy(model, PROMPT) == greedy(tiny(), PROMPT)
