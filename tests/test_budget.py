"""What a run selects, and what it says of the tests that it skips."""

from types import SimpleNamespace
from unittest.mock import Mock

from tests.support import budget


def test_skips_are_counted_by_reason():
    told = [("a.py", 3, f"Skipped: {why}") for why in ("no GPU", "no ray", "no GPU")]
    found = budget.reasons(SimpleNamespace(longrepr=each) for each in told)
    assert found == ["2 skipped: no GPU", "1 skipped: no ray"]


def test_a_share_is_drawn_by_the_seed():
    def drawn(seed, share=0.5):
        options = {"--share": share, "--seed": seed, "--minutes": None}
        hook, gone = SimpleNamespace(pytest_deselected=lambda items: gone.extend(items)), []
        items = [Mock(nodeid=n, **{"get_closest_marker.return_value": None}) for n in range(200)]
        budget.select(SimpleNamespace(getoption=options.get, hook=hook), items)
        assert len(items) + len(gone) == 200
        return [item.nodeid for item in items]

    assert drawn("a") == drawn("a") != drawn("b") and 60 < len(drawn("a")) < 140
    assert drawn("a", 1.0) == [*range(200)]
