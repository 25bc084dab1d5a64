"""``tinyspec doctor``: which buckets are canonical here."""

from __future__ import annotations

import argparse
from typing import Any

from tinyspec.cli.common import add_model, add_report, make_engine
from tinyspec.config import KV_DTYPES, EngineConfig
from tinyspec.errors import UnsupportedModelError
from tinyspec.tools.doctor import DoctorReport, doctor


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="which buckets are canonical here, what breaks the others, and what each costs",
        epilog="Exit status 0 if deterministic=True can be served, 1 if not. The results are kept "
        "on disk.",
    )
    add_model(parser, dtype="auto")
    parser.add_argument("--max-rows", type=int, help="default: 2048")
    parser.add_argument("--kv-dtype", default="auto", choices=KV_DTYPES)
    parser.add_argument(
        "--fresh", action="store_true", help="probe again, without the results on disk"
    )
    add_report(parser)
    parser.set_defaults(run=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    config = EngineConfig(
        reference_rows=options.reference_rows,
        max_rows=options.max_rows,
        kv_dtype=options.kv_dtype,
    )
    try:
        with make_engine(options, config) as engine:
            report = doctor(engine, fresh=options.fresh)
    except UnsupportedModelError as error:
        report = DoctorReport(options.model, options.dtype, options.device, (str(error),))
    print(report.to_json() if options.json else report)
    return 0 if report else 1
