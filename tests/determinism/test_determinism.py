"""The contract: a deterministic request's bits do not depend on anything but itself.

Controls: the same request without the flag differs on a model whose linears are sensitive to the
row count, and a model that breaks fact 1 is refused.
"""

import random
import subprocess
import sys

import pytest
import torch

from tests.support.budget import first
from tests.support.mixes import bits, crowd, needles, plain, solo
from tests.support.sensitive import PositionSensitiveLinear, ShapeSensitiveLinear, replace_linears
from tests.support.tiny import FAMILIES, tiny
from tinyspec import DeterminismError, Engine, EngineConfig, SamplingParams

REFERENCE = 16
DTYPES = (torch.float32, torch.bfloat16)


def sensitive(dtype=torch.float32):
    return replace_linears(tiny("llama", dtype), ShapeSensitiveLinear)


def test_control_plain_requests_differ():
    """Without the flag the same mixes do change bits: the check above can fail."""
    model = sensitive()
    wanted = needles()[1]
    request = (wanted[0], plain(wanted[1]))
    rng = random.Random(0)
    with Engine(model, config=EngineConfig(reference_rows=REFERENCE)) as engine:
        alone = bits(solo(engine, request))
        among = bits(engine.generate(*zip(*[request, *crowd(rng, 9)], strict=True))[0])
    assert among != alone


def test_control_position_sensitive_is_refused():
    model = replace_linears(tiny(), PositionSensitiveLinear)
    with Engine(model) as engine:
        with pytest.raises(DeterminismError, match=r"q_proj|lm_head|gate_proj"):
            engine.generate([[1, 2, 3]], SamplingParams(deterministic=True))
        assert not engine.has_unfinished()
        assert engine.generate([[1, 2, 3]])[0].completions[0].finish_reason == "length"


@pytest.mark.crossed(2)
@pytest.mark.parametrize("family", first(2, FAMILIES, 2))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_family_on_two_threads(family, dtype, two_threads):
    model = tiny(family, dtype)
    rng = random.Random(1)
    with Engine(model, config=EngineConfig(reference_rows=REFERENCE)) as engine:
        alone = [bits(solo(engine, needle)) for needle in needles()]
        order = [*needles(), *crowd(rng, 10)]
        outputs = engine.generate([p for p, _ in order], [s for _, s in order])
    assert [bits(output) for output in outputs[: len(alone)]] == alone


CHILD = """
import sys
import torch
torch.set_num_threads(1)
from tests.support.mixes import bits, needles
from tests.support.tiny import tiny
from tinyspec import Engine, EngineConfig
with Engine(tiny(), config=EngineConfig(reference_rows=16, draft_window=5)) as engine:
    outputs = engine.generate(*zip(*needles()[:3], strict=True))
    sys.stdout.write(repr(([bits(o) for o in outputs], engine.fingerprint)))
"""


def test_new_process():
    with Engine(tiny(), config=EngineConfig(reference_rows=REFERENCE)) as engine:
        alone = [bits(solo(engine, needle)) for needle in needles()[:3]]
        expected = repr((alone, engine.fingerprint))
    child = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True)
    assert child.stdout == expected, child.stderr[-2000:]
