"""What people put around a model, and run on top of ``model.generate``, works as it is: PEFT,
torch.compile, pipelines, training loops. TRL's trainers: tests/integrations. Results are those of
an unpatched model. And training sees the numbers that generation saw, over steps of an optimizer.

What an engine does with each kind of change: tests/engine/test_changes.py."""

from __future__ import annotations

import copy
import functools
import types

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

import tinyspec
from tests.support.drop_in import greedy, own, patched, random_ids
from tests.support.grpo import FAMILIES, PRECISIONS, steps
from tests.support.tiny import tiny
from tinyspec.tools.demo import BUNDLED

IDS = torch.tensor([[5, 17, 3, 99, 42, 8], [0, 0, 7, 7, 30, 61]])
MASK = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]])


def generate(model, **settings):
    return model.generate(
        input_ids=IDS, attention_mask=MASK, max_new_tokens=12, pad_token_id=0, **settings
    )


@pytest.fixture
def adapted():
    """A LoRA model with two adapters that make a difference."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    given = {"r": 4, "lora_alpha": 32, "init_lora_weights": False}
    first = peft.LoraConfig(target_modules=["q_proj", "v_proj", "up_proj"], **given)
    model = peft.get_peft_model(tiny(), first)
    model.add_adapter("other", peft.LoraConfig(target_modules=["o_proj", "q_proj"], **given))
    return model.eval()


def test_an_adapter_in_its_wrapper(adapted, caplog):
    """One for each row is transformers' own affair: PEFT's hooks are on the layers for that call,
    and the next one is served."""
    twin = copy.deepcopy(adapted)
    expected = generate(twin)
    tinyspec.patch(adapted)
    assert torch.equal(generate(adapted), expected)
    with adapted.disable_adapter(), twin.disable_adapter():
        bare = generate(twin)
        assert torch.equal(generate(adapted), bare) and not torch.equal(bare, expected)
    alone = adapted.generate(IDS[:1], max_new_tokens=12, deterministic=True)
    assert torch.equal(generate(adapted, deterministic=True)[:1], alone)
    names = ["__base__", "default"]
    mixed = generate(twin, adapter_names=names)
    assert not torch.equal(mixed, expected)
    assert torch.equal(generate(adapted, adapter_names=names), mixed)
    assert "transformers' own generate runs" in caplog.text
    before = copy.copy(adapted.get_base_model().generate.stats())
    assert torch.equal(generate(adapted), expected)
    assert adapted.get_base_model().generate.stats() != before, "served"
    # After an error PEFT leaves its hooks where they are.
    with pytest.raises(NotImplementedError, match="deterministic"):
        generate(adapted, adapter_names=names, deterministic=True)
    tinyspec.unpatch(adapted)
    assert "generate" not in vars(adapted.get_base_model())


TEXTS = ["User: What is 2 + 3?\nBot:", "Once upon a time", "User: Tell me a story.\nBot:"]
CHATS = [
    [{"role": "user", "content": "What is 2 + 3?"}],
    [
        {"role": "user", "content": "What is 4 + 4?"},
        {"role": "assistant", "content": "4 + 4 = 8."},
        {"role": "user", "content": "Tell me a story about a fox."},
    ],
]
ASKED = (
    (TEXTS, {"batch_size": 2, "repetition_penalty": 1.3}),
    (TEXTS, {"return_tensors": True}),
    (CHATS, {"batch_size": 3, "return_full_text": False}),
)


def test_pipeline():
    """And what tinyspec adds is handed on."""
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED)
    tokenizer.padding_side = "left"
    plain = AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32)
    own = pipeline("text-generation", model=plain, tokenizer=tokenizer)
    with patched(copy.deepcopy(plain)) as model:
        pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
        for asked, arguments in ASKED:
            # Without lengths and modes of its own, a pipeline samples 256 tokens.
            arguments = {"max_new_tokens": 16, "do_sample": False, **arguments}
            for given in (asked[0], asked):
                assert pipe(given, **arguments) == own(given, **arguments)
        assert model.generate.stats().committed > 0
        sampled = {"do_sample": True, "max_new_tokens": 12, "seed": 3, "deterministic": True}
        alone = pipe(TEXTS[1], **sampled)
        assert pipe([TEXTS[1], TEXTS[2]], batch_size=2, **sampled)[0] == alone
        assert pipe(TEXTS[1], **{**sampled, "seed": 4}) != alone


def test_no_grad_and_inference_mode():
    """Nothing that a call returns is an inference tensor, unless the caller is in that mode."""
    prompt = random_ids(12)
    expected = greedy(own(), prompt)
    with patched(tiny()) as model:
        for context in (torch.no_grad(), torch.inference_mode(), torch.enable_grad()):
            with context:
                assert greedy(model, prompt) == expected
            asked = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
            found = generate(model, **asked)
            results = (found.sequences, *found.scores, *found.logits)
            assert not any(t.is_inference() for t in results)
            model(found.sequences, labels=found.sequences).loss.backward()
            assert all(p.grad is not None for p in model.parameters())


def put_over(model):
    """A method over ``model.forward`` that calls the one before, as TRL's trainers put it."""
    before = model.forward

    @functools.wraps(type(model).forward)
    def forward(self, *args, fused=False, **kwargs):
        assert self is not None and not fused
        return before(*args, **kwargs)

    model.forward = types.MethodType(forward, model)


@pytest.mark.parametrize("forward", [False, True])
@pytest.mark.parametrize("patched_first", [False, True])
def test_a_method_over_the_forward(patched_first, forward):
    """The engine's copy runs it around its own modules; a patched forward inside of it serves."""
    prompt = random_ids(9)
    with patched(tiny(), forward=True) as model:
        expected = greedy(model, prompt, deterministic=True)
        logits = model(torch.tensor([prompt])).logits
    model = tiny()
    if not patched_first:
        put_over(model)
    with patched(model, forward=forward):
        if patched_first:
            put_over(model)
        assert greedy(model, prompt, deterministic=True) == expected
        same = torch.equal(model(torch.tensor([prompt])).logits, logits)
        assert same or not forward


@pytest.mark.crossed(4)
@pytest.mark.parametrize("lora", [False, True], ids=["all weights", "LoRA"])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities_of_training_are_those_of_the_rollouts(family, precision, lora):
    if lora:
        pytest.importorskip("peft")
    found = steps(family, precision, 2, lora)
    assert [step.exact for step in found] == [0.0] * 2
    assert max(step.plain for step in found) > 0, "the control"


def test_weights_changed_tells_of_writes_through_data():
    prompt, other = random_ids(11), tiny(seed=5)
    with patched(tiny()) as model:
        first, before = greedy(model, prompt, deterministic=True), model.generate.fingerprint
        for parameter, values in zip(model.parameters(), other.parameters(), strict=True):
            parameter.data.copy_(values)
        model.generate.weights_changed()
        assert greedy(model, prompt, deterministic=True) == greedy(other, prompt) != first
        assert model.generate.fingerprint != before
