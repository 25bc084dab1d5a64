"""How far one prompt travels: no farther than was recorded."""

from benchmarks.count_files import count
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
