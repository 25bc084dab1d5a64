"""What counts as a line of code, and how far one prompt travels: no farther than was recorded."""

from __future__ import annotations

from benchmarks.count_files import WINGS, count, wing
from benchmarks.count_lines import code_lines
from tinyspec.engine import engine
from tinyspec.kernels.twins import sample

# Of a plain prompt: to lower with the numbers.
MOST_FILES, MOST_UPWARDS = 54, 3


def test_one_prompt():
    found = count(deterministic=False)
    assert len(found.upwards) <= MOST_UPWARDS, sorted(found.upwards)
    assert len(found.files) <= MOST_FILES, sorted(found.files)
    # Control: the way is seen from its one end to the other.
    assert {engine.__file__, sample.__file__} <= found.files


def test_wings():
    assert WINGS[wing(engine.__file__)] == "engine"
    assert WINGS[wing(sample.__file__)] == "kernels"
    assert wing(engine.__file__.replace("engine/engine", "config")) is None


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
