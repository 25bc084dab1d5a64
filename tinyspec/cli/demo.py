"""``tinyspec demo``."""

from __future__ import annotations

import argparse
from typing import Any

from tinyspec.cli.common import add_model, make_engine
from tinyspec.config import VERIFY, EngineConfig
from tinyspec.tools.demo import demo


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "demo", help="one request alone and among others, without and with deterministic=True"
    )
    # In fp32 on a CPU the bits of a single row differ from those in a batch; bf16 hides most of it.
    add_model(parser, dtype="float32")
    parser.add_argument("--crowd", type=int, default=11, help="other requests (default: 11)")
    parser.add_argument("--max-new-tokens", type=int, default=48, help="default: 48")
    # "auto" takes the cheapest way, on a CPU hardly ever to draft and verify.
    parser.add_argument("--verify", default="always", choices=VERIFY, help="default: always")
    parser.set_defaults(run=_demo)


def _demo(options: argparse.Namespace) -> int:
    with make_engine(options, EngineConfig(verify=options.verify)) as engine:
        return demo(engine, crowd=options.crowd, max_new_tokens=options.max_new_tokens)
