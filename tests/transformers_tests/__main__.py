"""transformers' own tests of generation, on patched models.

    python -m tests.transformers_tests SOURCES [--models llama qwen2 ...] [--keep FOLDER] [-n 2]

SOURCES: a checkout of transformers with ``tests/`` and ``conftest.py``, best of the version
installed. Each test runs twice: as it is, and with every model patched at its first ``generate``.
Prints a table of outcomes and one of calls, and ends with status 1 if a test fails that passes
unpatched.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.transformers_tests import patched_everywhere
from tests.transformers_tests.tables import Tests, broken, calls, outcomes

MODELS = (
    *("llama", "qwen2", "qwen3", "mistral", "phi3", "mixtral", "qwen3_moe", "starcoder2"),
    *("cohere", "granite", "olmo2", "gemma2", "gemma3", "gpt2", "gpt_neox"),
)


def main() -> int:
    """The command; its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("sources", type=Path, help="a checkout of transformers")
    parser.add_argument("--models", nargs="*", default=MODELS, help="folders of tests/models")
    parser.add_argument("--keep", type=Path, help="folder for the records of both runs")
    parser.add_argument("-k", default="", help="as pytest's")
    parser.add_argument("-n", default="0", help="processes (pytest-xdist)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        records = (options.keep or Path(folder)).resolve()
        records.mkdir(parents=True, exist_ok=True)
        own = run(options, records / "own.json", "--own")
        patched = run(options, records / "patched.json")
    print(outcomes(own, patched), calls(patched), sep="\n\n")
    return 1 if broken(own, patched) else 0


def run(options: argparse.Namespace, record: Path, *more: str) -> Tests:
    """Run the tests in a process of their own. Raises RuntimeError if none ran."""
    record.unlink(missing_ok=True)
    paths = [f"tests/models/{m}/test_modeling_{m}.py" for m in options.models]
    paths += patched_everywhere.FILES
    plugin = Path(patched_everywhere.__file__)
    command = [sys.executable, "-m", "pytest", "-p", plugin.stem, f"--record={record}", "-q"]
    command += [
        "-p",
        "no:cacheprovider",
        "-p",
        "no:randomly",
        "--tb=line",
        "-n",
        options.n,
        "--continue-on-collection-errors",
    ]
    command += ["-k", options.k, *more]
    command += [path for path in paths if (options.sources / path).exists()]
    # Both checkouts have a package ``tests``; the plugin is found beside it.
    path = os.pathsep.join([str(plugin.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    subprocess.run(command, cwd=options.sources, env=environment, check=False)
    if not record.exists():
        raise RuntimeError(f"pytest wrote no {record}; what it printed stands above")
    tests: Tests = json.loads(record.read_text())
    if not tests:
        raise RuntimeError("no test could be run; why stands above")
    return tests


if __name__ == "__main__":
    sys.exit(main())
