"""What people run on top of ``model.generate`` runs as it is on a patched model.

Results are those of an unpatched one.
"""

from __future__ import annotations

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    pipeline,
)

from tests.support.drop_in import PAD, greedy, own, patched, random_ids
from tests.support.tiny import tiny
from tinyspec.tools.demo import BUNDLED

TEXTS = ["User: What is 2 + 3?\nBot:", "Once upon a time", "User: Tell me a story.\nBot:"]
CHATS = [
    [{"role": "user", "content": "What is 2 + 3?"}],
    [
        {"role": "user", "content": "What is 4 + 4?"},
        {"role": "assistant", "content": "4 + 4 = 8."},
        {"role": "user", "content": "Tell me a story about a fox."},
    ],
]
GREEDY = {"max_new_tokens": 16, "do_sample": False}


@pytest.fixture(scope="module")
def tokenizer():
    loaded = AutoTokenizer.from_pretrained(BUNDLED)
    loaded.padding_side = "left"
    return loaded


def bundled():
    return AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32)


@pytest.fixture(scope="module")
def plain():
    return bundled()


@pytest.fixture(scope="module")
def model():
    with patched(bundled()) as model:
        yield model


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"batch_size": 2},
        {"batch_size": 3, "return_full_text": False},
        {"return_full_text": True},
        {"return_tensors": True},
        {"max_new_tokens": 5, "repetition_penalty": 1.3},
    ],
    ids=str,
)
@pytest.mark.parametrize("asked", [TEXTS, CHATS], ids=["texts", "chats"])
def test_pipeline(model, plain, tokenizer, arguments, asked):
    answers = []
    for one in (model, plain):
        pipe = pipeline("text-generation", model=one, tokenizer=tokenizer)
        # Without lengths and modes of its own, a pipeline samples 256 tokens.
        found = pipe(asked, **{**GREEDY, **arguments})
        answers.append([pipe(asked[0], **{**GREEDY, **arguments}), *found])
    assert answers[0] == answers[1]
    assert model.generate.stats().committed > 0


def test_control_a_pipeline_did_run_on_tinyspec(model, tokenizer):
    before = model.generate.stats().committed
    pipeline("text-generation", model=model, tokenizer=tokenizer)(TEXTS, **GREEDY)
    assert model.generate.stats().committed >= before + 3


def test_a_pipeline_hands_on_what_tinyspec_adds(model, tokenizer):
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
    asked = {"do_sample": True, "max_new_tokens": 12, "seed": 3, "deterministic": True}
    alone = pipe(TEXTS[1], **asked)
    assert pipe([TEXTS[1], TEXTS[2]], batch_size=2, **asked)[0] == alone
    assert pipe(TEXTS[1], **{**asked, "seed": 4}) != alone


def test_a_chat_of_several_turns(model, plain, tokenizer):
    said = {}
    for one in (model, plain):
        chat = []
        for turn in ("What is 2 + 3?", "And 4 + 4?", "Tell me a story about a fox."):
            chat.append({"role": "user", "content": turn})
            inputs = tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            new = one.generate(**inputs, **GREEDY)[0, inputs["input_ids"].shape[1] :]
            text = tokenizer.decode(new, skip_special_tokens=True)
            chat.append({"role": "assistant", "content": text})
        said[one] = chat
    assert said[model] == said[plain]


def test_no_grad_inference_mode_and_autocast():
    prompt = random_ids(12)
    expected = greedy(own(), prompt)
    contexts = (
        torch.no_grad(),
        torch.inference_mode(),
        torch.enable_grad(),
        torch.autocast("cpu", torch.bfloat16),
    )
    for first in contexts:
        with patched(tiny()) as model:
            with first:
                assert greedy(model, prompt) == expected
            for context in contexts:
                with context:
                    assert greedy(model, prompt) == expected
            loss = model(torch.tensor([prompt]), labels=torch.tensor([prompt])).loss
            loss.backward()
            assert all(p.grad is not None for p in model.parameters())


def test_results_can_be_trained_on():
    """Nothing that a call returns is an inference tensor, unless the caller is in that mode."""
    with patched(tiny()) as model:
        found = model.generate(
            torch.tensor([random_ids(9)]),
            max_new_tokens=4,
            pad_token_id=PAD,
            return_dict_in_generate=True,
            output_scores=True,
            output_logits=True,
        )
        assert not any(t.is_inference() for t in (found.sequences, *found.scores, *found.logits))
        model(found.sequences, labels=found.sequences).loss.backward()
