"""``tinyspec score``: log-probabilities of given continuations."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tinyspec.cli.common import add_model, make_engine
from tinyspec.cli.inputs import Line, check_prompt, json_object, read_lines
from tinyspec.cli.parser import add_command
from tinyspec.cli.progress import summed_up
from tinyspec.cli.sampling import OF_THE_DISTRIBUTION, add_sampling, given, params_of
from tinyspec.config import EngineConfig
from tinyspec.errors import refuse
from tinyspec.sampling_params import SamplingParams

if TYPE_CHECKING:
    from tinyspec.engine.engine import Engine

EXAMPLE = """\
tinyspec score "Once there was a brave" " fox"
tinyspec score --file pairs.jsonl --json"""
NOTES = (
    "A file has JSON lines: objects with a prompt, a continuation (text or token ids each), and "
    "any of the sampling parameters below. The bits are those that `generate --deterministic "
    "--logprobs` gives the same tokens. Text out: the sum, the number of tokens, and the mean. "
    "JSON lines out: line, logprobs and fingerprint."
)
TEXTS = ("prompt", "continuation")


@dataclass(frozen=True)
class Pair:
    """A prompt, what continues it, and where in the input they stand."""

    number: int
    place: str
    prompt: Any
    continuation: Any
    params: SamplingParams


def add(commands: Any) -> None:
    parser = add_command(
        commands, "score", _score, "log-probabilities of given continuations", EXAMPLE, NOTES
    )
    parser.add_argument("prompt", nargs="?")
    parser.add_argument("continuation", nargs="?")
    parser.add_argument("--file", help="JSON lines; - is standard input")
    parser.add_argument("--json", action="store_true", help="JSON lines out, with every token's")
    add_model(parser, dtype="auto")
    add_sampling(parser, OF_THE_DISTRIBUTION)


def _score(options: argparse.Namespace) -> int:
    pairs = _pairs(options)
    with make_engine(options, EngineConfig()) as engine:
        with summed_up(engine, sys.stderr, len(pairs)):
            scores = _scores(engine, pairs, progress=sys.stderr.isatty())
        fingerprint = engine.fingerprint
    for pair, logprobs in zip(pairs, scores, strict=True):
        if options.json:
            found = {"line": pair.number, "logprobs": logprobs, "fingerprint": fingerprint}
            print(json.dumps(found))
        else:
            total = sum(logprobs)
            print(f"{total:.6f} in {len(logprobs)} tokens, {total / len(logprobs):.6f} a token")
    return 0


def _pairs(options: argparse.Namespace) -> list[Pair]:
    """Of the arguments, or of the file."""
    shared = given(options)
    if options.file is not None and options.prompt is None:
        return [_pair(line, shared) for line in read_lines(options.file)]
    if options.file is not None or options.continuation is None:
        raise refuse(
            "continuation", options.continuation, "a prompt and its continuation, or --file"
        )
    return [Pair(1, "argument", options.prompt, options.continuation, params_of(shared))]


def _pair(line: Line, shared: dict[str, Any]) -> Pair:
    values = json_object(line, TEXTS)
    prompt, continuation = (values.pop(name) for name in TEXTS)
    try:
        check_prompt("prompt", prompt)
        check_prompt("continuation", continuation)
        params = params_of(shared | values, OF_THE_DISTRIBUTION)
    except ValueError as error:
        raise ValueError(f"{line.place}: {error}") from error
    return Pair(line.number, line.place, prompt, continuation, params)


def _scores(engine: Engine, pairs: list[Pair], progress: bool) -> list[list[float]]:
    """For each pair its log-probabilities. Raises ValueError naming the place of a bad one."""

    def score(some: list[Pair]) -> list[list[float]]:
        texts = [pair.prompt for pair in some], [pair.continuation for pair in some]
        params = [pair.params for pair in some]
        return engine.score(*texts, params, progress=progress and len(some) > 1)

    if not pairs:
        raise refuse("pairs", [], "at least one prompt and its continuation")
    try:
        return score(pairs)
    except ValueError:
        for pair in pairs:
            try:
                score([pair])
            except ValueError as error:
                raise ValueError(f"{pair.place}: {error}") from error
        raise
