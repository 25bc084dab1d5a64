"""The pictures in the README: three requests of the bundled model, and one verify close up.

    python benchmarks/pictures.py

The first request begins alone, with a seed of the demo's; the others join it.
"""

from __future__ import annotations

import json
from pathlib import Path

from tinyspec import Engine, EngineConfig, SamplingParams
from tinyspec.tools.demo import BUNDLED, PROMPTS, SEEDS, TEMPERATURE
from tinyspec.tools.drawing import svg
from tinyspec.tools.timeline import views
from tinyspec.tools.trace_run import run_of_passes

RESULTS = Path(__file__).parent / "results" / "cpu"
ALONE = 24  # passes
CELLS = 76


def main() -> None:
    texts = json.loads(PROMPTS.read_text(encoding="utf-8"))
    config = EngineConfig(verify="always", draft_window=5, trace=True, overlap=False)
    common = {"max_new_tokens": 60, "temperature": TEMPERATURE}
    with Engine.from_pretrained(BUNDLED, "bfloat16", "cpu", config) as engine:
        first = SamplingParams(deterministic=True, seed=SEEDS[0], **common)
        engine.add_request(texts["story"], first)
        for _ in range(ALONE):
            engine.step()
        engine.add_request(texts["crowd"][8], SamplingParams(seed=1, **common))
        engine.add_request(texts["crowd"][2], SamplingParams(seed=2, deterministic=True, **common))
        while engine.has_unfinished():
            engine.step()
        run = run_of_passes(engine.trace.passes(), engine.tokenizer)
    for view in ("timeline", "verify"):
        path = RESULTS / f"trace-{view}.svg"
        (drawing,) = views(run, view, CELLS)
        path.write_text(svg(drawing) + "\n", encoding="utf-8")
        print(path, path.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
