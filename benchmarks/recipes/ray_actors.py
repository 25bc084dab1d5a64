"""Ray Data over one and two actors, one of which dies: the same digest of all outputs.

    python benchmarks/recipes/ray_actors.py

Ray gives the rows of a lost actor to another one, which computes them again among other rows.
"""

from __future__ import annotations

import hashlib
import os

import ray
from ray.data import ActorPoolStrategy

from tinyspec import SamplingParams
from tinyspec.integrations.ray import Generate, Job
from tinyspec.tools.demo import BUNDLED

ROWS = [{"id": n, "prompt": f"One {'very ' * (n % 5)}dark day fox {n} woke up."} for n in range(24)]
PARAMS = SamplingParams(deterministic=True, logprobs=True, temperature=0.8, max_new_tokens=16)


class Mortal(Generate):
    """Its process ends when it is asked for a third block."""

    blocks = 0

    def __call__(self, table):
        self.blocks += 1
        if self.blocks == 3:
            os._exit(1)
        return super().__call__(table)


def digest(kind: type[Generate], actors: int, blocks: int) -> str:
    """Of the outputs of all rows, in the order of their ids."""
    job = Job(model=str(BUNDLED), params=PARAMS, loading={"device": "cpu"})
    found = ray.data.from_items(ROWS, override_num_blocks=blocks).map_batches(
        kind,
        fn_constructor_args=[job],
        batch_size=None,
        batch_format="pyarrow",
        compute=ActorPoolStrategy(size=actors),
    )
    rows = sorted(found.take_all(), key=lambda row: row["id"])
    return hashlib.sha256("\n".join(row["output"] for row in rows).encode()).hexdigest()[:16]


def main() -> None:
    if not ray.is_initialized():
        ray.init("local", num_cpus=4, include_dashboard=False)
    cases = {"1 actor, blocks of 24": (Generate, 1, 1), "2 that die, blocks of 3": (Mortal, 2, 8)}
    found = {name: digest(*case) for name, case in cases.items()}
    for name, value in found.items():
        print(f"{name}: {value}")
    assert len(set(found.values())) == 1, "the bits depend on who computed them"
    print("the same digest, whatever died")


if __name__ == "__main__":
    main()
