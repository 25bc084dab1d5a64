"""``tinyspec demo``."""

from __future__ import annotations

import argparse
from typing import Any

from tinyspec.cli.common import add_model, make_engine
from tinyspec.config import VERIFY, EngineConfig
from tinyspec.tools.demo import demo


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "demo", help="one request alone and in a crowd, without and with deterministic=True"
    )
    # In fp32 on a CPU a lone row's bits differ from a crowd's; bf16 rounds most of that away.
    add_model(parser, dtype="float32")
    parser.add_argument("--crowd", type=int, default=11, help="other requests (default: 11)")
    parser.add_argument("--max-new-tokens", type=int, default=48, help="default: 48")
    # "auto" takes the cheapest way, which on a CPU is hardly ever to draft and verify.
    parser.add_argument("--verify", default="always", choices=VERIFY, help="default: always")
    parser.set_defaults(run=_demo)


def _demo(options: argparse.Namespace) -> int:
    with make_engine(options, EngineConfig(verify=options.verify)) as engine:
        return demo(engine, crowd=options.crowd, max_new_tokens=options.max_new_tokens)
