"""What the commands share: options, the engine asked for, lines in, reports and errors out.

Knows no command, and imports torch when an engine is made.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import cached_property
from inspect import getdoc
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from tinyspec.config import KV_DTYPES, EngineConfig
from tinyspec.errors import OTHER_NAMES, TinyspecError, refuse
from tinyspec.interrupts import between_steps
from tinyspec.outputs import RequestOutput, no_name_twice
from tinyspec.sampling_params import SamplingParams

if TYPE_CHECKING:
    from tinyspec.engine.engine import Engine
    from tinyspec.engine.input_processor import InputProcessor
    from tinyspec.scheduler.request import Request

STANDARD_INPUT = "-"
# As shells report a process that Ctrl-C has ended.
INTERRUPTED = 130
DTYPES = ("auto", "float32", "bfloat16", "float16")
# Options that several commands have.
OPTIONS: dict[str, dict[str, Any]] = {
    "model": {"metavar": "NAME", "help": "hub name or folder (default: the bundled model)"},
    "dtype": {"default": "auto", "choices": DTYPES, "help": "default: %(default)s"},
    "device": {"default": "auto", "help": "auto (default), cpu, cuda or cuda:N"},
    "revision": {"metavar": "NAME", "help": "branch, tag or commit on the hub"},
    "lora": {"metavar": "NAME", "help": "hub name or folder of an adapter of PEFT's"},
    "trust_remote_code": {
        "action": "store_true",
        "default": None,
        "help": "run the model's own code",
    },
    "reference_rows": {"type": int, "metavar": "N", "help": "default: CPU 32, GPU 128"},
    "max_rows": {"type": int, "metavar": "N", "help": "default: 2048"},
    "max_model_len": {"type": int, "metavar": "N", "help": "tokens of prompt and answer"},
    "kv_dtype": {"choices": KV_DTYPES, "help": "of the KV cache (default: auto)"},
    "drafter": {
        "metavar": "NAME",
        "help": "ngram, mtp, or name or folder of a smaller model with the same tokens",
    },
    "json": {"action": "store_true", "help": "JSON, one line each, instead of text"},
}
# Those of EngineConfig, and of Engine.from_pretrained.
CONFIG = ("reference_rows", "max_rows", "max_model_len", "kv_dtype")
SOURCE = ("revision", "lora", "trust_remote_code")
LOADING = (*SOURCE, "dtype", "device")
MODEL = ("model", *LOADING)
# What some commands import, and the extra that brings it.
EXTRAS = {"ray": "ray", "pyarrow": "ray", "openai": "serve", "fastapi": "serve"}
EXTRAS |= {"uvicorn": "serve", "prometheus_client": "serve"}
# Fields of SamplingParams that a shell can give, and how they are written in Python.
SAMPLING = {f.name: str(f.type) for f in fields(SamplingParams) if "Callable" not in str(f.type)}
# By what that begins with: type and metavar of the option.
TYPES: dict[str, tuple[Any, str]] = {"int": (int, "N"), "float": (float, "N"), "str": (str, "TEXT")}
# That change the log-probability of a given token.
OF_THE_DISTRIBUTION = (
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "logprobs_mode"),
    *("frequency_penalty", "presence_penalty", "logit_bias", "bad_words_ids"),
    *("allowed_token_ids", "json_schema", "regex", "grammar", "thinking"),
)


class Parser(argparse.ArgumentParser):
    """Errors are one line on standard error, with exit status 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def add_options(parser: argparse.ArgumentParser, *names: str, **defaults: object) -> None:
    """Options of OPTIONS, with other defaults."""
    for name in names:
        parser.add_argument(f"--{name.replace('_', '-')}", **OPTIONS[name])
    parser.set_defaults(**defaults)


