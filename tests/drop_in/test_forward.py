"""``canonical(model)`` and ``patch(model, forward=True)``: for every token ``model(...)`` gives the
logits that generation computed, bit for bit, with gradients of the function that was evaluated, or
refuses by name. How all model types do: tests/model/test_families.py."""

from __future__ import annotations

import copy
import dataclasses
import threading
from contextlib import closing

import pytest
import torch
from torch import nn

import tinyspec
from tests.support import forward as f
from tests.support.budget import first
from tests.support.drop_in import prepared
from tests.support.judge import padded
from tests.support.recorded import as_on_a_gpu
from tests.support.zoo import VOCAB, prompts
from tests.support.zoo import tiny as zoo_tiny
from tinyspec import EngineConfig, SamplingParams, UnsupportedModelError, canonical

KINDS = ("llama", "gpt2", "gemma3_text", "qwen3_moe", "phi3", "qwen3", "gpt_oss")
DTYPES = (torch.float32, torch.bfloat16)
CONFIG = EngineConfig(max_rows=32, reference_rows=16)
IDS = torch.randint(3, VOCAB, (7, 33), generator=torch.Generator().manual_seed(0))
LONG = torch.randint(3, VOCAB, (2, 100), generator=torch.Generator().manual_seed(1))
DETERMINISTIC = SamplingParams(max_new_tokens=12, deterministic=True, logprobs=True)


def tiny(kind: str = "llama", seed: int | None = None):
    return zoo_tiny(kind, seed)


def quiet(kind: str = "llama", dtype: torch.dtype = torch.float32):
    return f.quiet(tiny(kind).to(dtype))


def same(a: f.Gradients, b: f.Gradients) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def trained(model, ids=IDS) -> f.Gradients:
    return f.gradients(model, model(input_ids=ids, labels=ids).loss)


SUBJECTS = [
    *((kind, DTYPES[n % 2]) for n, kind in enumerate(KINDS)),
    *((kind, DTYPES[1 - n % 2]) for n, kind in enumerate(KINDS)),
]


@pytest.fixture(scope="module", params=first(4, SUBJECTS, 3), ids=str)
def subject(request):
    """A patched model, and what it has generated."""
    model = quiet(*request.param)
    tinyspec.patch(model, CONFIG, forward=True)
    with closing(model.generate):
        yield model, f.rollout(model, prompts()[:3], 8, do_sample=True, seed=3)


def rows_of(model, made):
    """The logits of each row that generation made, by itself."""
    return [model(input_ids=torch.tensor([row])).logits[0] for row in made.rows]


def ways(model, made):
    """The logits [l, V] of all rows that generation made, by one call or several."""
    for side in ("left", "right"):
        ids, mask = padded(made.rows, side)
        logits = model(ids, attention_mask=mask, use_cache=False).logits
        assert not logits[mask == 0].any()
        yield side, f.unpadded(logits, mask)
    lengths = list(map(len, made.rows))
    yield "packed", model(**f.packed(made.rows)).logits[0].split(lengths)
    yield "a tuple", f.unpadded(model(ids, attention_mask=mask, return_dict=False)[0], mask)
    yield "alone", rows_of(model, made)
    many, mask = ids.repeat(3, 1), mask.repeat(3, 1)  # of several passes, and rows that span two
    yield "many", f.unpadded(model(many, attention_mask=mask).logits, mask)[-len(lengths) :]


@pytest.mark.crossed(2)
@pytest.mark.parametrize("mode", ["plain", "both", "recorded", "training"])
def test_the_bits_of_generation(subject, mode):
    model, made = subject
    model.train(mode in ("both", "training"))
    recorded = mode in ("both", "recorded")
    with torch.set_grad_enabled(recorded):
        for way, logits in ways(model, made):
            assert made.equal(logits), way
            assert logits[0].requires_grad == recorded
    model.eval()


