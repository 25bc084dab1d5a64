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