def add_sampling(parser: argparse.ArgumentParser, names: Collection[str] = tuple(SAMPLING)) -> None:
    """An option for each of the fields, which says what their docstring says of them first; None
    where it is not given."""
    group = parser.add_argument_group("sampling")
    said = re.findall(r"(?ms)^(\w+): (.+?)\.\s", getdoc(SamplingParams) or "")
    told = {name: " ".join(text.split()) for name, text in said}
    for name in names:
        kind = SAMPLING[name]
        how: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
        if kind != "bool":
            read, metavar = TYPES.get(kind.partition(" ")[0], (json.loads, "JSON"))
            how = {"type": read, "metavar": metavar}
        if "| Sequence" in kind:
            how["action"] = "append"
        spelled = f"--{name.replace('_', '-')}"
        flags = [spelled, "--stop"] if name == "stop_strings" else [spelled]
        group.add_argument(*flags, dest=name, help=told.get(name), **how)


def given(options: argparse.Namespace, names: Collection[str] = tuple(SAMPLING)) -> dict[str, Any]:
    """Those of ``names`` that were given as options."""
    values = {name: getattr(options, name, None) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def params_of(values: dict[str, Any], names: Collection[str] = tuple(SAMPLING)) -> SamplingParams:
    """Raises ValueError naming the field for one that is not among ``names``, or a bad value."""
    # Of names that others have for fields SamplingParams says what they are called here.
    for name in sorted(values.keys() - OTHER_NAMES.keys() - set(names)):
        close = get_close_matches(name, names, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise refuse(name, values[name], f"one of {', '.join(names)}{hint}")
    return SamplingParams(**values)


def model_name(options: argparse.Namespace) -> str:
    """The model asked for; without one, that in the package."""
    from tinyspec.tools.demo import BUNDLED

    return str(BUNDLED if options.model is None else options.model)


@contextmanager
def engine_of(options: argparse.Namespace, **settings: Any) -> Iterator[Engine]:
    """The engine that the options ask for, and further ``settings`` of EngineConfig; at the end, on
    a terminal, a line about what it ran."""
    config = EngineConfig(**given(options, CONFIG), **settings)
    load_libraries()
    from transformers.utils import logging

    from tinyspec.engine.engine import Engine

    terminal = sys.stderr.isatty()
    if not terminal:
        logging.disable_progress_bar()
    where = options.dtype, options.device, config
    source = given(options, (*SOURCE, "drafter"))
    with Engine.from_pretrained(model_name(options), *where, **source) as engine:
        yield engine
        stats = engine.stats()
        if terminal and stats.committed:
            speed = f"{stats.committed} tokens, {stats.committed / stats.seconds:.0f} a second"
            passes = f"{stats.canonical_passes} of {sum(stats.passes.values())} passes canonical"
            say(f"{speed}; {stats.cached_prompt_tokens} prompt tokens cached; {passes}")


def load_libraries() -> None:
    """Import what every engine needs. Ctrl-C takes effect behind that: where it raised an exception
    in the middle, code in C++ would end the process with a message of its own."""
    with between_steps():
        import tinyspec.engine.engine  # noqa: F401


def say(message: str) -> None:
    """One line on standard error."""
    print(f"tinyspec: {' '.join(message.split())}", file=sys.stderr)


def told(error: Exception) -> str:
    """What an error says, with its type where it was not raised for users to read."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, ImportError) and error.name in EXTRAS:
        return f'this needs {error.name}: pip install "tinyspec[{EXTRAS[error.name]}]"'
    if isinstance(error, (ValueError, TinyspecError, OSError)):
        return str(error)
    return f"{type(error).__name__}: {error} (--debug shows the traceback)"


@dataclass(frozen=True)
class Line:
    """One line that is not blank. place: file and number, for messages."""

    number: int
    place: str
    text: str


def read_lines(path: str, data: bytes | None = None) -> list[Line]:
    """Of a file (or of its ``data``), or of standard input for "-"; only line feeds end a line.
    Raises OSError, and ValueError naming file and line for what is not UTF-8."""
    name = "standard input" if path == STANDARD_INPUT else path
    if data is None:
        standard = path == STANDARD_INPUT
        data = sys.stdin.buffer.read() if standard else Path(path).read_bytes()
    lines = []
    for number, raw in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        place = f"{name}, line {number}"
        try:
            text = raw.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{place} is not UTF-8: {error.reason}") from error
        if text.strip():
            lines.append(Line(number, place, text.removesuffix("\r")))
    return lines


def read_outputs(path: str, data: bytes | None = None) -> tuple[list[RequestOutput], list[str]]:
    """The outputs in a file, and what is wrong with each line that is none."""
    outputs, complaints = [], []
    for line in read_lines(path, data):
        try:
            outputs.append(RequestOutput.from_json(line.text))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            complaints.append(f"{line.place} is not an output of tinyspec: {reason}")
    return outputs, complaints


def print_report(report: Any, as_json: bool, complaints: Collection[str] = ()) -> int:
    """Print a report, and what is wrong with its input; the exit status."""
    print(report.to_json() if as_json else report)
    for complaint in complaints:
        say(complaint)
    if complaints:
        return 2
    return 0 if report else 1


@dataclass(frozen=True)
class Job:
    """A prompt, its parameters, and for a score what continues it. source: the kind of input,
    "line" or "argument", and ``number`` its place there; place: the same for messages. row_id: as
    the line says, or its number."""

    source: str
    number: int
    place: str
    params: SamplingParams
    prompt: Any
    continuation: Any = None
    row_id: int | str | None = None

    @cached_property
    def job_id(self) -> str:
        """Its place, and a digest of prompt and parameters as they were given."""
        text = json.dumps([self.prompt, self.params.to_dict()], sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        return f"{self.source}-{self.number}-{digest}"


def jobs_of(
    lines: list[Line],
    shared: dict[str, Any],
    texts: Collection[str] = ("prompt",),
    names: Collection[str] = tuple(SAMPLING),
    has_id: bool = False,
) -> list[Job]:
    """Of lines with a JSON object each: its ``texts``, parameters that override those shared, and
    where ``has_id`` its "id", which no other has. Raises ValueError for all lines that are no such
    object, with file, line, field, value, and what is allowed."""
    jobs, complaints, places = [], [], dict[str, str]()
    for line in lines:
        try:
            job = _job_of(line, shared, texts, names, has_id)
            if has_id and (first := places.setdefault(str(job.row_id), job.place)) != job.place:
                raise refuse("id", job.row_id, f"another than that of {first}")
            jobs.append(job)
        except ValueError as error:
            complaints.append(f"{line.place}: {error}")
    if complaints:
        raise ValueError("; ".join(complaints))
    return jobs


def _job_of(
    line: Line, shared: dict[str, Any], texts: Collection[str], names: Collection[str], has_id: bool
) -> Job:
    try:
        found = json.loads(line.text, object_pairs_hook=no_name_twice)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON: {error}") from error
    values = found if isinstance(found, dict) else {}
    own = {name: values.pop(name, None) for name in texts}
    for name, text in own.items():
        if not (isinstance(text, str) or (isinstance(text, (list, dict)) and text)):
            allowed = "text, a list of token ids, or a list of chat messages, in a JSON object with"
            hint = f" (messages: {OTHER_NAMES['messages']})" if "messages" in values else ""
            raise refuse(name, text, f'{allowed} a "{name}"{hint}')
    row_id = values.pop("id", line.number) if has_id else None
    if has_id and type(row_id) not in (int, str):
        raise refuse("id", row_id, "text or an integer")
    params = params_of(shared | values, names)
    return Job("line", line.number, line.place, params, row_id=row_id, **own)


def requests_of(jobs: list[Job], inputs: InputProcessor) -> list[Request]:
    """One for each job. Raises ValueError naming the place of the first that is refused."""
    requests = []
    for job in jobs:
        try:
            if job.continuation is None:
                requests += inputs.requests([job.prompt], job.params)
            else:
                requests += inputs.scored([job.prompt], [job.continuation], job.params)
        except Exception as error:  # chat templates raise any
            raise ValueError(f"{job.place}: {error}") from error
    return requests
