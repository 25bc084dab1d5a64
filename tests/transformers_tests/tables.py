"""What two runs of the same tests say: outcomes side by side, and how calls were served."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tests.transformers_tests.patched_everywhere import RAISED, SERVED

# By node id: the outcome, the error's text, and the counts of calls.
Tests = dict[str, dict[str, Any]]


def broken(own: Tests, patched: Tests) -> list[str]:
    """Tests that pass as they are and not with patched models."""
    passed = (name for name, test in own.items() if test["outcome"] == "passed")
    return [n for n in passed if patched.get(n, {}).get("outcome") != "passed"]


def outcomes(own: Tests, patched: Tests) -> str:
    """Per file: tests, those that pass as they are, and of these those that fail patched."""
    rows = Counter(_file(name) for name in own)
    passed = Counter(_file(name) for name, test in own.items() if test["outcome"] == "passed")
    failed = Counter(_file(name) for name in broken(own, patched))
    lines = ["| tests of | tests | pass unpatched | of these fail patched |", "|---|--:|--:|--:|"]
    lines += [f"| {n} | {rows[n]} | {passed[n]} | {failed[n]} |" for n in sorted(rows)]
    lines += [f"| all | {rows.total()} | {passed.total()} | {failed.total()} |"]
    errors = [f"- {name}: {_last_line(patched.get(name, {}))}" for name in broken(own, patched)]
    return "\n".join([*lines, "", *errors] if errors else lines)


def calls(patched: Tests) -> str:
    """How many calls of ``generate`` were served, and why others were not."""
    counts: Counter[str] = Counter()
    for test in patched.values():
        counts.update(test["calls"])
    served, raised = counts.pop(SERVED, 0), counts.pop(RAISED, 0)
    lines = ["| calls of generate | number |", "|---|--:|"]
    lines += [f"| served by tinyspec | {served} |", f"| an error for the caller | {raised} |"]
    lines += [f"| transformers' own: {why} | {count} |" for why, count in counts.most_common()]
    return "\n".join([*lines, f"| all | {served + raised + counts.total()} |"])


def _file(name: str) -> str:
    return name.partition("::")[0].removeprefix("tests/").removesuffix(".py")


def _last_line(test: dict[str, Any]) -> str:
    return (test.get("error") or "not run").strip().splitlines()[-1][:160]
