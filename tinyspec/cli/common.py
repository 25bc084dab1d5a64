"""What the commands share: options of the model and of reports, and the engine for them."""

from __future__ import annotations

import argparse

from tinyspec.config import EngineConfig
from tinyspec.engine.engine import Engine
from tinyspec.tools.demo import BUNDLED

DTYPES = ("auto", "float32", "bfloat16", "float16")


def add_model(parser: argparse.ArgumentParser, dtype: str) -> None:
    parser.add_argument(
        "--model", default=str(BUNDLED), help="hub name or folder (default: the bundled model)"
    )
    parser.add_argument("--dtype", default=dtype, choices=DTYPES, help="default: %(default)s")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (default: auto)")


def add_report(parser: argparse.ArgumentParser) -> None:
    """Options of the commands that print a report."""
    parser.add_argument("--reference-rows", type=int, help="default: CPU 32, GPU 128")
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of a table")


def make_engine(options: argparse.Namespace, config: EngineConfig) -> Engine:
    return Engine.from_pretrained(options.model, options.dtype, options.device, config)
