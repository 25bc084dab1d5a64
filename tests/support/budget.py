"""Which tests run by default, how many of those that last by choice, and why others do not.

Random use, long runs and crosses of many parameters carry the mark ``slow(family, seconds)``:
``seconds`` is what one of them takes on one core. ``pytest -m slow`` runs all of them. With
``--minutes M`` every family has its share of M core-minutes, and as many of its tests run as fit
into it, drawn by ``--seed``. Their marks decide, not a clock: the same options select the same
tests on every machine. Random ones then have as many cases as fit, so a large M never ends:
for all tests leave it out.

``crossed(seconds)`` marks a test with many combinations of parameters. By default those run that
show every value of every parameter at least once; the others are ``slow("crosses", seconds)``.

A test that asks for ``case_seed`` is random: ``slow(family, seconds, cases=n)`` runs it n times, or
as often as the family's share allows, each time with another seed.
"""

import random
from collections import Counter
from collections.abc import Iterable
from itertools import combinations
from typing import Any

import pytest

# Families of lasting tests: parts of the minutes that each has.
SHARES = {
    "clients": 1,  # libraries of others against a server, where they are installed
    "compile grid": 3,  # kernels for GPUs that are not here
    "crosses": 3,  # combinations of parameters
    "fuzz": 3,  # everything at random, with influences from outside
    "fuzz controls": 1,  # that the fuzzer finds what it should
    "installation": 1,  # an installed wheel
    "environments": 1,  # fresh processes with other variables, allocations and neighbours
    "model types": 2,  # every causal LM of transformers
    "random mixes": 2,  # requests at random, and all that must not change their bits
    "random use": 2,  # one engine or model under random calls
    "server": 4,  # two hundred clients, for two minutes
    "soak": 1,  # everything at once, for minutes
    "thinking": 1,  # a small model is trained
}
DEFAULT_SEED = "0"


def add_options(parser: pytest.Parser) -> None:
    """``--minutes``, ``--share`` and ``--seed``."""
    group = parser.getgroup("tests that last by choice")
    group.addoption(
        "--minutes",
        type=float,
        help="core-minutes for the slow tests: a sample of each family that fits its share "
        "(default: all of them)",
    )
    group.addoption(
        "--share", type=float, default=1.0, help="run this part of the tests, drawn by --seed"
    )
    group.addoption(
        "--seed",
        default=DEFAULT_SEED,
        help="draws the sample and the random tests, for instance a commit",
    )
    group.addoption(
        "--soak-minutes",
        type=float,
        help="how long the soak runs (default: 10; with --minutes a third of one)",
    )


def quota(config: pytest.Config, family: str) -> float | None:
    """Seconds that a family has; None: no limit."""
    minutes = config.getoption("--minutes")
    return None if minutes is None else 60 * minutes * SHARES[family] / sum(SHARES.values())


def give_cases(metafunc: pytest.Metafunc) -> None:
    """Seeds for a random test: as many as its mark says, or as its family's share allows."""
    if "case_seed" not in metafunc.fixturenames:
        return
    mark = metafunc.definition.get_closest_marker("slow")
    assert mark is not None, f"{metafunc.definition.nodeid} asks for case_seed and is not slow"
    seed = metafunc.config.getoption("--seed")
    count = mark.kwargs["cases"]
    allowed = quota(metafunc.config, mark.args[0])
    if allowed is not None:
        count = max(1, int(allowed / mark.args[1]))
    # Numbers for ``random``, NumPy and hypothesis alike.
    seeds = [random.Random(f"{seed} {n}").randrange(2**32) for n in range(count)]
    metafunc.parametrize("case_seed", seeds, ids=[f"case{n}" for n in range(count)])


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what is slow among the crossed tests, and leave out what no share pays for."""
    by_function: dict[str, list[pytest.Item]] = {}
    for item in items:
        if (mark := item.get_closest_marker("crossed")) and not _set_apart(item):
            by_function.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for crossed in by_function.values():
        shown = covering(crossed)
        for item in crossed:
            if item not in shown:
                mark = item.get_closest_marker("crossed")
                item.add_marker(pytest.mark.slow("crosses", *mark.args))
    for item in items:
        if mark := item.get_closest_marker("slow"):
            family, seconds = mark.args
            assert family in SHARES and seconds > 0, f"{item.nodeid}: {mark}"
    share, seed = config.getoption("--share"), config.getoption("--seed")
    kept = {i for i in items if random.Random(f"{seed} {i.nodeid}").random() < share}
    if config.getoption("--minutes") is not None:
        slow = [item for item in items if item.get_closest_marker("slow")]
        kept -= set(slow) - sampled(config, slow)
    if left_out := [item for item in items if item not in kept]:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item in kept]


def first(count: int, values: Iterable[Any], seconds: float) -> list[Any]:
    """Parameters of a test: the first ``count`` of ``values``; the others are slow."""
    slow = pytest.mark.slow("crosses", seconds)
    return [v if n < count else pytest.param(v, marks=slow) for n, v in enumerate(values)]


def _set_apart(item: pytest.Item) -> bool:
    """Whether a combination is slow by a mark of its own, or skipped here."""
    return any(item.get_closest_marker(name) for name in ("slow", "skip"))


def covering(items: list[pytest.Item]) -> set[pytest.Item]:
    """A few of ``items``, combinations of parameters, in which every value stands at least once."""
    items = sorted(items, key=lambda item: item.nodeid)
    # By identity: some values are dicts, and every combination holds the same objects.
    values = {
        item: {(name, id(value)) for name, value in item.callspec.params.items()} for item in items
    }
    pairs = {item: set(combinations(sorted(values[item]), 2)) for item in items}
    shown: Counter[object] = Counter()
    found = set()

    def worth(item: pytest.Item) -> tuple[int, int, int]:
        """Values that no other has shown, then pairs of them, then values that few have shown."""
        often = sum(shown[value] for value in values[item])
        return len(values[item] - shown.keys()), len(pairs[item] - shown.keys()), -often

    while any(values[item] - shown.keys() for item in items):
        best = max(items, key=worth)
        found.add(best)
        shown.update([*values[best], *pairs[best]])
    return found


def sampled(config: pytest.Config, items: list[pytest.Item]) -> set[pytest.Item]:
    """Of each family as many of ``items`` as its share pays for, at least one of each family."""
    order = sorted(items, key=lambda item: item.nodeid)
    random.Random(config.getoption("--seed")).shuffle(order)
    spent: dict[str, float] = {}
    kept = set()
    for item in order:
        family, seconds = item.get_closest_marker("slow").args
        if family not in spent or spent[family] + seconds <= quota(config, family):
            spent[family] = spent.get(family, 0.0) + seconds
            kept.add(item)
    return kept


def reasons(skipped: Iterable[Any]) -> list[str]:
    """How many of these reports are of tests skipped for each reason; the most common first."""
    found = Counter(report.longrepr[-1].removeprefix("Skipped: ") for report in skipped)
    return [f"{count} skipped: {reason}" for reason, count in found.most_common()]
