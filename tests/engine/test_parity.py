"""Plain greedy requests give transformers' own tokens; patching leaves no trace."""

from dataclasses import replace

import pytest
import torch

from tests.support.budget import first
from tests.support.tiny import FAMILIES, hf_greedy, prompts, tiny
from tests.support.tolerances import LOGPROBS, close
from tinyspec import Engine, EngineConfig, SamplingParams

TOKENS = 16
GREEDY = SamplingParams(max_new_tokens=TOKENS)


def tokens(model, given, page_size=16):
    with Engine(model, config=EngineConfig(page_size=page_size)) as engine:
        return [output.completions[0].token_ids for output in engine.generate(given, GREEDY)]


@pytest.mark.crossed(1)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("page_size", [16, 128])
def test_greedy_equals_transformers(family, page_size):
    model, given = tiny(family), prompts(6)
    expected = [hf_greedy(model, prompt, TOKENS) for prompt in given]
    assert tokens(model, given, page_size) == expected
    if family == "llama":
        assert tokens(tiny(seed=1), given) != expected, "control: another model's are others"


@pytest.mark.parametrize("family", first(1, FAMILIES, 0.8))
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
