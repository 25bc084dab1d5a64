"""``tinyspec probe``: is a server of OpenAI's API deterministic?"""

from __future__ import annotations

import asyncio
import json
import os
from argparse import ArgumentParser, Namespace
from pathlib import Path

from tinyspec.errors import refuse

ENDPOINTS, CROWDS = ("chat", "completions"), (4, 16, 64)
FIELDS = """of every request, such as '{"deterministic": true}'"""


def add_probe(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("url", metavar="URL", help="http://HOST:PORT, or with the path of the API")
    add("--model", metavar="NAME", help="default: the first that it lists")
    add("--api-key", metavar="KEY", help="default: the variable OPENAI_API_KEY")
    add("--endpoints", nargs="+", default=ENDPOINTS, choices=ENDPOINTS, help="default: both")
    add("--crowds", nargs="+", type=int, default=CROWDS, metavar="N", help="default: 4 16 64")
    add("--max-tokens", type=int, default=32, metavar="N", help="of an answer (default: 32)")
    add("--timeout", type=float, default=60, metavar="S", help="for one request (default: 60 s)")
    add("--extra-body", type=json.loads, default={}, metavar="JSON", help=FIELDS)
    add("--json", metavar="FILE", help="write all that was found into FILE")


def probe(options: Namespace) -> int:
    """Is a server of OpenAI's API deterministic? One request alone and in crowds.

    Asks one request alone, again, streamed, and in crowds: of itself, of other
    requests, of others that begin like it; at once and one after the other,
    with a cold and a warm prefix, greedy and seeded. Text, token ids and the
    digits of log-probabilities must be those that it has alone; other prompts
    and seeds must give others. What the server refuses is left out. Some 2,000
    requests of 32 tokens; fewer with --crowds and --endpoints. Exit status 0 if
    all are equal, 1 if not, 2 if that could not be found out.

    example:
      tinyspec probe http://localhost:8000
    """
    from tinyspec.serve.probe import Probe

    if not isinstance(options.extra_body, dict):
        raise refuse("--extra-body", options.extra_body, "a JSON object")
    if options.json is not None:
        open(options.json, "ab").close()  # where it cannot be written, nothing runs
    names = ("url", "model", "endpoints", "crowds", "max_tokens", "timeout", "extra_body")
    key = options.api_key or os.environ.get("OPENAI_API_KEY")
    run = Probe(**{name: getattr(options, name) for name in names}, api_key=key)
    try:
        asyncio.run(run.run())
    finally:  # after Ctrl-C too
        print(run.report)
        if options.json is not None:
            Path(options.json).write_text(run.report.to_json() + "\n")
    return run.report.verdict[0]
