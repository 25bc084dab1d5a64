"""Whether passes of a model can be captured as graphs: what a pass of each kind asks of the host.

Knows passes, not requests.
"""

from __future__ import annotations

from tinyspec.config import EngineConfig
from tinyspec.determinism.probes.model import ModelProbe
from tinyspec.runner.model_runner import ModelRunner

KINDS = {True: "canonical", False: "other"}


def graph_refusals(runner: ModelRunner, config: EngineConfig) -> dict[str, str]:
    """Why passes are not captured, by kind; empty for the twins, which know no graphs.

    Runs a pass of each kind that has not run yet. None of ``runner`` may be running.
    """
    graphs = runner.graphs
    if runner.kernels.backend != "triton":
        return {}
    missing = [canonical for canonical in KINDS if not graphs.knows(canonical)]
    if missing:
        rows = runner.buckets.reference
        with runner.torch_state():
            probe = ModelProbe(runner, config, rows)
            for canonical in missing:
                probe.seconds(rows, 0, canonical)
    found = {kind: graphs.refusal(canonical) for canonical, kind in KINDS.items()}
    return {kind: why for kind, why in found.items() if why is not None}
