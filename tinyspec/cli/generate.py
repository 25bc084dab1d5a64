"""``tinyspec generate``: prompts in, text or JSON lines out."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from tinyspec.cli.common import (
    STANDARD_INPUT,
    Line,
    add_model,
    lines_of,
    make_engine,
    output_of_line,
    read_lines,
    say,
)
from tinyspec.cli.jobs import Job, add_sampling, by_place, given, job_of_json, params_of
from tinyspec.cli.progress import Progress, followed, summed_up
from tinyspec.config import EngineConfig
from tinyspec.errors import refuse
from tinyspec.outputs import RequestOutput, StreamEvent, Thought

if TYPE_CHECKING:
    from tinyspec.engine.engine import Engine

SUMMARY = "generate for prompts given as arguments, in a file, or on standard input"
EXAMPLE = """\
tinyspec generate "Once there was a brave fox" --deterministic --max-new-tokens 40
tinyspec generate --file prompts.jsonl --output outputs.jsonl --resume"""
NOTES = (
    "Prompts are arguments, lines of a file, or lines of standard input (-). JSON lines (.jsonl, "
    "or what begins with a JSON object) have one object each: a prompt (text, token ids or chat "
    "messages) and any sampling parameters, which override those given as options. JSON lines out "
    "are outputs in the order in which they finish; their request_id names the line of the prompt. "
    "--resume continues a file of the same input, and of the same fingerprint where its outputs "
    "have one (plain ones alone have none). Exit status 1 if a completion was aborted, 2 for bad "
    "input, 130 after Ctrl-C."
)
JSON_LINES = (".jsonl", ".ndjson")
OTHER_FILE = "use another file"


def add(parser: ArgumentParser) -> None:
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="or - for standard input")
    parser.add_argument("--file", help="a prompt a line, or JSON lines; - is standard input")
    parser.add_argument("--json", action="store_true", help="JSON lines out instead of text")
    parser.add_argument("--output", metavar="FILE", help="write JSON lines into a new file")
    parser.add_argument("--trace", metavar="FILE", help="write what the passes did, for `trace`")
    parser.add_argument("--resume", action="store_true", help="continue the --output file")
    add_model(parser)
    add_sampling(parser)


def run(options: Namespace) -> int:
    if options.resume and options.output is None:
        raise refuse("--resume", True, "together with --output")
    if options.trace is not None:
        for name in ("file", "output"):
            path = getattr(options, name)
            if path is not None and Path(path).resolve() == Path(options.trace).resolve():
                raise refuse("--trace", options.trace, f"another file than --{name}")
    jobs = _jobs(options)
    if not jobs:
        raise refuse("prompts", [], "at least one prompt")
    file = OutputFile(options.output, jobs, options.resume) if options.output else None
    if options.trace is not None:
        open(options.trace, "ab").close()  # where it cannot be written, nothing runs
    with make_engine(options, EngineConfig(trace=options.trace is not None)) as engine:
        try:
            if file is not None:
                return int(_into_file(engine, jobs, file))
            return int(_generate(engine, jobs, _print_json if options.json else None))
        finally:
            if options.trace is not None:
                engine.trace.save(options.trace)


def _jobs(options: Namespace) -> list[Job]:
    """Of the arguments and the file, or of standard input without either."""
    prompts, path, shared = options.prompts, options.file, given(options)
    if path is None and prompts in ([], [STANDARD_INPUT]):
        prompts, path = [], STANDARD_INPUT
    params = params_of(shared)
    jobs = [
        Job("argument", number, f"prompt {number}", params, prompt)
        for number, prompt in enumerate(prompts, start=1)
    ]
    if path is None:
        return jobs
    if path == STANDARD_INPUT and sys.stdin.isatty():
        say("one prompt a line, Ctrl-D ends")
    lines = read_lines(path)
    if Path(path).suffix in JSON_LINES or _begin_with_json(lines):
        return jobs + [job_of_json(line, shared) for line in lines]
    return jobs + [Job("line", line.number, line.place, params, line.text) for line in lines]


def _begin_with_json(lines: list[Line]) -> bool:
    """Whether the first line holds a JSON object."""
    try:
        return bool(lines) and isinstance(json.loads(lines[0].text), dict)
    except (ValueError, RecursionError):
        return False


def _print_json(output: RequestOutput) -> None:
    print(output.to_json(), flush=True)


class OutputFile:
    """Holds one output a line, in the order in which they finished; each has the id of its job.

    kept: outputs that are there already, by the id of their job. A last line that was cut off is
    dropped.

    Raises ValueError for a file that exists unless ``resume``, and for one whose outputs are not
    those of ``jobs``: their place in the input, prompts and parameters.
    """

    def __init__(self, path: str, jobs: list[Job], resume: bool):
        self.path = Path(path)
        self.kept: dict[str, RequestOutput] = {}
        data = self.path.read_bytes() if self.path.exists() else b""
        if data and not resume:
            raise refuse("--output", path, "a file that does not exist; --resume continues one")
        self._whole = data.rfind(b"\n") + 1
        by_id, at_place = {job.job_id for job in jobs}, {job.place_id: job for job in jobs}
        for line in lines_of(path, data[: self._whole]):
            output = output_of_line(line)
            name = str(output.request_id)
            job = at_place.get(name.rpartition("-")[0])
            if job is None:
                raise ValueError(f"{line.place}: the input has nothing at {name!r}; {OTHER_FILE}")
            if name not in by_id:
                changed = f"prompt or parameters changed since it was written; {OTHER_FILE}"
                raise ValueError(f"{line.place}: {job.place}: {changed}")
            if name in self.kept:
                raise ValueError(f"{line.place}: {job.place} stands twice in this file")
            self.kept[name] = output

    def begin(self) -> None:
        """Make the file, or drop a last line that was cut off."""
        with self.path.open("ab") as file:
            file.truncate(self._whole)

    def write(self, output: RequestOutput) -> None:
        """Append an output at once: what is written is there whatever happens later."""
        with self.path.open("ab") as file:
            file.write(output.to_json().encode() + b"\n")

    def check_fingerprint(self, engine: Engine) -> None:
        """Raise ValueError where an output has another fingerprint than it would have now."""
        from tinyspec.determinism.fingerprint_parts import explained

        inputs = engine.ready()
        for output in self.kept.values():
            if output.fingerprint is None:
                continue
            digest = inputs.tokenizer_digest() if output.params.needs_tokenizer else None
            own = engine.contract.fingerprint.with_tokenizer(digest)
            if output.fingerprint != own.digest:
                why = explained(output.fingerprint_parts, own.parts)
                allowed = f"outputs of this engine, {own.digest}; it has some of "
                allowed += ": ".join(filter(None, (output.fingerprint, why)))
                raise refuse("--output", str(self.path), allowed)


def _into_file(engine: Engine, jobs: list[Job], file: OutputFile) -> bool:
    """Append the outputs that the file lacks; whether one was aborted, now or in an earlier run."""
    file.check_fingerprint(engine)
    file.begin()
    left = [job for job in jobs if job.job_id not in file.kept]
    before = [c for output in file.kept.values() for c in output.completions]
    try:
        aborted = bool(left) and _generate(engine, left, file.write)
    except KeyboardInterrupt:
        done = f"what has finished is in {file.path}; continue with --resume"
        raise KeyboardInterrupt(done) from None
    return aborted or any(completion.finish_reason == "abort" for completion in before)


class TextWriter:
    """Writes one completion after the other, each followed by a line feed, while all of them grow.

    live: the first that is unfinished is shown as it grows, what came of the others in the meantime
    follows when it is their turn; otherwise each is written as a whole. keys: (request id, index)
    of the completions, in order.
    """

    def __init__(self, keys: Iterable[tuple[str, int]], file: TextIO, live: bool):
        self._waiting = deque(keys)
        self._texts: dict[tuple[str, int], str] = dict.fromkeys(self._waiting, "")
        self._ended: set[tuple[str, int]] = set()
        self._file, self._live = file, live

    def event(self, event: StreamEvent) -> None:
        """Tokens that one completion got."""
        if self._live:
            self._add((event.request_id, event.index), event.text, event.finish_reason is not None)

    def output(self, output: RequestOutput) -> None:
        """A request has finished."""
        if not self._live:
            for index, completion in enumerate(output.completions):
                self._add((output.request_id, index), completion.text, True)

    def _add(self, key: tuple[str, int], text: str | None, ended: bool) -> None:
        self._texts[key] += text or ""
        if ended:
            self._ended.add(key)
        while self._waiting:
            first = self._waiting[0]
            self._file.write(self._texts.pop(first))
            if first not in self._ended:
                self._texts[first] = ""
                break
            self._file.write("\n")
            self._waiting.popleft()
        self._file.flush()


def _say_thoughts(place: str, thoughts: list[Thought]) -> None:
    for thought in thoughts:
        if len(thought.token_ids) > 1 or thought.cut:
            text = thought.token_ids if thought.text is None else thought.text.strip()
            say(f"{place}: chunk {thought.chunk}: {text}{' (cut)' if thought.cut else ''}")


def _generate(
    engine: Engine, jobs: list[Job], write: Callable[[RequestOutput], object] | None
) -> bool:
    """Run ``jobs``; ``write`` their outputs as they finish, or without it their texts in order.
    Returns whether one was aborted."""
    requests = by_place(
        jobs,
        lambda some: engine.prepare([job.prompt for job in some], [job.params for job in some]),
    )
    of = {request.request_id: job for request, job in zip(requests, jobs, strict=True)}
    most = {
        (request.request_id, sequence.index): request.params.max_new_tokens
        for request in requests
        for sequence in request.sequences
    }
    terminal = sys.stdout.isatty()
    text = TextWriter(most, sys.stdout, live=terminal)
    progress = Progress(engine, most, sys.stderr, live=write is not None or not terminal)
    aborted = False
    with summed_up(engine, sys.stderr, len(most)), followed(engine, requests) as events:
        for event, output in events:
            job = of[event.request_id]
            progress.event(event)
            if write is None:
                if event.thoughts:
                    progress.clear()
                    _say_thoughts(job.place, event.thoughts)
                text.event(event)
            if output is None:
                continue
            progress.clear()
            if write is None:
                text.output(output)
            else:
                write(replace(output, request_id=job.job_id))
            for completion in output.completions:
                if completion.finish_reason == "abort":
                    aborted = True
                    say(f"{job.place}: aborted: {completion.error}")
    return aborted
