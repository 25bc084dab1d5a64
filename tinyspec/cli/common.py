"""What the commands share: options of the model and of reports, and the engine for them."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from tinyspec.cli.interrupts import load_libraries
from tinyspec.config import EngineConfig

if TYPE_CHECKING:
    from tinyspec.engine.engine import Engine

DTYPES = ("auto", "float32", "bfloat16", "float16")


def add_model(parser: argparse.ArgumentParser, dtype: str) -> None:
    """Options that choose the model, and where and in which dtype it runs."""
    parser.add_argument(
        "--model", metavar="NAME", help="hub name or folder (default: the bundled model)"
    )
    parser.add_argument("--dtype", default=dtype, choices=DTYPES, help="default: %(default)s")
    parser.add_argument("--device", default="auto", help="auto (default), cpu, cuda or cuda:N")


def add_report(parser: argparse.ArgumentParser) -> None:
    """Options of the commands that print a report."""
    parser.add_argument("--reference-rows", type=int, metavar="N", help="default: CPU 32, GPU 128")
    parser.add_argument("--json", action="store_true", help="one line of JSON instead of a table")


def make_engine(options: argparse.Namespace, config: EngineConfig) -> Engine:
    """The engine that the options ask for; bars of what is loaded are for terminals only."""
    name = options.model or "the bundled model"
    if sys.stderr.isatty():
        print(f"tinyspec: loading {name}", file=sys.stderr)
    load_libraries()
    from transformers.utils import logging

    from tinyspec.engine.engine import Engine

    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    return Engine.from_pretrained(model_name(options), options.dtype, options.device, config)


def model_name(options: argparse.Namespace) -> str:
    """The model asked for; without one, that in the package."""
    if options.model is not None:
        return str(options.model)
    from tinyspec.tools.demo import BUNDLED

    return str(BUNDLED)
