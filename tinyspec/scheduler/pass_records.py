"""What a pass runs, as its record says it before it has run. Host only."""

from __future__ import annotations

import numpy as np

from tinyspec.scheduler.admission import Admission
from tinyspec.scheduler.passes import KINDS, Pass, PassRecord


def record_of(work_pass: Pass, admission: Admission) -> PassRecord:
    """The record of a pass that begins."""
    works, running = work_pass.works, len(work_pass.table)
    rows = np.bincount(works.kinds, works.counts, len(KINDS)).astype(int).tolist()
    sequences = np.bincount(works.kinds, minlength=len(KINDS)).tolist()
    return PassRecord(
        number=0,
        bucket=work_pass.bucket,
        canonical=work_pass.canonical,
        rows=dict(zip(KINDS, rows, strict=True)),
        sequences={kind: n for kind, n in zip(KINDS, sequences, strict=True) if n},
        running=running,
        waiting=len(admission.waiting),
        left_out=running - len(works),
        pages_held=admission.pool.num_held,
        way=work_pass.way,
    )
