"""The two blocks on backbones of several kinds: shapes, gold states, saving, refusals."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from benchmarks.coin_reader.reading import generate, read
from tests.support import thinking as support
from tests.support.thinking import END, KINDS, MORE_KINDS, SIZES, backbone, prompt_of
from tinyspec.errors import UnsupportedModelError
from tinyspec.thinking.config import ThinkingConfig
from tinyspec.thinking.model import IGNORED, ThinkingModel

ALL_KINDS = [*KINDS, *MORE_KINDS]


def thinking_model(kind="llama", **fields):
    """Random weights, of which T now and then thinks and now and then does not."""
    return support.thinking_model(kind, biased=False, **fields)


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_parallel_forward_with_its_own_thoughts_is_the_sequential_one(kind):
    """Given as gold what the sequential reading thought, the teacher-forced forward has the same
    logits at the last token; with other thoughts it has not."""
    model = thinking_model(kind)
    prompt = prompt_of(8 * 5 + 3)
    reading = read(model, [prompt])
    gold = torch.full((1, 5, 4), IGNORED)
    for chunk, thought in enumerate(reading.thoughts[0]):
        gold[0, chunk, : len(thought)] = torch.tensor(thought)
    ids = torch.tensor([prompt])
    with torch.no_grad():
        found = model(ids, gold)
        other = model(ids, torch.where(gold >= 0, (gold + 7) % 64, gold))
    assert len(reading.thoughts[0]) == 5
    torch.testing.assert_close(found.logits[0, -1], reading.logits[0])
    assert not torch.allclose(other.logits[0, -1], reading.logits[0], atol=1e-3)
    # T's own argmax along its own thoughts.
    kept = gold[0] >= 0
    assert torch.equal(found.thought_logits[0].argmax(-1)[kept], gold[0][kept])


def test_trivial_thoughts_leave_the_plain_model():
    model = thinking_model()
    ids = torch.tensor([prompt_of(40)])
    trivial = torch.full((1, 5, 2), IGNORED)
    trivial[..., 0] = END
    with torch.no_grad():
        assert torch.equal(model(ids, trivial).logits, model.backbone(ids).logits)
        thinking = trivial.clone()
        thinking[0, 2] = torch.tensor([9, END])
        found, plain = model(ids, thinking).logits, model.backbone(ids).logits
    # The state of chunk 2's thought is added to chunk 3.
    assert torch.equal(found[0, :24], plain[0, :24])
    assert not torch.equal(found[0, 24], plain[0, 24])


def test_answers_get_no_state():
    """Rows with labels are decoded later, without a state: whatever was thought before them."""
    model = thinking_model()
    ids = torch.tensor([prompt_of(24)])
    first, second = (torch.tensor([[[token, END]] * 2]) for token in (9, 7))
    labels = torch.full_like(ids, IGNORED)
    labels[:, 8:] = ids[:, 8:]
    with torch.no_grad():
        read, other = (model(ids, thoughts).logits for thoughts in (first, second))
        decoded, same = (model(ids, thoughts, labels).logits for thoughts in (first, second))
    assert torch.equal(decoded, same) and torch.equal(decoded, model.backbone(ids).logits)
    assert not torch.equal(read[:, 8:], other[:, 8:])


def test_loss_falls_on_both_parts():
    torch.manual_seed(0)
    model = ThinkingModel.from_backbone(
        backbone("llama"), ThinkingConfig(END, max_thought_tokens=4)
    )
    ids = torch.tensor([prompt_of(28, n) for n in range(4)])
    thoughts = torch.tensor([[5, END, IGNORED], [END, IGNORED, IGNORED], [7, 8, END]])
    labels = torch.full_like(ids, IGNORED)
    labels[:, -2:] = ids[:, -2:]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        found = model(ids, thoughts.expand(4, 3, 3), labels)
        assert torch.equal(found.loss, found.answer_loss + found.thought_loss)
        losses.append((found.answer_loss.item(), found.thought_loss.item()))
        optimizer.zero_grad()
        found.loss.backward()
        optimizer.step()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert losses[-1][0] < 0.1 * losses[0][0] and losses[-1][1] < 0.1 * losses[0][1]


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_saved_and_loaded(kind, tmp_path):
    model = thinking_model(kind)
    model.save_pretrained(tmp_path)
    loaded = ThinkingModel.from_pretrained(tmp_path, dtype=torch.float32)
    assert loaded.thinking_config == model.thinking_config
    state, other = model.state_dict(), loaded.state_dict()
    assert state.keys() == other.keys() and all(torch.equal(state[k], other[k]) for k in state)
    prompt = prompt_of(50)
    assert generate(loaded, prompt, 8, None) == generate(model, prompt, 8, None)


def test_blocks_of_another_backbone_are_refused(tmp_path):
    model = thinking_model()
    model.save_pretrained(tmp_path)
    wider = LlamaForCausalLM(LlamaConfig(**{**SIZES, "intermediate_size": 128}))
    wider.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"thinking\.safetensors does not fit this backbone.*mlp"):
        ThinkingModel.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"chunk_size": 0}, r"chunk_size=0 is not allowed: at least 1"),
        ({"chunk_size": 2.0}, r"chunk_size=2.0 is not allowed: an int"),
        ({"layer_in": 9}, r"layer_in=9 is not allowed: -4 to 3 for a model of 4 layers"),
        ({"layer_in": 2, "layer_out": 2}, r"layer_in=2, layer_out=2 are not allowed"),
        ({"end_token_id": 64}, r"end_token_id=64 is not allowed: below the 64 tokens"),
        ({"max_thought_tokens": 1}, r"max_thought_tokens=1 is not allowed: at least 2"),
    ],
)
def test_config_is_checked(fields, message):
    with pytest.raises(ValueError, match=message):
        ThinkingModel.from_backbone(
            backbone("llama"), ThinkingConfig(**{"end_token_id": END, **fields})
        )


def test_models_without_the_parts_are_refused():
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2))
    with pytest.raises(UnsupportedModelError, match="GPT2LMHeadModel cannot think: GPT2Model has"):
        ThinkingModel.from_backbone(gpt2, ThinkingConfig(END))


WRONG_SHAPES = {
    (1, 4, 2): r"thoughts\.shape=\[1, 4, 2\] is not allowed: .* 24 tokens have 3 whole",
    (1, 2, 5): r"thoughts\.shape=\[1, 2, 5\] is not allowed: .* max_thought_tokens=4",
    (2, 2, 2): r"thoughts\.shape=\[2, 2, 2\] is not allowed: \[1, chunks, tokens\]",
}


def test_gold_thoughts_are_checked():
    model = thinking_model()
    for shape, message in WRONG_SHAPES.items():
        with pytest.raises(ValueError, match=message):
            model(torch.tensor([prompt_of(24)]), torch.full(shape, END))
