"""A walk through every text causal LM that transformers knows: how each is served, or why not.

Rewrites the table in the model wing's README and ``tinyspec/model/supported.py`` by what it finds:

    python -m tests.support.walk
"""

import logging
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from textwrap import fill

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import tinyspec
from tests.support.forward import quiet, rollout, unpadded, wrong_gradients
from tests.support.judge import padded
from tests.support.mixes import bits
from tests.support.zoo import BUILT, greedy, prompts, tiny
from tests.support.zoo_configs import CANNOT
from tinyspec import DeterminismError, Engine, EngineConfig, SamplingParams, UnsupportedModelError

ROOT = Path(__file__).parents[2]
README = ROOT / "tinyspec" / "model" / "README.md"
BEGIN, END = "<!-- families: begin -->", "<!-- families: end -->"
RENDERED = re.compile(r"\(transformers ([\d.]+);")
CONFIG = EngineConfig(max_model_len=256, max_rows=64, reference_rows=16)
TOKENS = 64
FUSED, INTERFACE = "fused module", "attention interface"
KEPT, REFUSED = "contract kept", "`DeterminismError`"
EXACT, OWN_LOSS, NOISE = "exact", "`labels` refused: an own loss", "in training refused: jitter"
NO_GRADIENTS = "gradients refused: recurrent"


@dataclass(frozen=True)
class Finding:
    """How a model type is served: by which attention, what ``deterministic=True`` gets there, and a
    canonical forward; or why it is not."""

    attention: str = ""
    contract: str = ""
    forward: str = ""
    refusal: str = ""


def attention_of(model: PreTrainedModel) -> str:
    """Which attention an engine gives ``model``, or the refusal that it raises."""
    with Engine(model, config=CONFIG) as engine:
        called = {id(module) for module in engine.served.bound}
        swapped = {id(one.own) for one in engine.served.swapped}
        return FUSED if called & swapped else INTERFACE


def wrong_tokens(model: PreTrainedModel, tokens: int = TOKENS) -> list[str]:
    """Where greedy tokens of ragged batches of 1, 3 and 8 are not ``generate``'s at batch 1."""
    expected = [greedy(model, prompt, tokens)[0] for prompt in prompts()]
    params = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
    wrong = []
    with Engine(model, config=CONFIG) as engine:
        for count in (1, 3, 8):
            outputs = engine.generate(prompts()[:count], params)
            for n, output in enumerate(outputs):
                completion = output.completions[0]
                if completion.token_ids != expected[n]:
                    wrong.append(f"prompt {n} of {count}: {completion.error or 'other tokens'}")
    return wrong


def contract_of(model: PreTrainedModel, tokens: int = TOKENS, config: EngineConfig = CONFIG) -> str:
    """What ``deterministic=True`` gets: the contract kept, ``DeterminismError``, or which prompts
    have other bits alone than in a batch of 8 or 3."""
    params = SamplingParams(
        max_new_tokens=tokens, ignore_eos=True, deterministic=True, logprobs=True
    )
    with Engine(model, config=config) as engine:
        try:
            crowd = [bits(output) for output in engine.generate(prompts(), params)]
        except DeterminismError:
            return REFUSED
        few = [bits(output) for output in engine.generate(prompts()[5:], params)]
        alone = [bits(engine.generate([prompt], params)[0]) for prompt in prompts()]
    other = {n for n in range(8) if alone[n] != crowd[n]}
    other |= {n for n in range(5, 8) if few[n - 5] != crowd[n]}
    return f"other bits of prompts {sorted(other)}" if other else KEPT


def forward_of(model: PreTrainedModel, tokens: int = 16) -> str:
    """What a canonical forward gets: the bits of generation and good gradients, where a part of it
    is refused by name, or what is wrong."""
    tinyspec.patch(quiet(model), CONFIG, deterministic=True, forward=True)
    try:
        made = rollout(model, prompts()[:3], tokens)
        ids, mask = (x.to(model.device) for x in padded(made.rows, "right"))
        asked = {"attention_mask": mask, "use_cache": False}

        def run() -> list[Tensor]:
            return unpadded(model(ids, **asked).logits, mask)

        with torch.no_grad():
            wrong = [] if made.equal(run()) else ["other bits without gradients"]
        found = [EXACT]
        try:
            wrong += [] if made.equal(run()) else ["other bits"]
        except NotImplementedError as error:
            assert "exact gradients" in str(error)
            return "; ".join(wrong or [EXACT, NO_GRADIENTS])
        try:
            with torch.no_grad():
                model(ids, **asked, labels=ids.masked_fill(mask == 0, -100))
        except ValueError as error:
            assert "a loss of its own" in str(error)
            found.append(OWN_LOSS)
        try:
            model.train()
            wrong += [] if made.equal(run()) else ["other bits in training"]
        except UnsupportedModelError as error:
            assert "jitter" in str(error)
            found.append(NOISE)
        model.eval()
        wrong += filter(None, [wrong_gradients(model, made.rows, run)])
        return "; ".join(wrong or found)
    except DeterminismError:
        with pytest.raises(DeterminismError):
            model(torch.tensor(prompts()[:1]))
        return REFUSED
    finally:
        tinyspec.unpatch(model)


