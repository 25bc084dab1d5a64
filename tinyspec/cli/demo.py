"""``tinyspec demo``."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from contextlib import ExitStack
from pathlib import Path

from tinyspec.cli.common import add_model, load_libraries, make_engine
from tinyspec.config import VERIFY, EngineConfig
from tinyspec.errors import refuse

SUMMARY = "one request alone and in a crowd, without and with deterministic=True"
EXAMPLE = "tinyspec demo --crowd 20"
NOTES = (
    "Exit status 0 if the deterministic request has the same bits alone and in the crowd, 1 if "
    "not, whatever the plain one does. The verify that is drawn is one of this run; `tinyspec "
    "trace` draws whole runs."
)


def add(parser: ArgumentParser) -> None:
    add_model(parser, dtype="bfloat16")
    parser.add_argument(
        "--thinking",
        action="store_true",
        help="a model that reasons while it reads instead, on one prompt",
    )
    parser.add_argument("--crowd", type=int, default=11, help="other requests (default: 11)")
    parser.add_argument("--max-new-tokens", type=int, default=120, help="default: 120")
    parser.add_argument("--seed", type=int, help="of the request (default: one chosen beforehand)")
    # "auto" takes the cheapest way, on a CPU hardly ever to draft and verify.
    parser.add_argument("--verify", default="always", choices=VERIFY, help="default: always")


def run(options: Namespace) -> int:
    for name, value in (("crowd", options.crowd), ("max-new-tokens", options.max_new_tokens)):
        if value < 1:
            raise refuse(f"--{name}", value, "an integer of at least 1")
    if options.seed is not None and not 0 <= options.seed < 2**63:
        raise refuse("--seed", options.seed, "an integer in [0, 2**63)")
    load_libraries()
    if options.thinking:
        return _thinking(options)
    from tinyspec.tools.demo import demo

    config = EngineConfig(verify=options.verify, trace=True, draft_window=5)
    with make_engine(options, config) as engine:
        return demo(engine, options.crowd, options.max_new_tokens, options.seed)


def _thinking(options: Namespace) -> int:
    from tinyspec.thinking.config import ThinkingConfig
    from tinyspec.tools.demo_thinking import BUNDLED, PROMPT, WAYS, demo_thinking

    options.model = options.model or str(BUNDLED)
    with ExitStack() as open_engines:
        engines = {
            name: open_engines.enter_context(
                make_engine(options, EngineConfig(thinking_window=window))
            )
            for name, window in WAYS.items()
        }
        return demo_thinking(engines, ThinkingConfig.load(Path(options.model)), PROMPT)
