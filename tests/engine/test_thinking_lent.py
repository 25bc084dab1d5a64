"""A thinking model by itself beside an open engine: read, trained, copied, loaded, saved."""

import pytest
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


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_read_and_trained_beside_an_engine(kind):
    """Gold states reach the model's own layers, whoever ran last; the engine follows each step."""
    model, other = thinking_model(kind), thinking_model(kind)
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
    """Of a model that thinks and of one that does not: as an engine that is made then."""
    for name in ("thinking", "plain"):
        model = thinking_model()
        wanted = exact(thinking=name == "thinking")
        served = model if wanted.thinking else model.backbone
        with engine_of(served) as engine:
            engine.generate([PROMPT], wanted)
            model.to(torch.bfloat16)
            found = engine.generate([PROMPT], wanted)[0]
            with engine_of(served) as other:
                expected = other.generate([PROMPT], wanted)[0]
        assert all_bits(found) == all_bits(expected) and found.completions[0].error is None
        assert found.fingerprint == expected.fingerprint
