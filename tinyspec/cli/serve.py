"""``tinyspec serve``: the HTTP server, from options to a process that ends when it is told to."""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from tinyspec.cli import common

# Beyond what the engine takes and lets wait: connections that are kept open or send their bodies.
SPARE_CONNECTIONS = 256
# Seconds that an idle connection is kept: longer than clients keep theirs, so that none is closed
# as its next request is under way.
KEEP_ALIVE = 30
# Bytes of a request's line and headers.
MAX_HEADERS = 2**16
# Settings of an engine whose verifies the page draws: of so many passes.
TRACED: dict[str, Any] = {"verify": "always", "trace": 1000}
INTERVAL = "passes from a stream's piece to the next (default: 1, with 16 streams 2, up to 4)"


def add_serve(parser: ArgumentParser) -> None:
    common.add_options(parser, *common.MODEL, "drafter", "reference_rows", "max_model_len")
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="default: %(default)s, this machine alone")
    add("--port", type=int, default=8000, help="default: %(default)s")
    add("--api-key", metavar="KEY", help="what clients must send (default: TINYSPEC_API_KEY)")
    add("--allowed-origins", nargs="+", default=[], metavar="URL", help="of pages, or *")
    add("--served-model-name", metavar="NAME", help="default: as --lora or --model")
    add("--deterministic", action="store_true", help="requests that do not say are deterministic")
    add("--warm-up", action="store_true", help="prove all passes before the first request")
    add("--max-requests", type=int, default=256, metavar="N", help="that run (default: 256)")
    add("--max-waiting", type=int, default=1024, metavar="N", help="others get 429 (default: 1024)")
    add("--trace", action="store_true", help="draft and verify always; the page at / draws it")
    add("--stream-interval", type=int, metavar="N", help=INTERVAL)
    add("--timeout", type=float, metavar="S", help="seconds that a request may take")
    add("--drain", type=int, default=30, metavar="S", help="seconds to end in (default: 30)")


def serve(options: Namespace) -> int:
    """An HTTP server with OpenAI's API.

    /v1/chat/completions, /v1/completions, /v1/responses, /v1/models, /v1/audit,
    /tokenize, /detokenize, /metrics and /health; / is a page to chat in. Ctrl-C
    lets requests end, for --drain seconds; Ctrl-C again aborts them.

    example:
      tinyspec serve --model Qwen/Qwen3-0.6B --deterministic
    """
    import uvicorn

    from tinyspec.engine.async_engine import AsyncEngine
    from tinyspec.serve.app import Server, create_app

    base = options.model or Path(common.model_name(options)).name
    name = options.served_model_name or (options.lora and Path(options.lora).name) or base
    # A key given as an option stands in the list of processes.
    key = options.api_key or os.environ.get("TINYSPEC_API_KEY")
    limits = {"max_requests": options.max_requests, "max_waiting": options.max_waiting}
    with common.engine_of(options, **(TRACED if options.trace else {})) as engine:
        if options.warm_up:
            engine.warm_up()
        served = AsyncEngine(engine, **limits, stream_interval=options.stream_interval)
        server = Server(served, name, options.deterministic, options.timeout, options.lora and base)
        settings = uvicorn.Config(
            create_app(server, key, origins=options.allowed_origins),
            host=options.host,
            port=options.port,
            http="h11",
            ws="none",
            access_log=False,
            server_header=False,
            h11_max_incomplete_event_size=MAX_HEADERS,
            limit_concurrency=sum(limits.values()) + SPARE_CONNECTIONS,
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=options.drain,
        )

        class Process(uvicorn.Server):
            """Ctrl-C again aborts what is unfinished, where uvicorn would wait for it."""

            def handle_exit(self, sig: int, frame: Any) -> None:
                super().handle_exit(sig, frame)
                if self.force_exit:
                    for task in self.server_state.tasks:
                        task.cancel()

        Process(settings).run()
    return 0
