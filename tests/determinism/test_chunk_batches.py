"""Batches of chunks: any size that is taken gives each chunk the bits of the reference."""

import pytest
import torch
from torch import nn

from tests.support.sensitive import RowByRowLinear, ShapeSensitiveLinear
from tests.support.thinking import all_bits, engine_of, exact, prompt_of, thinking_model
from tinyspec.determinism.rows import BatchFunction
from tinyspec.thinking.thinker import REFERENCE, SIZES, ChunkBatches

PROMPT, OTHER = prompt_of(67, 67), prompt_of(70, 3)
LENGTH, WIDTH = 3, 32


class Recorded:
    """A linear over [B, LENGTH, WIDTH], and the sizes B of the batches that it got."""

    def __init__(self, kind):
        torch.manual_seed(0)
        self.linear, self.sizes = kind(nn.Linear(WIDTH, WIDTH)), []

    def __call__(self, x):
        self.sizes.append(len(x))
        return self.linear(x).detach()

    def batches(self):
        return ChunkBatches(lambda: [BatchFunction("it", self, LENGTH, torch.empty(0, WIDTH))])


def results(recorded, batches, given, count):
    """Of the first ``count`` chunks, and the sizes of the batches."""
    batches.run(recorded, given[:count], fills=(0,))  # looks at sizes
    recorded.sizes.clear()
    return batches.run(recorded, given[:count], fills=(0,)), list(recorded.sizes)


@pytest.mark.parametrize("kind", [RowByRowLinear, ShapeSensitiveLinear])
def test_every_count_gives_the_same_bits(kind):
    """Those of the reference alone where sizes differ, larger and smaller ones where they do not.
    Control: before it is proven, sizes that differ are taken."""
    recorded = Recorded(kind)
    given = torch.randn(150, LENGTH, WIDTH)
    wanted = torch.cat([recorded(part) for part in given[:144].split(REFERENCE)])
    differs = kind is ShapeSensitiveLinear
    batches = recorded.batches()
    found, sizes = results(recorded, batches, given, 20)
    assert sizes == [20] and torch.equal(found, wanted[:20]) is not differs
    batches.prove()
    for count in (1, 3, 8, 9, 17, 33, 65, 140):
        found, sizes = results(recorded, batches, given, count)
        assert torch.equal(found, wanted[:count])
        assert sum(sizes) >= count and set(sizes) <= set(SIZES)
        if differs:
            assert set(sizes) == {REFERENCE}
        elif count != 65:
            assert sizes == {1: [1], 3: [8], 8: [8], 9: [16], 17: [32], 33: [64]}.get(
                count, [64, 64, 16]
            )


def test_states_of_plain_requests_are_no_deterministic_ones():
    """Plain ones run in batches of any size until it is known what changes no bit."""
    model = thinking_model()
    mlp = model.compression.block.layer.mlp
    mlp.up_proj = ShapeSensitiveLinear(mlp.up_proj)
    found = []
    for plain_first in (False, True):
        with engine_of(model, prefix_cache=False) as engine:
            if plain_first:
                given = [PROMPT, OTHER, PROMPT[3:]]
                engine.generate(given, exact(deterministic=False))
                kept = engine.core.committer.thinker._states
                assert kept
            found.append(all_bits(engine.generate([PROMPT], exact())[0]))
    assert found[0] == found[1]
