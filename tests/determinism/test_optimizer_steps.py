"""Steps of optimizers are seen, those of fused ones too, of which torch's counters know nothing."""

from __future__ import annotations

import pytest
import torch

from tests.support.drop_in import PAD, patched, random_ids
from tests.support.tiny import tiny

PROMPT = random_ids(40)
KINDS = pytest.mark.parametrize("kind", [{"fused": True}, {"foreach": True}], ids=str)


def step(*parameters, **kind):
    """One step of AdamW, with gradients that are the parameters."""
    for parameter in parameters:
        parameter.grad = parameter.detach().clone()
    torch.optim.AdamW(parameters, lr=0.3, **kind).step()


@KINDS
def test_a_trained_model_gives_what_its_weights_give_anew(kind):
    """No page of before is used, and the fingerprint is another one."""
    asked = {"max_new_tokens": 8, "pad_token_id": PAD, "do_sample": False, "deterministic": True}
    asked |= {"return_dict_in_generate": True, "output_logits": True}

    def answer(model):
        found = model.generate([PROMPT], **asked)
        return torch.stack(found.logits), model.generate.fingerprint

    seen = []
    with patched(tiny()) as model:
        for _ in range(2):
            seen.append(answer(model))
            step(*model.parameters(), **kind)
        logits, fingerprint = answer(model)
        assert fingerprint not in [before for _, before in seen]
        twin = tiny()
        twin.load_state_dict(model.state_dict())
    with patched(twin):
        expected, its = answer(twin)
    assert torch.equal(logits, expected) and fingerprint == its
    assert not torch.equal(logits, seen[0][0])
