"""What counts as a line of code."""

from __future__ import annotations

from benchmarks.count_lines import code_lines, main

SOURCE = '''"""A docstring
over two lines."""

import os  # a comment behind code


# a comment alone
class Thing:
    """One line."""

    text = """two lines

    and a blank one, all in a string"""

    def run(
        self,
    ) -> None:
        """Three
        lines.
        """
        return (
            # a comment inside
            os.sep
        )
'''


def test_code_lines():
    # import, class, text (3), def (3), return (3).
    assert code_lines(SOURCE) == 11


def test_table(tmp_path, capsys):
    (tmp_path / "wing").mkdir()
    (tmp_path / "wing" / "one.py").write_text(SOURCE)
    (tmp_path / "two.py").write_text("x = 1\n")
    assert main([str(tmp_path)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1:] == [
        [str(tmp_path), "1", "1", "1"],
        [str(tmp_path / "wing"), "1", "11", "11"],
        ["total", "2", "12"],
    ]
