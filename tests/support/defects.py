"""Defects of what only a GPU runs, planted one at a time in a copy of the tree: does a test fail?

    python -m tests.support.defects [PART OF A NAME ...]

prints a line for each, and ends with 1 where one was not found. 20 minutes on one core.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Defect(NamedTuple):
    """sound, planted: lines of the file, which are there once. tests: that are to find it."""

    name: str
    path: str
    sound: str
    planted: str
    tests: list[str]


# A file, and the files of tests that are to find its defects; of each a name, what stands there (-)
# and what is planted (+).
PLANTED = """
kernels/sample.py: kernels/test_sample.py
a seed's key is rounded
- k1 = ((key >> 32) & 0xFFFFFFFF).to(tl.uint32)
+ k1 = ((key >> 32) & 0xFFFFFFFF).to(tl.float32).to(tl.uint32)
ties go to the highest token
- token = tl.min(tl.where(best == top, place, vocab_size), axis=0).to(tl.int64)
+ token = tl.max(tl.where(best == top, place, -1), axis=0).to(tl.int64)

runner/batch.py: runner/test_batch.py engine/test_overlap.py
the page table of one sequence is not sent
- if len(step.page_table):
+ if len(step.page_table) > 1:
tokens of the pass before are not sent
- torch.clamp(before, min=0, out=self._memory[self._behind :][: len(before)])
+ pass
tokens of the pass before are another row's
- sources[newest[0]] = newest[1] + self._behind
+ sources[newest[0]] = np.maximum(newest[1] - 1, 0) + self._behind
padding is the last segment's
- first_rows[count + 1 :] = step.cu_rows, total
+ first_rows[count + 1 :] = step.cu_rows, bucket

runner/batch.py: runner/test_batch.py engine/test_overlap.py determinism/test_triton_path.py
padding has a slot
- slots[total:] = -1
+ slots[total:] = 0

runner/graphs.py: runner/test_graphs.py
an address has moved
- captured is not None and captured.addresses != addresses
+ False
canonical passes replay other graphs
- captured = self._captured.get(shape)
+ captured = self._captured.get(shape := tuple(shape)[:3])

model/torch_state.py: engine/test_streams.py
the caller's work is not waited for
- own.wait_stream(caller)
+ pass

runner/device_queue.py: runner/test_device_queue.py
results are read before they arrive
- self._arrived.synchronize()
+ pass

kernels/accept.py: kernels/test_accept.py
a draft behind the last counts
- (place >= draft_len)
+ (place > draft_len)
a page too many is freed
- drafts_left + page_size - 1) // page_size
+ drafts_left + page_size - 2) // page_size

kernels/attention_kernel.py: kernels/test_paged_attention.py
a window has a key too many
- (key[None, :] >= row_lowest[:, None])
+ (key[None, :] >= row_lowest[:, None] - 1)
pages are those of the tile before
- next_key += BLOCK_N
+ next_key += 0
splits are added to what was written last
- earlier = state + (1 - split % 2) * (BLOCK_M * D_PAD)
+ earlier = state + split % 2 * (BLOCK_M * D_PAD)

kernels/kv_write.py: kernels/test_kv_write.py
slot 0 is padding
- if slot >= 0:
+ if slot > 0:

kernels/experts.py: kernels/test_experts.py
a tile of rows has the expert before
- (upto <= tile)
+ (upto < tile)
experts are added as they were chosen
- pair = row * slots + tl.sum(tl.where(rank == turn, slot, 0))
+ pair = row * slots + turn

kernels/recurrent.py: kernels/test_recurrent.py
a state is kept a token too late
- if position + 1 == to:
+ if position == to:
the first row of a pass is read from the ring
- position < tl.minimum(start, end)
+ position < tl.minimum(start + 1, end)
"""


def defects() -> list[Defect]:
    """Those of ``PLANTED``."""
    found = []
    for part in PLANTED.strip().split("\n\n"):
        head, *lines = part.splitlines()
        path, _, tests = head.partition(": ")
        paths = [f"tests/{name}" for name in tests.split()]
        for name, sound, planted in zip(lines[::3], lines[1::3], lines[2::3], strict=True):
            assert (sound[:2], planted[:2]) == ("- ", "+ "), name
            found.append(Defect(name, path, sound[2:], planted[2:], paths))
    return found


def found(defect: Defect, tree: Path) -> str | None:
    """The test that fails with it, or what ended the tests. Raises ValueError where its line is not
    there once."""
    path = tree / "tinyspec" / defect.path
    sound = path.read_text()
    if sound.count(defect.sound) != 1:
        raise ValueError(f"{defect.path} has {sound.count(defect.sound)} times {defect.sound!r}")
    path.write_text(sound.replace(defect.sound, defect.planted))
    every = ("-m", "slow or not slow", "--minutes", "100")
    command = [sys.executable, "-m", "pytest", "-x", "-q", *every, *defect.tests]
    run = subprocess.run(command, cwd=tree, capture_output=True, text=True)
    path.write_text(sound)
    ended = f"signal {-run.returncode} ended the tests" if run.returncode < 0 else None
    said = (line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR")))
    return next(said, ended)


def main(names: list[str]) -> int:
    """Plant those whose names have one of these parts, or all."""
    chosen = [d for d in defects() if not names or any(name in d.name for name in names)]
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".git", "__pycache__", "*.pyc"))
        missed = 0
        for defect in chosen:
            test = found(defect, tree)
            missed += test is None
            print(f"{defect.name}: {test or 'NOT FOUND'}", flush=True)
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
