"""``tinyspec score``: log-probabilities of given continuations."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from functools import partial
from typing import TYPE_CHECKING

from tinyspec.cli.common import add_model, make_engine, read_lines
from tinyspec.cli.jobs import (
    OF_THE_DISTRIBUTION,
    Job,
    add_sampling,
    by_place,
    given,
    job_of_json,
    params_of,
)
from tinyspec.cli.progress import summed_up
from tinyspec.config import EngineConfig
from tinyspec.errors import refuse

if TYPE_CHECKING:
    from tinyspec.engine.engine import Engine

SUMMARY = "log-probabilities of given continuations"
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


def add(parser: ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?")
    parser.add_argument("continuation", nargs="?")
    parser.add_argument("--file", help="JSON lines; - is standard input")
    parser.add_argument("--json", action="store_true", help="JSON lines out, with every token's")
    add_model(parser)
    add_sampling(parser, OF_THE_DISTRIBUTION)


def run(options: Namespace) -> int:
    pairs = _pairs(options)
    if not pairs:
        raise refuse("pairs", [], "at least one prompt and its continuation")
    with make_engine(options, EngineConfig()) as engine:
        with summed_up(engine, sys.stderr, len(pairs)):
            scores = by_place(pairs, partial(_scores, engine), ValueError)
        fingerprint = engine.fingerprint
    for pair, logprobs in zip(pairs, scores, strict=True):
        if options.json:
            found = {"line": pair.number, "logprobs": logprobs, "fingerprint": fingerprint}
            print(json.dumps(found))
        else:
            total = sum(logprobs)
            print(f"{total:.6f} in {len(logprobs)} tokens, {total / len(logprobs):.6f} a token")
    return 0


def _pairs(options: Namespace) -> list[Job]:
    """Of the arguments, or of the file."""
    shared, continuation = given(options), options.continuation
    if options.file is not None and options.prompt is None:
        lines = read_lines(options.file)
        return [job_of_json(line, shared, TEXTS, OF_THE_DISTRIBUTION) for line in lines]
    if options.file is not None or continuation is None:
        raise refuse("continuation", continuation, "a prompt and its continuation, or --file")
    return [Job("argument", 1, "argument", params_of(shared), options.prompt, continuation)]


def _scores(engine: Engine, pairs: list[Job]) -> list[list[float]]:
    """For each pair its log-probabilities."""
    texts = [pair.prompt for pair in pairs], [pair.continuation for pair in pairs]
    progress = len(pairs) > 1 and sys.stderr.isatty()
    return engine.score(*texts, [pair.params for pair in pairs], progress=progress)
