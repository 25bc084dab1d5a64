"""Jobs of the command line: prompts with their parameters, and where in the input they stand."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tinyspec.cli.inputs import Line, check_prompt, json_object
from tinyspec.cli.sampling import params_of
from tinyspec.sampling_params import SamplingParams

if TYPE_CHECKING:
    from tinyspec.engine.engine import Engine
    from tinyspec.scheduler.request import Request


@dataclass(frozen=True)
class Job:
    """A prompt and its parameters. source: the kind of input, "line" or "argument", and ``number``
    its place there; place: the same for messages."""

    source: str
    number: int
    place: str
    prompt: Any
    params: SamplingParams

    @property
    def place_id(self) -> str:
        return f"{self.source}-{self.number}"

    @cached_property
    def job_id(self) -> str:
        """Its place, and a digest of prompt and parameters as they were given."""
        text = json.dumps([self.prompt, self.params.to_dict()], sort_keys=True)
        return f"{self.place_id}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def jobs_of_arguments(prompts: list[str], shared: dict[str, Any]) -> list[Job]:
    """One job for each prompt on the command line."""
    params = params_of(shared)
    return [
        Job("argument", number, f"prompt {number}", prompt, params)
        for number, prompt in enumerate(prompts, start=1)
    ]


def jobs_of_lines(lines: list[Line], as_json: bool, shared: dict[str, Any]) -> list[Job]:
    """One job for each line. Raises ValueError naming file, line, field, value, what is allowed."""
    params = params_of(shared)
    if not as_json:
        return [Job("line", line.number, line.place, line.text, params) for line in lines]
    return [_job(line, shared) for line in lines]


def _job(line: Line, shared: dict[str, Any]) -> Job:
    values = json_object(line, ["prompt"])
    prompt = values.pop("prompt")
    try:
        check_prompt("prompt", prompt)
        params = params_of(shared | values)
    except ValueError as error:
        raise ValueError(f"{line.place}: {error}") from error
    return Job("line", line.number, line.place, prompt, params)


def prepare(engine: Engine, jobs: list[Job]) -> list[Request]:
    """A request for each job. Raises ValueError naming the place of the first that is refused."""
    try:
        return engine.prepare([job.prompt for job in jobs], [job.params for job in jobs])
    except Exception:
        for job in jobs:
            try:
                engine.prepare([job.prompt], [job.params])
            except Exception as error:  # of chat templates, any
                raise ValueError(f"{job.place}: {error}") from error
        raise
