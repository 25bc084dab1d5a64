"""Logits of given sequences in canonical passes of an engine's model, with gradients. Knows no
requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from tinyspec.engine.engine import Engine
from tinyspec.runner.differentiable import DifferentiablePasses, passes


def forward(
    engine: Engine,
    sequences: Sequence[Sequence[int]],
    wanted: Sequence[Sequence[int]],
    layers: Sequence[nn.Module] = (),
) -> tuple[Tensor, Any]:
    """Logits [N, V] at the places ``wanted`` of each of the ``sequences`` of token ids, and the
    output of the model in the last pass. With gradients where the caller records them, also when
    the engine is closed by then; what ``layers`` of ``engine.served`` keep for that is computed
    again. Raises as ``Engine.generate``."""
    with engine.lock("forward"):
        engine.check_model()
        with engine.lock.step():
            engine.contract.ensure()
            if engine.config.verify != "always":
                planned = passes(list(map(len, sequences)), engine.runner.buckets.sizes)
                engine.contract.prove_more({bucket for bucket, _ in planned})
        exclusive = partial(_exclusive, engine)
        with exclusive():
            runs = DifferentiablePasses(engine.runner, sequences, exclusive, layers)
            return runs.run(wanted)


@contextmanager
def _exclusive(engine: Engine) -> Iterator[None]:
    """A block that runs the model outside of the engine's passes."""
    with engine.lock("forward"), engine.lock.step(), engine.runner.torch_state(gradients=True):
        yield
