"""What the server costs and gives: over `transformers serve`, and over the engine in a process.

Servers of both sides run beside each other, each on the same small model with random weights; one
client asks them in turns for the same texts, and who is not asked is stopped (SIGSTOP), so that it
takes no processor. Rates are of whole requests; times to the first token and between two pieces of
a text are those of streams. The overhead is that of answers that are not streamed, over
`Engine.generate` of the same requests in this process. Passes are proven before. Needs the extra
`serve`. Run with

    python benchmarks/bench_serve.py [--concurrency 1 8 32] [--rounds N] [--smoke]
        [--dtype bfloat16] [--json FILE]

Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from http import HTTPStatus
from http.client import HTTPConnection, HTTPResponse
from importlib.resources import files
from operator import truediv
from pathlib import Path
from statistics import median, quantiles
from typing import Any
from urllib.parse import urlsplit
from urllib.request import urlopen

import torch
from transformers import AutoTokenizer

from benchmarks.presets import PRESETS, drawn
from benchmarks.render import table
from tinyspec import Engine, SamplingParams

# Seconds that a server may take until it answers.
START = 180
COMMANDS = {
    "tinyspec": [
        *("tinyspec.cli.main", "serve", "--model", "{model}", "--port", "{port}", "--warm-up"),
    ],
    "transformers serve": [
        *("transformers.cli.transformers", "serve", "{model}", "--port", "{port}"),
        # By default its cache is a part of all memory, which is filled: 11 GB of 24 here.
        *("--continuous-batching", "--device", "cpu", "--cb-num-blocks", "128"),
    ],
}
RUN = "import sys; sys.argv[0] = {name!r}; from {module} import main; sys.exit(main())"
# What is compared: the server, and what of a request is its own.
SIDES: dict[str, tuple[str, dict[str, Any]]] = {
    "tinyspec": ("tinyspec", {}),
    "tinyspec, deterministic": ("tinyspec", {"deterministic": True}),
    "transformers serve": ("transformers serve", {}),
}


class Server:
    """A server in a process of its own, which is stopped but within ``awake``."""

    def __init__(self, name: str, model: str, log: Any):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        module, *given = [part.format(model=model, port=port) for part in COMMANDS[name]]
        command = [sys.executable, "-c", RUN.format(name=name, module=module), *given]
        self._process = subprocess.Popen(command, stdout=log, stderr=log)
        self.url, self._name = f"http://127.0.0.1:{port}", name

    def wait(self) -> None:
        """Return when it answers, and is stopped. Raises RuntimeError."""
        until = time.monotonic() + START
        while time.monotonic() < until and self._process.poll() is None:
            try:
                with urlopen(self.url + "/health"):
                    return self._process.send_signal(signal.SIGSTOP)
            except OSError:
                time.sleep(0.2)
        raise RuntimeError(f"{self._name} does not answer")

    @contextmanager
    def awake(self) -> Iterator[str]:
        """Its address; it runs while the block does."""
        self._process.send_signal(signal.SIGCONT)
        try:
            yield self.url
        finally:
            self._process.send_signal(signal.SIGSTOP)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


@contextmanager
def connections(url: str, count: int) -> Iterator[list[HTTPConnection]]:
    """So many that the server has taken: clients keep theirs from one request to the next."""
    # The plainest client there is: on two cores what a client computes is taken from the engine.
    with ExitStack() as stack:
        made = [
            stack.enter_context(closing(HTTPConnection(urlsplit(url).netloc))) for _ in range(count)
        ]
        for connection in made:
            connection.request("GET", "/health")
            connection.getresponse().read()
        yield made


def ask(connection: HTTPConnection, body: dict[str, Any]) -> None:
    """Send one request."""
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)


def answer_of(connection: HTTPConnection) -> HTTPResponse:
    """What comes back. Raises RuntimeError for an error."""
    answer = connection.getresponse()
    if answer.status != HTTPStatus.OK:
        raise RuntimeError(f"the server answers {answer.status}: {answer.read(1000)!r}")
    return answer


def follow(connection: HTTPConnection, body: dict[str, Any], times: dict[str, list[float]]) -> None:
    """One stream: seconds to the first piece of text, and between two."""
    last, kind = time.perf_counter(), "first"
    ask(connection, body)
    for line in answer_of(connection):
        if not line.startswith(b"data: {"):
            continue
        choices = json.loads(line[6:]).get("choices")
        if choices and choices[0].get("text"):
            now = time.perf_counter()
            times[kind].append(now - last)
            last, kind = now, "between"


def streamed(url: str, bodies: list[dict[str, Any]], times: dict[str, list[float]]) -> float:
    """Seconds until all ``bodies``, sent at once, are answered by streams."""
    with ThreadPoolExecutor(len(bodies)) as threads, connections(url, len(bodies)) as made:
        begun = time.perf_counter()
        list(threads.map(partial(follow, times=times), made, bodies))
        return time.perf_counter() - begun


def whole(url: str, bodies: list[dict[str, Any]]) -> float:
    """The same without streams, by this thread alone, which takes the least of the cores."""
    with connections(url, len(bodies)) as made:
        begun = time.perf_counter()
        for connection, body in zip(made, bodies, strict=True):
            ask(connection, body)
        for connection in made:
            answer_of(connection).read()
        return time.perf_counter() - begun


def bodies_of(
    model: str, count: int, tokens: int, stream: bool, own: dict[str, Any]
) -> list[dict[str, Any]]:
    """Requests for greedy completions of prompts that differ."""
    shared = {"model": model, "max_tokens": tokens, "temperature": 0, "stream": stream, **own}
    return [{**shared, "prompt": prompt_of(number)} for number in range(count)]


def prompt_of(number: int) -> str:
    return f"Story {number}. Once upon a time there was a fox with {number} friends. " * 3


def percentiles(seconds: list[float]) -> tuple[float, float]:
    """The median and the 99th percentile, in milliseconds."""
    spread = quantiles(seconds, n=100, method="inclusive") if len(seconds) > 1 else seconds * 99
    return 1e3 * median(seconds), 1e3 * spread[98]


def streams(
    servers: dict[str, Server], model: str, count: int, tokens: int, rounds: int
) -> list[list[Any]]:
    """A row for each side: requests a second, and times."""
    rates: dict[str, list[float]] = {side: [] for side in SIDES}
    times: dict[str, dict[str, list[float]]] = {}
    for number in range(rounds + 1):
        if number < 2:  # the first round warms up
            times = {side: {"first": [], "between": []} for side in SIDES}
        for side, (name, own) in SIDES.items():
            with servers[name].awake() as url:
                bodies = bodies_of(model, count, tokens, True, own)
                seconds = streamed(url, bodies, times[side])
            if number:
                rates[side].append(count / seconds)
    plain = median(rates["transformers serve"])
    return [
        [count, side, median(rates[side]), median(rates[side]) / plain]
        + [value for kind in ("first", "between") for value in percentiles(times[side][kind])]
        for side in SIDES
    ]


def overhead(server: Server, model: str, count: int, tokens: int, rounds: int) -> list[list[Any]]:
    """A row for plain and for deterministic requests: seconds of the engine here, of the server;
    medians, and that of their ratios by round."""
    rows = []
    with Engine.from_pretrained(model) as engine:
        for kind, own in (("plain", {}), ("deterministic", {"deterministic": True})):
            taken: dict[str, list[float]] = {"engine": [], "server": []}
            params = SamplingParams(max_new_tokens=tokens, **own)
            prompts = list(map(prompt_of, range(count)))
            for number in range(rounds + 1):
                begun = time.perf_counter()
                engine.generate(prompts, params)
                seconds = {"engine": time.perf_counter() - begun}
                with server.awake() as url:
                    bodies = bodies_of(model, count, tokens, False, own)
                    seconds["server"] = whole(url, bodies)
                for side, each in taken.items():
                    each += [seconds[side]] if number else []
            ratio = median(map(truediv, taken["server"], taken["engine"]))
            rows.append([count, kind, *map(median, taken.values()), ratio])
    return rows


def main(arguments: list[str] | None = None) -> None:
    """Run it; see the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--preset", default="small")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes; reports nothing")
    parser.add_argument("--json", type=Path, help="write the results there")
    options = parser.parse_args(arguments)
    if options.smoke:
        options.preset, options.concurrency = "tiny", [2]
        options.rounds, options.tokens = 1, 4
    with ExitStack() as stack:
        model = stack.enter_context(tempfile.TemporaryDirectory())
        log = stack.enter_context(open(os.devnull, "w"))
        tokenizer = AutoTokenizer.from_pretrained(str(files("tinyspec.tools") / "storyteller"))
        tokenizer.save_pretrained(model)
        shape = {**PRESETS[options.preset], "vocab_size": len(tokenizer)}
        made: Any = drawn(shape, getattr(torch, options.dtype), "cpu", bos_token_id=0)
        made.save_pretrained(model)
        servers = {name: Server(name, model, log) for name in COMMANDS}
        for server in servers.values():
            stack.callback(server.end)
        for server in servers.values():
            server.wait()
        given = model, options.tokens, options.rounds
        rates = [
            row
            for count in options.concurrency
            for row in streams(servers, given[0], count, *given[1:])
        ]
        costs = overhead(servers["tinyspec"], model, max(options.concurrency), *given[1:])
    if options.smoke:
        return
    header = ["at once", "", "requests a second", "over transformers serve"]
    header += ["first token, ms, p50", "p99", "between pieces, ms, p50", "p99"]
    cells = [[*row[:2], *(f"{x:.2f}" for x in row[2:4]), *map(round, row[4:])] for row in rates]
    print(table(header, cells), end="\n\n")
    cells = [[*row[:2], *(f"{value:.3f}" for value in row[2:])] for row in costs]
    print(table(["at once", "", "engine, s", "server, s", "server over engine"], cells))
    if options.json:
        options.json.write_text(json.dumps({"rates": rates, "overhead": costs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
