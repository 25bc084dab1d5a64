"""The contract: a deterministic request's bits do not depend on anything but itself.

That plain ones do is told beside the contract's cross; a model that breaks fact 1 is refused, which
the tests of doctor tell.
"""

import ast
import random
import subprocess
import sys

import pytest
import torch

from tests.support.budget import first
from tests.support.cases import bits_of, one_by_one, run
from tests.support.mixes import crowd, needles
from tests.support.tiny import FAMILIES, tiny
from tinyspec import Engine, EngineConfig

CONFIG = EngineConfig(reference_rows=16, max_rows=64)
DTYPES = (torch.float32, torch.bfloat16)


@pytest.mark.crossed(2)
@pytest.mark.parametrize("family", first(2, FAMILIES, 2))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_family_on_two_threads(family, dtype, two_threads):
    with Engine(tiny(family, dtype), config=CONFIG) as engine:
        alone = one_by_one(engine, needles())
        outputs = run(engine, [*needles(), *crowd(random.Random(1), 10)])
    assert bits_of(outputs[: len(alone)]) == alone


CHILD = """
import sys
sys.modules["triton"] = None  # importing it fails
import torch
torch.set_num_threads(1)
from tests.support.cases import bits_of, run
from tests.support.mixes import needles
from tests.support.tiny import tiny
from tinyspec import Engine, EngineConfig
config = EngineConfig(reference_rows=16, max_rows=64, draft_window=5)
with Engine(tiny(), config=config) as engine:
    found = bits_of(run(engine, needles()[:3])), engine.fingerprint
print((found, [name for name in sys.modules if name.startswith("tinyspec.kernels")]))
"""


def test_a_new_process_without_triton():
    """A CPU has the same bits there, by the twins, and loads no Triton kernel."""
    child = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True)
    assert child.returncode == 0, child.stderr[-2000:]
    found, loaded = ast.literal_eval(child.stdout.splitlines()[-1])
    with Engine(tiny(), config=CONFIG) as engine:
        assert found == (one_by_one(engine, needles()[:3]), engine.fingerprint)
    assert "tinyspec.kernels.twins.sample" in loaded and "tinyspec.kernels.sample" not in loaded