def test_gradients(subject):
    """Of every parameter, at most twice as far from those of fp64 as plain's."""
    model, made = subject
    ids, mask = padded(made.rows, "right")

    def run():
        return f.unpadded(model(ids, attention_mask=mask).logits, mask)

    assert f.wrong_gradients(model, made.rows, run) is None
    found = f.gradients(model, f.loss_of(run(), made.rows))
    assert found.keys() == dict(model.named_parameters()).keys()
    plain = copy.deepcopy(model)(ids, attention_mask=mask).logits
    # A CPU without instructions for bf16 may compute its products the same whatever the rows, and
    # so may one with AMX.
    rounds = torch.cpu._is_avx512_bf16_supported() and not torch.cpu._is_amx_tile_supported()
    if model.dtype == torch.float32 or rounds:
        assert not all(map(torch.equal, f.unpadded(plain, mask), run())), "control of the bits"


def test_logits_to_keep():
    model = tiny()
    mask = torch.ones_like(IDS)
    mask[0, :4] = mask[1, -9:] = 0
    with canonical(model, CONFIG):
        every = model(IDS, attention_mask=mask).logits
        for keep in (5, torch.tensor([3, 30, 7]), IDS[0, :0]):
            kept = every[:, -keep:] if isinstance(keep, int) else every[:, keep]
            assert torch.equal(model(IDS, attention_mask=mask, logits_to_keep=keep).logits, kept)


