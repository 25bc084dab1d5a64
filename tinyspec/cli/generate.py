"""``tinyspec generate``: prompts in, text or JSON lines out."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from tinyspec.cli.common import add_model, make_engine
from tinyspec.config import EngineConfig
from tinyspec.errors import refuse
from tinyspec.sampling_params import SamplingParams


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "generate",
        help="generate for prompts given as arguments, in a file, or on standard input",
        epilog="A .jsonl file has one object a line: a prompt (text, token ids or chat messages) "
        "and any sampling parameters, which override those given as options.",
    )
    add_model(parser, dtype="auto")
    parser.add_argument("prompts", nargs="*", help="one prompt each")
    parser.add_argument("--file", type=Path, help="a prompt a line, or .jsonl")
    parser.add_argument("--json", action="store_true", help="JSON lines out instead of text")
    parser.add_argument("--deterministic", action="store_true", help="same bits whatever else runs")
    parser.add_argument("--max-new-tokens", type=int)
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--min-p", type=float)
    parser.add_argument("--repetition-penalty", type=float)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--num-return-sequences", type=int)
    parser.add_argument("--stop", action="append", dest="stop_strings", help="may be repeated")
    parser.add_argument("--logprobs", action="store_true", help="in the JSON output")
    parser.set_defaults(run=_generate)


def _generate(options: argparse.Namespace) -> int:
    shared = {
        field.name: value
        for field in fields(SamplingParams)
        if (value := getattr(options, field.name, None)) is not None and value is not False
    }
    lines = _inputs(options)
    if not lines:
        raise refuse("prompts", [], "at least one prompt")
    prompts = [line.pop("prompt") for line in lines]
    params = [_params(shared | line) for line in lines]
    with make_engine(options, EngineConfig()) as engine:
        outputs = engine.generate(prompts, params, progress=sys.stderr.isatty())
    for output in outputs:
        if options.json:
            print(output.to_json())
            continue
        for completion in output.completions:
            print(completion.text)
            if completion.error is not None:
                print(f"tinyspec: {output.request_id}: {completion.error}", file=sys.stderr)
    return 0


def _inputs(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One object per prompt: of the arguments and the file, or of standard input without either."""
    found: list[dict[str, Any]] = [{"prompt": prompt} for prompt in options.prompts]
    if options.file is not None:
        text = options.file.read_text()
        as_json = options.file.suffix == ".jsonl"
    elif not found:
        text, as_json = sys.stdin.read(), False
    else:
        return found
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            found.append(_object(line, number) if as_json else {"prompt": line})
    return found


def _object(line: str, number: int) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"line {number} is not JSON: {error}") from error
    if not isinstance(value, dict) or "prompt" not in value:
        raise ValueError(f'line {number} is not allowed: a JSON object with a "prompt"')
    return value


def _params(values: dict[str, Any]) -> SamplingParams:
    unknown = set(values) - {field.name for field in fields(SamplingParams)}
    if unknown:
        name = sorted(unknown)[0]
        raise refuse(name, values[name], "a field of SamplingParams")
    return SamplingParams(**values)
