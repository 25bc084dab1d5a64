"""``tinyspec generate`` and ``score``: prompts in, text or JSON lines out."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from tinyspec.cli import common
from tinyspec.errors import refuse
from tinyspec.interrupts import between_steps
from tinyspec.outputs import RequestOutput, StreamEvent

if TYPE_CHECKING:
    from tinyspec.engine.engine import Engine

JSON_LINES = (".jsonl", ".ndjson")
TEXTS = ("prompt", "continuation")


def add_generate(parser: ArgumentParser) -> None:
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="or - for standard input")
    parser.add_argument("--file", help="a prompt a line, or JSON lines; - is standard input")
    parser.add_argument("--output", metavar="FILE", help="write JSON lines into a new file")
    parser.add_argument("--trace", metavar="FILE", help="write what the passes did, for `trace`")
    parser.add_argument("--resume", action="store_true", help="continue the --output file")
    common.add_options(parser, "json", *common.MODEL, "drafter")
    common.add_sampling(parser)


def generate(options: Namespace) -> int:
    """Generate for prompts given as arguments, in a file, or on standard input.

    Prompts are arguments, lines of a file, or lines of standard input (-).
    JSON lines (.jsonl, or what begins with a JSON object) have one object
    each: a prompt (text, token ids or chat messages) and any sampling
    parameters, which override those given as options. JSON lines out are
    outputs in the order in which they finish; their request_id names the line
    of the prompt. --resume continues a file of the same input, and of the
    same fingerprint where its outputs have one (plain ones alone have none).
    Exit status 1 if a completion was aborted, 2 for bad input, 130 after
    Ctrl-C.

    example:
      tinyspec generate "Once there was a brave fox" --deterministic --max-new-tokens 40
      tinyspec generate --file prompts.jsonl --output outputs.jsonl --resume
    """
    if options.resume and options.output is None:
        raise refuse("--resume", True, "together with --output")
    for name in ("file", "output") if options.trace is not None else ():
        path = getattr(options, name)
        if path is not None and Path(path).resolve() == Path(options.trace).resolve():
            raise refuse("--trace", options.trace, f"another file than --{name}")
    jobs = _jobs(options)
    if not jobs:
        raise refuse("prompts", [], "at least one prompt")
    file = OutputFile(options.output, jobs, options.resume) if options.output else None
    if options.trace is not None:
        open(options.trace, "ab").close()  # where it cannot be written, nothing runs
    with common.engine_of(options, trace=options.trace is not None) as engine:
        try:
            if file is not None:
                return int(file.fill(engine))
            shown = (lambda output: print(output.to_json(), flush=True)) if options.json else None
            return int(_run(engine, jobs, shown))
        finally:
            if options.trace is not None:
                engine.trace.save(options.trace)


def _jobs(options: Namespace) -> list[common.Job]:
    """Of the arguments and the file, or of standard input without either."""
    prompts, path, shared = options.prompts, options.file, common.given(options)
    if path is None and prompts in ([], [common.STANDARD_INPUT]):
        prompts, path = [], common.STANDARD_INPUT
    params = common.params_of(shared)
    jobs = [
        common.Job("argument", number, f"prompt {number}", params, prompt)
        for number, prompt in enumerate(prompts, start=1)
    ]
    if path is None:
        return jobs
    if path == common.STANDARD_INPUT and sys.stdin.isatty():
        common.say("one prompt a line, Ctrl-D ends")
    lines = common.read_lines(path)
    if Path(path).suffix in JSON_LINES or _begin_with_json(lines):
        return jobs + common.jobs_of(lines, shared)
    return jobs + [common.Job("line", line.number, line.place, params, line.text) for line in lines]


def _begin_with_json(lines: list[common.Line]) -> bool:
    """Whether the first line holds a JSON object."""
    try:
        return bool(lines) and isinstance(json.loads(lines[0].text), dict)
    except (ValueError, RecursionError):
        return False


class OutputFile:
    """Holds one output a line, in the order in which they finished; each has the id of its job.

    kept: outputs that are there already, by the id of their job. A last line that was cut off is
    dropped. Raises ValueError for a file that exists unless ``resume``, and for one whose outputs
    are not those of ``jobs``: their place in the input, prompts and parameters.
    """

    def __init__(self, path: str, jobs: list[common.Job], resume: bool):
        self.path, self.jobs = Path(path), jobs
        data = self.path.read_bytes() if self.path.exists() else b""
        if data and not resume:
            raise refuse("--output", path, "a file that does not exist; --resume continues one")
        self._whole = data.rfind(b"\n") + 1
        outputs, complaints = common.read_outputs(path, data[: self._whole])
        if complaints:
            raise ValueError(complaints[0])
        self.kept = {str(output.request_id): output for output in outputs}
        if others := self.kept.keys() - {job.job_id for job in jobs}:
            raise ValueError(
                f"{path} has an output of {min(others)!r}, which is not in the input: prompt, "
                "parameters or place changed since it was written; use another file"
            )

    def fill(self, engine: Engine) -> bool:
        """Append the outputs that it lacks; whether one was aborted, now or in an earlier run.
        Raises ValueError where an output has another fingerprint than it would have now."""
        from tinyspec.tools.audit import other_engine

        known = [output for output in self.kept.values() if output.fingerprint is not None]
        with engine.driver.turn("generate"):
            inputs = engine.ready()
            reasons = [other_engine(output, engine, inputs) for output in known]
        for reason in filter(None, reasons):
            raise refuse("--output", str(self.path), f"outputs of this engine; of one {reason}")
        with self.path.open("ab") as file:
            file.truncate(self._whole)
        left = [job for job in self.jobs if job.job_id not in self.kept]
        try:
            aborted = bool(left) and _run(engine, left, self.write)
        except KeyboardInterrupt:
            done = f"what has finished is in {self.path}; continue with --resume"
            raise KeyboardInterrupt(done) from None
        before = [c for output in self.kept.values() for c in output.completions]
        return aborted or any(completion.finish_reason == "abort" for completion in before)

    def write(self, output: RequestOutput) -> None:
        """Append an output at once: what is written is there whatever happens later."""
        with self.path.open("ab") as file:
            file.write(output.to_json().encode() + b"\n")


class TextWriter:
    """Writes one completion after the other, each followed by a line feed, while all of them grow:
    the first that is unfinished at once, what came of the others when it is their turn; token ids
    where there is no tokenizer. keys: (request id, index) of the completions, in order."""

    def __init__(self, keys: Iterable[tuple[str, int]], file: TextIO):
        self._waiting, self._file = deque(keys), file
        self._texts = dict.fromkeys(self._waiting, "")
        self._ended: set[tuple[str, int]] = set()

    def event(self, event: StreamEvent) -> None:
        """Tokens that one completion got."""
        key = event.request_id, event.index
        ids = "".join(f"{token} " for token in event.token_ids)
        self._texts[key] += ids if event.text is None else event.text
        if event.finish_reason is not None:
            self._ended.add(key)
        while self._waiting:
            first = self._waiting[0]
            self._file.write(self._texts[first])
            self._texts[first] = ""
            if first not in self._ended:
                break
            self._file.write("\n")
            self._waiting.popleft()
        self._file.flush()


def _run(
    engine: Engine, jobs: list[common.Job], write: Callable[[RequestOutput], object] | None
) -> bool:
    """Run ``jobs``; ``write`` their outputs as they finish, or without it their texts in order.
    Returns whether one was aborted."""
    from tqdm import tqdm

    from tinyspec.engine.results import output_of

    events = engine.events("generate", partial(common.requests_of, jobs))
    requests = events.requests
    of = {r.request_id: (r, job) for r, job in zip(requests, jobs, strict=True)}
    keys = [(r.request_id, sequence.index) for r in requests for sequence in r.sequences]
    left = {request.request_id: len(request.sequences) for request in requests}
    text = TextWriter(keys, sys.stdout) if write is None else None
    # Where no text comes on the same terminal.
    shown = sys.stderr.isatty() and (write is not None or not sys.stdout.isatty())
    aborted = False
    with (
        tqdm(total=len(keys), unit="completion", delay=2.0, disable=not shown) as bar,
        between_steps(),
        events,
    ):
        for event in events:
            request, job = of[event.request_id]
            if text is not None:
                _say_thoughts(job.place, event)
                text.event(event)
            if event.finish_reason is None:
                continue
            bar.update()
            if event.finish_reason == "abort":
                aborted = True
                common.say(f"{job.place}: aborted: {event.error}")
            left[event.request_id] -= 1
            if write is not None and not left[event.request_id]:
                write(replace(output_of(request, engine.tokenizer), request_id=job.job_id))
    return aborted


def _say_thoughts(place: str, event: StreamEvent) -> None:
    for thought in event.thoughts or ():
        if len(thought.token_ids) > 1 or thought.cut:
            text = thought.token_ids if thought.text is None else thought.text.strip()
            common.say(f"{place}: chunk {thought.chunk}: {text}{' (cut)' if thought.cut else ''}")


def add_score(parser: ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?")
    parser.add_argument("continuation", nargs="?")
    parser.add_argument("--file", help="JSON lines; - is standard input")
    common.add_options(parser, "json", *common.MODEL)
    common.add_sampling(parser, common.OF_THE_DISTRIBUTION)


def score(options: Namespace) -> int:
    """Log-probabilities of given continuations.

    A file has JSON lines: objects with a prompt, a continuation (text or
    token ids each), and any of the sampling parameters below. The bits are
    those that `generate --deterministic --logprobs` gives the same tokens.
    Text out: the sum, the number of tokens, and the mean. JSON lines out:
    line, logprobs and fingerprint.

    example:
      tinyspec score "Once there was a brave" " fox"
      tinyspec score --file pairs.jsonl --json
    """
    pairs = _pairs(options)
    if not pairs:
        raise refuse("pairs", [], "at least one prompt and its continuation")
    with common.engine_of(options) as engine:
        from tinyspec.engine.results import scores_of

        progress = len(pairs) > 1 and sys.stderr.isatty()
        make = partial(common.requests_of, pairs)
        scores = scores_of(engine.outputs("score", make, progress))
        fingerprint = engine.fingerprint
    for pair, logprobs in zip(pairs, scores, strict=True):
        if options.json:
            found = {"line": pair.number, "logprobs": logprobs, "fingerprint": fingerprint}
            print(json.dumps(found))
        else:
            total = sum(logprobs)
            print(f"{total:.6f} in {len(logprobs)} tokens, {total / len(logprobs):.6f} a token")
    return 0


def _pairs(options: Namespace) -> list[common.Job]:
    """Of the arguments, or of the file."""
    shared, continuation = common.given(options), options.continuation
    if options.file is not None and options.prompt is None:
        lines = common.read_lines(options.file)
        return common.jobs_of(lines, shared, TEXTS, common.OF_THE_DISTRIBUTION)
    if options.file is not None or continuation is None:
        raise refuse("continuation", continuation, "a prompt and its continuation, or --file")
    return [
        common.Job(
            "argument", 1, "argument", common.params_of(shared), options.prompt, continuation
        )
    ]