def test_labels():
    """The loss, and a mean over another number of items, as transformers computes them."""
    model = quiet("gpt2").train()
    ids, mask = padded(prompts()[:4], "right")
    asked = {"attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    losses = []
    for more in ({}, {"num_items_in_batch": 7}):
        with canonical(model, CONFIG):
            ours = model(ids, **asked, **more)
        theirs = model(ids, **asked, **more)
        assert type(ours) is type(theirs)
        torch.testing.assert_close(ours.loss, theirs.loss)
        losses.append(ours.loss)
    assert losses[0] != losses[1]


CHECKPOINTED = [("gemma3_text", False), ("llama", True), ("llama", False), ("qwen3_moe", True)]


@pytest.mark.parametrize("case", first(2, CHECKPOINTED, 3), ids=str)
def test_gradient_checkpointing(case):
    """Of sequences that span passes; the backward after the block as well."""
    kind, reentrant = case
    model = quiet(kind).train()
    with canonical(model, CONFIG):
        expected, logits = trained(model, LONG), model(LONG).logits
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        found = model(LONG, labels=LONG)
        assert torch.equal(found.logits, logits)
        assert same(f.gradients(model, found.loss), expected)
        after = model(LONG, labels=LONG).loss
    assert same(f.gradients(model, after), expected)


@pytest.mark.parametrize("kind", first(1, KINDS, 4))
def test_the_path_of_a_gpu(kind, monkeypatch):
    """Its fused layers, with twins in place of kernels: a layer gives the next one its norm."""
    as_on_a_gpu(monkeypatch)
    config = dataclasses.replace(CONFIG, backend="triton")
    model = quiet(kind)
    tinyspec.patch(model, config, forward=True)
    made = f.rollout(model, prompts()[:3], 6)
    ids, mask = padded(made.rows, "right")

    def run():
        return f.unpadded(model(ids, attention_mask=mask).logits, mask)

    assert made.equal(run())
    assert f.wrong_gradients(model, made.rows, run) is None
    model.train()
    expected = trained(model)
    model.gradient_checkpointing_enable()
    assert same(trained(model), expected)


def tied():
    model = tiny()
    model.lm_head.weight = model.model.embed_tokens.weight
    model.config.tie_word_embeddings = True
    return model


# Tied weights, and families that write to what they computed.
@pytest.mark.parametrize("kind", first(2, ["tied", "roc_bert", "gemma3n_text"], 9))
def test_other_gradients(kind):
    model = tied() if kind == "tied" else quiet(kind)
    ids = IDS[:2, :9]
    with canonical(model, CONFIG):
        assert f.wrong_gradients(model, ids.tolist(), lambda: model(ids).logits) is None


def test_an_adapter():
    """It alone is trained, and seen by both sides at once; a pass without it between a forward and
    its backward changes nothing."""
    peft = pytest.importorskip("peft")
    names = ["q_proj", "v_proj", "down_proj"]
    config = peft.LoraConfig(r=4, target_modules=names, init_lora_weights=False)
    adapted = peft.get_peft_model(tiny(), config)
    tinyspec.patch(adapted, CONFIG, forward=True)
    expected, plain = trained(adapted), trained(copy.deepcopy(adapted))
    assert expected.keys() == plain.keys() and all("lora" in name for name in expected)
    assert f.error(expected, plain) < 1e-4
    adapted.train().enable_input_require_grads()
    adapted.gradient_checkpointing_enable()
    loss = adapted(input_ids=IDS, labels=IDS).loss
    with torch.no_grad(), adapted.disable_adapter():
        bare = f.rollout(adapted, prompts()[:2], 5)
        assert bare.equal(rows_of(adapted, bare))
    assert same(f.gradients(adapted, loss), expected)
    made = f.rollout(adapted, prompts()[:2], 5)
    assert made.equal(rows_of(adapted, made)) and not torch.equal(made.logits[0], bare.logits[0])


def step(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(IDS, labels=IDS).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def hooks(model):
    model.register_forward_hook(lambda m, a, out: setattr(out, "logits", out.logits / 2))
    model.model.layers[0].mlp.register_forward_hook(lambda m, a, out: out * 2)


CHANGES = {
    "a step": step,
    "hooks": hooks,
    "weights": lambda model: model.load_state_dict(tiny(seed=5).state_dict()),
    "a dtype": lambda model: model.to(torch.bfloat16),
    "frozen": lambda model: model.model.requires_grad_(False),
    "words": lambda model: model.resize_token_embeddings(VOCAB + 8),
    "a parameter": lambda model: setattr(
        model.lm_head, "weight", nn.Parameter(torch.ones(VOCAB, 64))
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_reach_both_sides(change):
    model = tiny()
    tinyspec.patch(model, CONFIG, forward=True)
    before = model(IDS).logits.detach()  # what a graph holds is not resized
    CHANGES[change](model)
    made = f.rollout(model, prompts()[:3], 5)
    assert made.equal(rows_of(model, made))
    torch.testing.assert_close(
        model(IDS).logits, copy.deepcopy(model)(IDS).logits, rtol=0.05, atol=0.1
    )
    assert torch.equal(model(IDS).logits, before) == (change == "frozen")
    assert trained(model).keys() == {n for n, p in model.named_parameters() if p.requires_grad}


CANNOT = {
    "use_cache": {"use_cache": True},
    "inputs_embeds": {"input_ids": None, "inputs_embeds": torch.zeros(1, 3, 64)},
    "past_key_values|cache": {"past_key_values": object()},
    "output_hidden_states": {"output_hidden_states": True},
    "output_attentions": {"output_attentions": True},
    r"attention_mask='a tensor \[7, 1, 33, 33\]'": {"attention_mask": torch.ones(7, 1, 33, 33)},
    r"position_ids\[0, 0\]=5 .*: 0": {"position_ids": torch.arange(5, 38)[None]},
    r"position_ids\[0, 20\]=25": {"position_ids": torch.tensor([[*range(20), *range(25, 38)]])},
    "input_ids": {"input_ids": IDS[0]},
    "at least one token": {"attention_mask": torch.zeros_like(IDS)},
    "a sequence's length": {"input_ids": torch.ones(1, 600, dtype=torch.long)},
    "cu_seq_lens_q": {"cu_seq_lens_q": torch.tensor([0, 33])},
}


def test_refused_arguments():
    """Before anything runs."""
    model = tiny()
    with canonical(model, CONFIG):
        for module in [*model.modules()][1:]:
            module.register_forward_pre_hook(lambda m, a: pytest.fail("it runs"))
        for match, given in CANNOT.items():
            with pytest.raises(ValueError, match=match):
                model(**{"input_ids": IDS, **given})


def hooked():
    model = tiny()
    model.model.layers[0].mlp.register_full_backward_hook(lambda *a: None)
    return model


def noisy():
    model = tiny().train()
    model.get_input_embeddings().neftune_noise_alpha = 5.0
    return model


OF_FP8 = dataclasses.replace(CONFIG, kv_dtype="fp8_e4m3")
ROUTED = {"output_router_logits": True}
# A model, its config, what it is given.
REFUSED = {
    "layers.0.mlp has backward hooks": (hooked, CONFIG, {}),
    "neftune_noise_alpha": (noisy, CONFIG, {}),
    "output_router_logits": (lambda: tiny("qwen3_moe"), CONFIG, ROUTED),
    "config.output_router_logits": (lambda: zoo_tiny("qwen3_moe", **ROUTED), CONFIG, {}),
    "kv_dtype='fp8_e4m3'": (tiny, OF_FP8, {}),
    "labels.*BartForCausalLM has a loss": (lambda: tiny("bart"), CONFIG, {"labels": IDS}),
    r"transformer\.drop\.p": (lambda: tiny("gpt2").train(), CONFIG, {}),
}


@pytest.mark.parametrize("match", REFUSED)
def test_refused_models(match):
    make, config, given = REFUSED[match]
    model = make()
    with (
        pytest.raises((ValueError, UnsupportedModelError), match=match),
        canonical(model, config),
    ):
        model(IDS, **given)


def test_blocks_within_blocks():
    """Left in any order, the model's own forward comes back."""
    model = tiny()
    own = model(IDS).logits
    with canonical(model, CONFIG):
        found = model(IDS).logits
        with canonical(model, CONFIG):
            assert torch.equal(model(IDS).logits, found)
        tinyspec.patch(model, CONFIG, forward=True)
    assert torch.equal(model(IDS).logits, found)
    with canonical(model):
        assert torch.equal(model(IDS).logits, found)
        tinyspec.unpatch(model)
        with pytest.raises(RuntimeError, match="unpatched"):
            model(IDS)
    assert torch.equal(model(IDS).logits, own) and not vars(model).keys() & {"forward", "generate"}


def test_an_unserved_generate_is_transformers_own():
    """Its steps call the model's own forward, with a cache."""
    model = tiny()
    asked = {"num_beams": 2, "max_new_tokens": 4, "do_sample": False}
    own = model.generate(IDS, **asked)
    tinyspec.patch(model, CONFIG, forward=True)
    assert torch.equal(model.generate(IDS, **asked), own)
    assert not torch.equal(model(IDS).logits, copy.deepcopy(model)(IDS).logits)


def test_generation_in_another_thread():
    """While forwards run, and backwards that compute layers again."""
    model = quiet().train()
    tinyspec.patch(model, CONFIG, forward=True)
    made, expected = f.rollout(model, prompts()[:2], 12), trained(model)
    model.gradient_checkpointing_enable()
    over, found = threading.Event(), []

    def generate():
        while not (over.is_set() and found):
            found.append(f.rollout(model, prompts()[:2], 12))

    thread = threading.Thread(target=generate)
    thread.start()
    try:
        assert all(same(trained(model), expected) for _ in range(5))
    finally:
        over.set()
        thread.join()
    assert found[-1].equal(rows_of(model, made)) and all(one.rows == made.rows for one in found)


def test_through_wrappers():
    """torch.compile's, and accelerate's without mixed precision."""
    model = tiny()
    compiled = torch.compile(model, backend="eager")
    wrapped = prepared(model, "no")
    with canonical(compiled, CONFIG):
        expected = model(IDS).logits
        assert torch.equal(compiled(IDS).logits, expected)
        assert torch.equal(wrapped(IDS).logits, expected)
