"""A thinking model by itself beside an open engine: read, trained, copied, loaded, saved."""

import torch

from benchmarks.coin_reader.reading import generate
from tests.support.thinking import END, all_bits, engine_of, exact, prompt_of, thinking_model
from tinyspec.thinking.model import IGNORED

PROMPT = prompt_of(67, 67)


def loss_of(model):
    """Of a batch with gold thoughts and answers."""
    ids = torch.tensor([prompt_of(28, n) for n in range(4)])
    gold = torch.tensor([[5, END, IGNORED], [END, IGNORED, IGNORED], [7, 8, END]])
    labels = torch.full_like(ids, IGNORED)
    labels[:, -2:] = ids[:, -2:]
    return model(ids, gold.expand(4, 3, 3), labels).loss


def bits(engine):
    output = engine.generate([PROMPT], exact())[0]
    return all_bits(output), output.fingerprint


def test_read_and_trained_beside_an_engine():
    """Gold states reach the model's own layers, whoever ran last; the engine follows each step."""
    model, other = thinking_model("gemma3_text"), thinking_model("gemma3_text")
    loss, said = loss_of(other), generate(other, PROMPT, 8, None)
    with engine_of(model) as engine:
        found = bits(engine)
        assert torch.equal(loss_of(model), loss) and bits(engine) == found
        assert generate(model, PROMPT, 8, None) == said and bits(engine) == found
        for each in (model, other):
            each.train()
            optimizer = torch.optim.AdamW(each.parameters(), lr=1e-2)
            for _ in range(2):
                optimizer.zero_grad()
                loss_of(each).backward()
                optimizer.step()
        trained = bits(engine)
        assert trained != found and model.training
    with engine_of(other) as engine:
        assert bits(engine) == trained


def test_another_dtype():
    """As an engine that is made then."""
    model = thinking_model()
    with engine_of(model) as engine:
        engine.generate([PROMPT], exact())
        model.to(torch.bfloat16)
        found = engine.generate([PROMPT], exact())[0]
        with engine_of(model) as other:
            expected = other.generate([PROMPT], exact())[0]
    assert all_bits(found) == all_bits(expected) and found.completions[0].error is None
    assert found.fingerprint == expected.fingerprint
