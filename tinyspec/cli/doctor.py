"""``tinyspec doctor``: which buckets are canonical here."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from tinyspec.cli.common import (
    add_model,
    add_report,
    load_libraries,
    make_engine,
    model_name,
    print_report,
)
from tinyspec.config import KV_DTYPES, EngineConfig
from tinyspec.errors import TinyspecError

SUMMARY = "which buckets are canonical here, what breaks the others, and what each costs"
EXAMPLE = "tinyspec doctor --model Qwen/Qwen3-0.6B --dtype bfloat16"
NOTES = "Exit status 0 if deterministic=True can be served, 1 if not. Results are kept on disk."


def add(parser: ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--max-rows", type=int, metavar="N", help="default: 2048")
    parser.add_argument(
        "--kv-dtype", default="auto", choices=KV_DTYPES, help="of the KV cache (default: auto)"
    )
    parser.add_argument(
        "--fresh", action="store_true", help="probe again, without the results on disk"
    )
    add_report(parser)


def run(options: Namespace) -> int:
    load_libraries()
    from tinyspec.tools.doctor import DoctorReport, doctor

    config = EngineConfig(
        reference_rows=options.reference_rows,
        max_rows=options.max_rows,
        kv_dtype=options.kv_dtype,
    )
    try:
        with make_engine(options, config) as engine:
            report = doctor(engine, fresh=options.fresh)
    except TinyspecError as error:
        given = model_name(options), options.dtype, options.device
        report = DoctorReport(*given, (str(error),))
    return print_report(report, options.json)
