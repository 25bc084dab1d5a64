"""What the tests of loading have in common: one check of a served model, and what is left of it."""

import random
from typing import Any

import pytest
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.support.mixes import bits
from tests.support.tiny import VOCAB, hf_greedy, tiny
from tinyspec import Engine, EngineConfig, SamplingParams, UnsupportedModelError

_rng = random.Random(0)
PROMPTS = [[_rng.randrange(VOCAB) for _ in range(n)] for n in (1, 17, 40)]
CROWD = [[_rng.randrange(VOCAB) for _ in range(n)] for n in (3, 30, 9, 70, 5)]
TOKENS = 8
CONFIG = EngineConfig(reference_rows=16, max_rows=32, page_size=16)
PLAIN = SamplingParams(max_new_tokens=TOKENS)
DETERMINISTIC = SamplingParams(max_new_tokens=TOKENS, deterministic=True, logprobs=True)


def refused(model: PreTrainedModel, message: str, config: EngineConfig = CONFIG) -> None:
    """An engine is refused with ``message``, and the model is as it was."""
    before = everything(model)
    with pytest.raises(UnsupportedModelError, match=message):
        Engine(model, config=config)
    assert unlike(before, everything(model)) == []


def saved(folder: Any, model: PreTrainedModel | None = None) -> str:
    """A folder with a tiny model in it."""
    (model or tiny()).save_pretrained(folder)
    return str(folder)


def load(folder: str, **how: Any) -> PreTrainedModel:
    """``from_pretrained``, in eval mode."""
    return AutoModelForCausalLM.from_pretrained(folder, **how).eval()


def everything(model: nn.Module) -> dict[str, object]:
    """All that closing an engine must give back, by name: modules and all that stands on them, the
    parameters themselves and the config."""
    found: dict[str, object] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        found[name] = module
        for key, value in vars(module).items():
            if isinstance(value, dict):
                found |= {f"{name}:{key}:{own}": held for own, held in value.items()}
            else:
                found[f"{name}:{key}"] = value
    # A key of its own: a forward hook with keywords is listed by number in a second table.
    found["implementation"] = model.config._attn_implementation
    return found


def unlike(before: dict[str, object], after: dict[str, object]) -> list[str]:
    """Names of what is not the very same object."""
    names = [*before, *(after.keys() - before.keys())]
    missing = object()
    return [n for n in names if before.get(n, missing) is not after.get(n, missing)]


def tokens(outputs: list[Any]) -> list[list[int]]:
    """Token ids of the first completion of each."""
    return [output.completions[0].token_ids for output in outputs]


def greedy(model: Any) -> list[list[int]]:
    """What transformers itself generates for each of ``PROMPTS`` alone."""
    return [hf_greedy(model, prompt, TOKENS) for prompt in PROMPTS]


def alone_as_in_a_crowd(engine: Engine, params: SamplingParams = DETERMINISTIC) -> bool:
    """Whether each of ``PROMPTS`` has the same bits alone and among others."""
    mixed = [prompt for pair in zip(CROWD, PROMPTS, strict=False) for prompt in pair]
    crowd = engine.generate([*mixed, *CROWD[len(PROMPTS) :]], params)
    alone = [engine.generate([prompt], params)[0] for prompt in PROMPTS]
    return [bits(o) for o in crowd[1 : 2 * len(PROMPTS) : 2]] == [bits(o) for o in alone]


def serve(model: Any, expected: list[list[int]] | None = None) -> str:
    """Serve a model, plainly and deterministically, and look at what is left of it afterwards.

    expected: tokens of plain greedy requests; default: not compared. Returns the fingerprint.
    """
    before = everything(model)
    with Engine(model, config=CONFIG) as engine:
        plain = tokens(engine.generate(PROMPTS, PLAIN))
        assert expected is None or plain == expected
        assert all(len(ids) == TOKENS for ids in plain)
        assert alone_as_in_a_crowd(engine)
        fingerprint = engine.fingerprint
    assert unlike(before, everything(model)) == []
    return fingerprint


def own_forward(module: nn.Module) -> None:
    """Give a module a forward of its own that does what its class does."""
    forward = module.forward
    module.forward = lambda *args, **kwargs: forward(*args, **kwargs)  # type: ignore[method-assign]
