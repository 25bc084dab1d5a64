"""``tinyspec demo``."""

from __future__ import annotations

import argparse
from typing import Any

from tinyspec.cli.common import add_model, make_engine
from tinyspec.cli.parser import add_command
from tinyspec.config import VERIFY, EngineConfig


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "demo",
        _demo,
        "one request alone and among others, without and with deterministic=True",
        "tinyspec demo --crowd 20",
    )
    # In fp32 on a CPU the bits of a single row differ from those in a batch; bf16 hides most of it.
    add_model(parser, dtype="float32")
    parser.add_argument("--crowd", type=int, default=11, help="other requests (default: 11)")
    parser.add_argument("--max-new-tokens", type=int, default=48, help="default: 48")
    # "auto" takes the cheapest way, on a CPU hardly ever to draft and verify.
    parser.add_argument("--verify", default="always", choices=VERIFY, help="default: always")


def _demo(options: argparse.Namespace) -> int:
    from tinyspec.tools.demo import demo

    with make_engine(options, EngineConfig(verify=options.verify)) as engine:
        return demo(engine, crowd=options.crowd, max_new_tokens=options.max_new_tokens)
