"""transformers' own tests of generation, on patched models.

    python -m tests.transformers_tests SOURCES [--models llama qwen2 ...] [-n 2]

SOURCES: a checkout of transformers with ``tests/`` and ``conftest.py``, best of the version
installed. Each test runs twice: as it is, and with every model patched at its first ``generate``.
Prints the tests that fail patched alone and how the calls of ``generate`` were served, and ends
with status 1 if there is such a test.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

from tests.transformers_tests import patched_everywhere

MODELS = (
    *("llama", "qwen2", "qwen3", "mistral", "phi3", "mixtral", "qwen3_moe", "starcoder2"),
    *("cohere", "granite", "olmo2", "gemma2", "gemma3", "gpt2", "gpt_neox"),
)
PASSED = "passed"


def main() -> int:
    """The command; its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("sources", type=Path, help="a checkout of transformers")
    parser.add_argument("--models", nargs="*", default=MODELS, help="folders of tests/models")
    parser.add_argument("-k", default="", help="as pytest's")
    parser.add_argument("-n", default="0", help="processes (pytest-xdist)")
    options = parser.parse_args()
    own, _ = run(options, "--own")
    patched, calls = run(options)
    right = [name for name, outcome in own.items() if outcome == PASSED]
    broken = [name for name in right if patched.get(name) != PASSED]
    print(f"{len(own)} tests, of which {len(right)} pass unpatched; of these fail patched:")
    print(*(f"{name}: {patched.get(name, 'not run')}" for name in broken), sep="\n")
    print("calls of generate:", *(f"{count} {how}" for how, count in calls.most_common()), sep="\n")
    return 1 if broken else 0


def run(options: argparse.Namespace, *more: str) -> tuple[dict[str, str], Counter[str]]:
    """Run the tests in a process of their own: "passed" or the error of each, and how calls were
    served. Raises RuntimeError if none ran."""
    paths = [f"tests/models/{m}/test_modeling_{m}.py" for m in options.models]
    paths += patched_everywhere.FILES
    plugin = Path(patched_everywhere.__file__)
    command = [sys.executable, "-m", "pytest", "-q", "-p", plugin.stem, "-p", "no:cacheprovider"]
    command += ["--tb=line", "--continue-on-collection-errors", "-n", options.n, "-k", options.k]
    command += [*more, *(path for path in paths if (options.sources / path).exists())]
    # Both checkouts have a package ``tests``; the plugin is found beside it.
    path = os.pathsep.join([str(plugin.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "record.xml"
        command.append(f"--junitxml={record}")
        subprocess.run(command, cwd=options.sources, env=environment, check=False)
        cases = [*ElementTree.parse(record).iter("testcase")] if record.exists() else []
    if not cases:
        raise RuntimeError("no test could be run; why stands above")
    outcomes, calls = {}, Counter[str]()
    for case in cases:
        wrong = [each for each in case if each.tag in ("failure", "error", "skipped")]
        name = f"{case.get('classname')}.{case.get('name')}"
        outcomes[name] = wrong[0].get("message", "") if wrong else PASSED
        calls.update(each.get("name") for each in case.iter("property"))
    return outcomes, calls


if __name__ == "__main__":
    sys.exit(main())