def find(model_type: str) -> Finding:
    """Everything about one model type. AssertionError where tokens or bits are wrong."""
    model = tiny(model_type)
    try:
        attention = attention_of(model)
    except UnsupportedModelError as error:
        return Finding(refusal=str(error).partition(" is not supported: ")[2])
    assert wrong_tokens(model) == [], model_type
    return Finding(attention, contract_of(model), forward_of(model))


def shortened(reason: str) -> str:
    """A refusal without what is only one model's: the names of its modules."""
    words = [word for word in reason.split() if not word.endswith("Attention")]
    return " ".join(words)


def render(findings: dict[str, Finding]) -> str:
    """The README's table: one row for all that are served, or refused, in the same way."""
    served, refused = defaultdict(list), defaultdict(list)
    for kind, finding in sorted(findings.items()):
        if finding.refusal:
            refused[shortened(finding.refusal)].append(kind)
        else:
            served[finding.attention, finding.contract, finding.forward].append(kind)
    refused["not tried: " + "; ".join(sorted(set(CANNOT.values())))] = sorted(CANNOT)
    count = sum(map(len, served.values()))
    lines = [f"{count} of {len(findings) + len(CANNOT)} model types are served.", ""]
    lines += ["| attention | `deterministic=True` | `canonical(model)` | model types |"]
    lines += ["| --- | --- | --- | --- |"]
    for cells, kinds in sorted(served.items()):
        lines.append(f"| {' | '.join(cells)} | {len(kinds)}: {', '.join(kinds)} |")
    lines += ["", "| refused, because | model types |", "| --- | --- |"]
    for reason, kinds in sorted(refused.items(), key=lambda row: -len(row[1])):
        lines.append(f"| {reason} | {len(kinds)}: {', '.join(kinds)} |")
    return "\n".join(lines)


def table() -> str:
    """The table as it stands in the README."""
    text = README.read_text()
    return text.partition(BEGIN)[2].partition(END)[0].strip()


def rendered_with() -> str:
    """The version of transformers that the table is of."""
    return RENDERED.search(README.read_text())[1]


def places() -> dict[str, list[str]]:
    """By model type: the cells of its row of the table, without the types."""
    found = {}
    for line in table().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        kinds = re.fullmatch(r"\d+: (.*)", cells[-1])
        for kind in kinds[1].split(", ") if kinds else ():
            assert kind not in found, "twice in the table"
            found[kind] = cells[:-1]
    return found


def allowed(cell: str) -> set[str]:
    """What a finding may be where the table has this cell: families are written otherwise in other
    versions than the table's, and may be refused there."""
    return {cell} if version("transformers") == rendered_with() else {cell, REFUSED}


def write(findings: dict[str, Finding]) -> None:
    """Put the findings where they stand."""
    text = README.read_text()
    text = RENDERED.sub(f"(transformers {version('transformers')};", text)
    head, tail = text.partition(BEGIN)[0], text.partition(END)[2]
    README.write_text(f"{head}{BEGIN}\n{render(findings)}\n{END}{tail}")
    supported = ROOT / "tinyspec" / "model" / "supported.py"
    source = supported.read_text()
    head, _, rest = source.partition('SERVED_TYPES = """')
    kinds = " ".join(sorted(kind for kind, found in findings.items() if found.attention))
    kept = fill(kinds, 96, break_on_hyphens=False)
    tail = rest.partition('\n"""\n')[2]
    source = f'{head}SERVED_TYPES = """\n{kept}\n"""\n{tail}'
    supported.write_text(source)


def walk(kinds: Iterable[str]) -> dict[str, Finding]:
    """All of ``kinds``, one after the other."""
    findings = {}
    for kind in kinds:
        findings[kind] = find(kind)
        print(kind, findings[kind], flush=True)
    return findings


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    write(walk(BUILT))
