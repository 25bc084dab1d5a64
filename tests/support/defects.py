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
BATCH = ("tests/runner/test_batch.py", "tests/engine/test_overlap.py")
ATTENTION = ("tests/kernels/test_paged_attention.py",)


class Defect(NamedTuple):
    """sound, planted: lines of the file, which are there once. tests: that are to find it."""

    name: str
    path: str
    sound: str
    planted: str
    tests: tuple[str, ...]


DEFECTS = [
    Defect(
        "a seed's key is rounded",
        "kernels/sample.py",
        "k1 = ((key >> 32) & 0xFFFFFFFF).to(tl.uint32)",
        "k1 = ((key >> 32) & 0xFFFFFFFF).to(tl.float32).to(tl.uint32)",
        ("tests/kernels/test_sample.py",),
    ),
    Defect(
        "ties go to the highest token",
        "kernels/sample.py",
        "token = tl.min(tl.where(best == top, place, vocab_size), axis=0).to(tl.int64)",
        "token = tl.max(tl.where(best == top, place, -1), axis=0).to(tl.int64)",
        ("tests/kernels/test_sample.py",),
    ),
    Defect(
        "a page table is sent with new pages only",
        "runner/batch.py",
        "if len(packed.page_table):",
        "if len(packed.page_table) and packed.fresh:",
        BATCH,
    ),
    Defect(
        "tokens of the pass before are not sent",
        "runner/batch.py",
        "torch.clamp(before, min=0, out=self._memory[self._behind :][: len(before)])",
        "pass",
        BATCH,
    ),
    Defect(
        "tokens of the pass before are another row's",
        "runner/batch.py",
        "sources[newest[0]] = newest[1] + self._behind",
        "sources[newest[0]] = np.maximum(newest[1] - 1, 0) + self._behind",
        BATCH,
    ),
    Defect(
        "padding has a slot",
        "runner/batch.py",
        "slots[total:] = -1",
        "slots[total:] = 0",
        (*BATCH, "tests/determinism/test_triton_path.py"),
    ),
    Defect(
        "padding is the last segment's",
        "runner/batch.py",
        "first_rows[count + 1 :] = works.cu_rows, total",
        "first_rows[count + 1 :] = works.cu_rows, bucket",
        BATCH,
    ),
    Defect(
        "an address has moved",
        "runner/graphs.py",
        "captured is not None and captured.addresses != addresses",
        "False",
        ("tests/runner/test_graphs.py",),
    ),
    Defect(
        "canonical passes replay other graphs",
        "runner/graphs.py",
        "captured = self._captured.get(shape)",
        "captured = self._captured.get(shape := tuple(shape)[:3])",
        ("tests/runner/test_graphs.py",),
    ),
    Defect(
        "the caller's work is not waited for",
        "model/torch_state.py",
        "own.wait_stream(caller)",
        "pass",
        ("tests/engine/test_streams.py",),
    ),
    Defect(
        "results are read before they arrive",
        "runner/device_queue.py",
        "self._arrived.synchronize()",
        "pass",
        ("tests/runner/test_device_queue.py",),
    ),
    Defect(
        "a draft behind the last counts",
        "kernels/accept.py",
        "(place >= draft_len)",
        "(place > draft_len)",
        ("tests/kernels/test_accept.py",),
    ),
    Defect(
        "a page too many is freed",
        "kernels/accept.py",
        "drafts_left + page_size - 1) // page_size",
        "drafts_left + page_size - 2) // page_size",
        ("tests/kernels/test_accept.py",),
    ),
    Defect(
        "a window has a key too many",
        "kernels/attention_kernel.py",
        "(key[None, :] >= row_lowest[:, None])",
        "(key[None, :] >= row_lowest[:, None] - 1)",
        ATTENTION,
    ),
    Defect(
        "pages are those of the tile before",
        "kernels/attention_kernel.py",
        "next_key += BLOCK_N",
        "next_key += 0",
        ATTENTION,
    ),
    Defect(
        "splits are added to what was written last",
        "kernels/attention_kernel.py",
        "earlier = state + (1 - split % 2) * (BLOCK_M * D_PAD)",
        "earlier = state + split % 2 * (BLOCK_M * D_PAD)",
        ATTENTION,
    ),
    Defect(
        "slot 0 is padding",
        "kernels/kv_write.py",
        "if slot >= 0:",
        "if slot > 0:",
        ("tests/kernels/test_kv_write.py",),
    ),
    Defect(
        "a tile of rows has the expert before",
        "kernels/experts.py",
        "(upto <= tile)",
        "(upto < tile)",
        ("tests/kernels/test_experts.py",),
    ),
    Defect(
        "experts are added as they were chosen",
        "kernels/experts.py",
        "pair = row * slots + tl.sum(tl.where(rank == turn, slot, 0))",
        "pair = row * slots + turn",
        ("tests/kernels/test_experts.py",),
    ),
    Defect(
        "a state is kept a token too late",
        "kernels/recurrent.py",
        "if position + 1 == to:",
        "if position == to:",
        ("tests/kernels/test_recurrent.py",),
    ),
    Defect(
        "the first row of a pass is read from the ring",
        "kernels/recurrent.py",
        "position < tl.minimum(start, end)",
        "position < tl.minimum(start + 1, end)",
        ("tests/kernels/test_recurrent.py",),
    ),
]


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
    chosen = [d for d in DEFECTS if not names or any(name in d.name for name in names)]
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
