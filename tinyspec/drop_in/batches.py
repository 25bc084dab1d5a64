"""``generate_batch``: one batch, run by the thread that calls. Knows no managers but their name."""

from __future__ import annotations

from typing import Any

from tqdm import tqdm
from transformers import GenerationConfig
from transformers.generation.continuous_batching.requests import GenerationOutput

from tinyspec.drop_in.access import Access
from tinyspec.drop_in.manager import Manager
from tinyspec.drop_in.rows import Batch
from tinyspec.drop_in.session import Session

__all__ = ["Manager", "run"]


def run(
    access: Access,
    inputs: Any,
    generation_config: GenerationConfig | None,
    config: Any,
    settings: dict[str, Any],
    record_timestamps: bool,
    progress_bar: bool,
) -> dict[str, GenerationOutput]:
    """Outputs by id, in the order of ``inputs``. Raises what ``generate`` raises."""
    prompts = access.token_lists("inputs", inputs)
    if not prompts:
        return {}
    call = access.call(prompts, generation_config, config, settings)
    ids = [f"req_{number}" for number in range(len(prompts))]
    batch = Batch(call, prompts, ids, record_timestamps=record_timestamps)
    bar = tqdm(total=len(batch.rows), unit="request", disable=not progress_bar)
    with bar, access.resumed() as engine:
        session = Session(engine, access)
        try:
            session.begin(batch)
            while session.rows:
                ended = session.step()
                bar.update(len(ended))
                for row, _ in ended:
                    if row.cause is not None:
                        raise row.cause
        finally:
            session.abort()
    return {row.request_id: row.output() for row in batch.rows}
