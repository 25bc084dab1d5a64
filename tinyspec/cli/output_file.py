"""JSON lines of finished requests in a file, which another run may continue."""

from __future__ import annotations

from pathlib import Path

from tinyspec.cli.inputs import NO_OUTPUT, no_output
from tinyspec.cli.jobs import Job
from tinyspec.errors import refuse
from tinyspec.outputs import RequestOutput


class OutputFile:
    """Holds one output a line, in the order in which they finished; each has the id of its job.

    kept: outputs that are there already, by the id of their job. A last line that was cut off is
    dropped.

    Raises ValueError for a file that exists unless ``resume``, and for one whose outputs are not
    those of ``jobs``: their place in the input, prompts and parameters.
    """

    def __init__(self, path: str, jobs: list[Job], resume: bool):
        self._path = Path(path)
        self.kept: dict[str, RequestOutput] = {}
        there = self._path.exists() and self._path.stat().st_size > 0
        if there and not resume:
            raise refuse("--output", path, "a file that does not exist; --resume continues one")
        self._whole = 0
        if there:
            self._read({job.job_id: job for job in jobs}, {job.place_id: job for job in jobs})

    def _read(self, by_id: dict[str, Job], by_place: dict[str, Job]) -> None:
        data = self._path.read_bytes()
        self._whole = data.rfind(b"\n") + 1
        for number, line in enumerate(data[: self._whole].split(b"\n")[:-1], start=1):
            place = f"{self._path}, line {number}"
            try:
                output = RequestOutput.from_json(line.decode())
                name = str(output.request_id)
            except NO_OUTPUT as error:
                raise ValueError(no_output(place, error)) from error
            job = by_place.get(name.rpartition("-")[0])
            if job is None:
                raise ValueError(f"{place}: the input has nothing at {name!r}; use another file")
            if name not in by_id:
                changed = "prompt or parameters changed since it was written; use another file"
                raise ValueError(f"{place}: {job.place}: {changed}")
            if name in self.kept:
                raise ValueError(f"{place}: {job.place} stands twice in this file")
            self.kept[name] = output

    def open(self) -> None:
        """Drop a last line that was cut off; from now on ``write`` appends."""
        self._file = self._path.open("ab", buffering=0)
        self._file.truncate(self._whole)

    def write(self, output: RequestOutput) -> None:
        """Append an output at once: what is written is there whatever happens later."""
        self._file.write(output.to_json().encode() + b"\n")

    def close(self) -> None:
        self._file.close()
