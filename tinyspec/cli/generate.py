"""``tinyspec generate``: prompts in, text or JSON lines out."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinyspec.cli.common import add_model, make_engine
from tinyspec.cli.inputs import STANDARD_INPUT, are_json, read_lines
from tinyspec.cli.jobs import Job, jobs_of_arguments, jobs_of_lines, prepare
from tinyspec.cli.output_file import OutputFile
from tinyspec.cli.parser import add_command
from tinyspec.cli.progress import Progress
from tinyspec.cli.sampling import add_sampling, given
from tinyspec.cli.text_writer import TextWriter
from tinyspec.config import EngineConfig
from tinyspec.errors import refuse
from tinyspec.outputs import RequestOutput, Thought

if TYPE_CHECKING:
    from tinyspec.engine.engine import Engine

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


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "generate",
        _generate,
        "generate for prompts given as arguments, in a file, or on standard input",
        EXAMPLE,
        NOTES,
    )
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="or - for standard input")
    parser.add_argument("--file", help="a prompt a line, or JSON lines; - is standard input")
    parser.add_argument("--json", action="store_true", help="JSON lines out instead of text")
    parser.add_argument("--output", metavar="FILE", help="write JSON lines into a new file")
    parser.add_argument("--trace", metavar="FILE", help="write what the passes did, for `trace`")
    parser.add_argument("--resume", action="store_true", help="continue the --output file")
    add_model(parser, dtype="auto")
    add_sampling(parser)


def _generate(options: argparse.Namespace) -> int:
    if options.resume and options.output is None:
        raise refuse("--resume", True, "together with --output")
    _check_trace(options)
    jobs = _jobs(options)
    if not jobs:
        raise refuse("prompts", [], "at least one prompt")
    file = OutputFile(options.output, jobs, options.resume) if options.output else None
    if options.trace is not None:
        open(options.trace, "ab").close()  # where it cannot be written, nothing runs
    left = jobs if file is None else [job for job in jobs if job.job_id not in file.kept]
    with make_engine(options, EngineConfig(trace=options.trace is not None)) as engine:
        try:
            return int(_run_all(engine, left, file, options))
        finally:
            if options.trace is not None:
                engine.trace.save(options.trace)


def _check_trace(options: argparse.Namespace) -> None:
    """Raise ValueError where the trace would be written over the prompts or the outputs."""
    if options.trace is None:
        return
    for name in ("file", "output"):
        path = getattr(options, name)
        if path is not None and Path(path).resolve() == Path(options.trace).resolve():
            raise refuse("--trace", options.trace, f"another file than --{name}")


def _run_all(
    engine: Engine, jobs: list[Job], file: OutputFile | None, options: argparse.Namespace
) -> bool:
    """Whether a completion was aborted, now or in an earlier run of the file."""
    if file is None:
        return _run(engine, jobs, options.json)
    _check_fingerprint(engine, file, options.output)
    kept = [c for output in file.kept.values() for c in output.completions]
    before = any(completion.finish_reason == "abort" for completion in kept)
    return _into_file(engine, jobs, file, options.output) or before


def _jobs(options: argparse.Namespace) -> list[Job]:
    """Of the arguments and the file, or of standard input without either."""
    prompts, path, shared = options.prompts, options.file, given(options)
    if path is None and prompts in ([], [STANDARD_INPUT]):
        prompts, path = [], STANDARD_INPUT
    jobs = jobs_of_arguments(prompts, shared)
    if path is not None:
        if path == STANDARD_INPUT and sys.stdin.isatty():
            print("tinyspec: one prompt a line, Ctrl-D ends", file=sys.stderr)
        lines = read_lines(path)
        jobs += jobs_of_lines(lines, are_json(path, lines), shared)
    return jobs


def _check_fingerprint(engine: Engine, file: OutputFile, name: str) -> None:
    from tinyspec.determinism.fingerprint_parts import explained

    written = [output for output in file.kept.values() if output.fingerprint is not None]
    inputs = engine.ready()
    for output in written:
        digest = inputs.tokenizer_digest() if output.params.needs_tokenizer else None
        own = engine.contract.fingerprint.with_tokenizer(digest)
        if output.fingerprint != own.digest:
            allowed = f"outputs of this engine, {own.digest}; it has some of {output.fingerprint}"
            why = explained(output.fingerprint_parts, own.parts)
            raise refuse("--output", name, f"{allowed}: {why}" if why else allowed)


def _into_file(engine: Engine, jobs: list[Job], file: OutputFile, name: str) -> bool:
    """Run ``jobs`` and append their outputs to the file; whether one was aborted."""
    file.open()
    try:
        return bool(jobs) and _run(engine, jobs, True, file.write)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"what has finished is in {name}; continue with --resume") from None
    finally:
        file.close()


def _print_thoughts(place: str, thoughts: list[Thought]) -> None:
    """Those that are not trivial, beside the completions."""
    for thought in thoughts:
        if len(thought.token_ids) > 1 or thought.cut:
            text = thought.token_ids if thought.text is None else thought.text.strip()
            cut = " (cut)" if thought.cut else ""
            print(f"tinyspec: {place}: chunk {thought.chunk}: {text}{cut}", file=sys.stderr)


def _run(
    engine: Engine,
    jobs: list[Job],
    as_json: bool,
    write: Callable[[RequestOutput], object] = lambda output: print(output.to_json(), flush=True),
) -> bool:
    """Run ``jobs``; write their outputs as they finish, or their texts in order. Returns whether
    one was aborted."""
    from tinyspec.engine.interrupts import between_steps
    from tinyspec.engine.results import output_of

    requests = prepare(engine, jobs)
    of = {request.request_id: (request, job) for request, job in zip(requests, jobs, strict=True)}
    unfinished = {request.request_id: len(request.sequences) for request in requests}
    most = {
        (request.request_id, sequence.index): request.params.max_new_tokens
        for request in requests
        for sequence in request.sequences
    }
    terminal = sys.stdout.isatty()
    text = TextWriter(most, sys.stdout, live=terminal)
    progress = Progress(engine, most, sys.stderr, live=as_json or not terminal)
    aborted = False
    # The command changes no model between the steps.
    with between_steps(), engine.follow(requests) as events, engine.tracker.hold_state():
        for event in events:
            progress.event(event)
            if event.thoughts and not as_json:
                progress.clear()
                _print_thoughts(of[event.request_id][1].place, event.thoughts)
            if not as_json:
                text.event(event)
            unfinished[event.request_id] -= event.finish_reason is not None
            if unfinished[event.request_id]:
                continue
            request, job = of[event.request_id]
            output = output_of(request, engine.tokenizer)
            progress.clear()
            if as_json:
                write(replace(output, request_id=job.job_id))
            else:
                text.output(output)
            for completion in output.completions:
                if completion.finish_reason == "abort":
                    aborted = True
                    print(f"tinyspec: {job.place}: aborted: {completion.error}", file=sys.stderr)
    progress.end()
    return aborted
