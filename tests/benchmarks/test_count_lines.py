"""What counts as a line of code."""

from __future__ import annotations

from benchmarks.count_lines import code_lines

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
