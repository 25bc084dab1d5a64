"""The command line: ``tinyspec demo``, ``generate``, ``audit`` and ``doctor``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import tinyspec
from tinyspec import (
    DoctorReport,
    Engine,
    EngineConfig,
    RequestOutput,
    SamplingParams,
    UnsupportedModelError,
    audit,
    doctor,
)
from tinyspec.config import VERIFY
from tinyspec.demo import demo
from tinyspec.errors import TinyspecError
from tinyspec.models import BUNDLED

DTYPES = ("auto", "float32", "bfloat16", "float16")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status (2 for bad arguments or input)."""
    parser = argparse.ArgumentParser(prog="tinyspec", description=tinyspec.__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    _add_demo(commands)
    _add_generate(commands)
    _add_audit(commands)
    _add_doctor(commands)
    options = parser.parse_args(arguments)
    try:
        return int(options.run(options))
    except (ValueError, TinyspecError, OSError) as error:
        print(f"tinyspec: {error}", file=sys.stderr)
        return 2


def _add_model(parser: argparse.ArgumentParser, dtype: str) -> None:
    parser.add_argument(
        "--model", default=str(BUNDLED), help="hub name or folder (default: the bundled model)"
    )
    parser.add_argument("--dtype", default=dtype, choices=DTYPES, help="default: %(default)s")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (default: auto)")


def _add_demo(commands: Any) -> None:
    parser = commands.add_parser(
        "demo", help="one request alone and in a crowd, without and with deterministic=True"
    )
    # In fp32 on a CPU a lone row's bits differ from a crowd's; bf16 rounds most of that away.
    _add_model(parser, dtype="float32")
    parser.add_argument("--crowd", type=int, default=11, help="other requests (default: 11)")
    parser.add_argument("--max-new-tokens", type=int, default=48, help="default: 48")
    # "auto" takes the cheapest way, which on a CPU is hardly ever to draft and verify.
    parser.add_argument("--verify", default="always", choices=VERIFY, help="default: always")
    parser.set_defaults(run=_demo)


def _demo(options: argparse.Namespace) -> int:
    with _engine(options, EngineConfig(verify=options.verify)) as engine:
        return demo(engine, crowd=options.crowd, max_new_tokens=options.max_new_tokens)


def _add_generate(commands: Any) -> None:
    parser = commands.add_parser(
        "generate",
        help="generate for prompts given as arguments, in a file, or on standard input",
        epilog="A .jsonl file holds one object a line: a prompt (text, token ids or chat messages) "
        "and any sampling parameters, which go before those given as options.",
    )
    _add_model(parser, dtype="auto")
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
        raise ValueError("prompts=[] is not allowed: give at least one prompt")
    prompts = [line["prompt"] for line in lines]
    params = [_params({**shared, **_without_prompt(line)}) for line in lines]
    with _engine(options, EngineConfig()) as engine:
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


def _add_audit(commands: Any) -> None:
    parser = commands.add_parser(
        "audit",
        help="is what `tinyspec generate --json` wrote what this engine produces, bit for bit?",
        epilog="Exit status 0 if every completion is the same, 1 if one differs or cannot be "
        "compared: other weights, device, versions, dtype or reference rows.",
    )
    parser.add_argument("file", type=Path, metavar="FILE.jsonl", help="one output a line")
    _add_model(parser, dtype="auto")
    parser.add_argument("--reference-rows", type=int, help="default: CPU 32, GPU 128")
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of a table")
    parser.set_defaults(run=_audit)


def _audit(options: argparse.Namespace) -> int:
    lines = options.file.read_text().splitlines()
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    outputs = [_output(line, number) for number, line in numbered]
    if not outputs:
        raise ValueError(f"file={str(options.file)!r} is not allowed: at least one output")
    with _engine(options, EngineConfig(reference_rows=options.reference_rows)) as engine:
        report = audit(engine, outputs)
    print(report.to_json() if options.json else report)
    return 0 if report else 1


def _output(line: str, number: int) -> RequestOutput:
    try:
        return RequestOutput.from_json(line)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"line {number} is no output of tinyspec: {error}") from error


def _add_doctor(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="which buckets are canonical here, what breaks the others, and what each costs",
        epilog="Exit status 0 if deterministic=True can be served, 1 if not. What was found is "
        "kept on disk.",
    )
    _add_model(parser, dtype="auto")
    parser.add_argument("--reference-rows", type=int, help="default: CPU 32, GPU 128")
    parser.add_argument("--max-rows", type=int, help="default: 2048")
    parser.add_argument("--fresh", action="store_true", help="probe anew, whatever is on disk")
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of a table")
    parser.set_defaults(run=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    config = EngineConfig(reference_rows=options.reference_rows, max_rows=options.max_rows)
    try:
        with _engine(options, config) as engine:
            report = doctor(engine, fresh=options.fresh)
    except UnsupportedModelError as error:
        report = DoctorReport(options.model, options.dtype, options.device, (str(error),))
    print(report.to_json() if options.json else report)
    return 0 if report else 1


def _inputs(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One object per prompt, from the arguments and the file, or else from standard input."""
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
        raise ValueError(f'line {number} is not allowed: an object with a "prompt"')
    return value


def _without_prompt(line: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in line.items() if key != "prompt"}


def _params(values: dict[str, Any]) -> SamplingParams:
    unknown = set(values) - {field.name for field in fields(SamplingParams)}
    if unknown:
        name = sorted(unknown)[0]
        raise ValueError(f"{name}={values[name]!r} is not allowed: no such sampling parameter")
    return SamplingParams(**values)


def _engine(options: argparse.Namespace, config: EngineConfig) -> Engine:
    return Engine.from_pretrained(options.model, options.dtype, options.device, config)
