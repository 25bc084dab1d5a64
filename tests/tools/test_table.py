"""The text table of doctor, audit and the demo."""

from tinyspec.tools.terminal import table


def test_columns_are_aligned():
    rows = [("name", "count", "note"), ("a", 1000, "x"), ("longer", 7, "")]
    assert table(rows, right=(1,)) == [
        "name    count  note",
        "a        1000  x",
        "longer      7",
    ]
    assert table(rows)[1] == "a       1000   x"


def test_one_row():
    assert table([("a", "b")]) == ["a  b"]
