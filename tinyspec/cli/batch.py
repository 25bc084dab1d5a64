"""``tinyspec batch``: a file of requests through engines on Ray, into one file in its order."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinyspec.cli import common
from tinyspec.errors import refuse

# Of the local cluster beyond the actors': for Ray's own tasks, which read, filter and write.
SPARE_CPUS = 3
# Parts of the fingerprints of those requests alone whose tokens depend on the tokenizer.
OF_TEXT = ("tokenizer", "text", "spelling", "llguidance", "max_lexer_states")


def add_batch(parser: ArgumentParser) -> None:
    parser.add_argument("file", metavar="IN", help="JSON lines; - is standard input")
    parser.add_argument("folder", metavar="OUT", help="a new folder, or one to continue")
    for name, default, text in (("actors", 1, "engines"), ("threads", 1, "of each engine")):
        text += " (default: %(default)s)"
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=text)
    parser.add_argument("--rows", type=int, default=64, metavar="N", help="of a block (64)")
    parser.add_argument("--address", help="of a Ray cluster (default: this machine)")
    common.add_options(parser, *common.MODEL)
    common.add_sampling(parser)


def batch(options: Namespace) -> int:
    """A file of requests on Ray: one command on a laptop or a cluster.

    Each line is a JSON object: a prompt (text, token ids or chat messages), an
    id (default: the line's number) and any sampling parameters, which override
    those given as options; --seed is a base that is mixed with the id. Bad
    lines and ids that come twice are named before anything runs.
    OUT/outputs.jsonl has an output a line, in the order of IN, with
    log-probabilities and without stats; with --deterministic its bytes do not
    depend on --actors, --rows, or what died. The same command continues. On a
    cluster every node must see OUT and the model, and have tinyspec[ray].

    Exit status 1 if a line has an error in place of a whole output, 2 for bad
    input, 130 after Ctrl-C.

    example:
      tinyspec batch requests.jsonl results --actors 2 --deterministic
    """
    for name in ("actors", "threads", "rows"):
        if getattr(options, name) < 1:
            raise refuse(f"--{name}", getattr(options, name), "at least 1")
    shared = {"logprobs": True, **common.given(options)}
    seed = shared.pop("seed", 0)
    jobs = common.jobs_of(common.read_lines(options.file), shared, has_id=True)
    if not jobs:
        raise refuse("IN", options.file, "a file with at least one request")
    requests = [
        json.dumps({"id": job.row_id, "prompt": job.prompt, **job.params.to_dict()}) for job in jobs
    ]
    import ray

    import tinyspec.integrations.ray  # noqa: F401

    names = ("threads", *common.LOADING)
    of_all = {"model": model_of(options), "seed": seed, **{n: getattr(options, n) for n in names}}
    results = Results(Path(options.folder).resolve())
    if results.begin(requests, of_all):
        try:
            run(options, seed, results)
        except ray.exceptions.RayError as error:
            # Around what an actor raised stand its causes, Ray's own exceptions and advice.
            told = re.findall(r"(?m)^(?!ray\.)[\w.]+: .+", str(error))
            raise ValueError(told[-1] if told else str(error)) from error
        results.merge(len(requests))
    if errors := results.errors():
        common.say(f"{len(errors)} completions were not finished, the first: {errors[0]}")
    return int(bool(errors))


def model_of(options: Namespace) -> str:
    """The model asked for; a folder by a path that holds in every process."""
    name = common.model_name(options)
    return str(Path(name).resolve()) if Path(name).is_dir() else name


def run(options: Namespace, seed: int, results: Results) -> None:
    """Compute what ``results`` lacks, and write it there."""
    import ray
    from ray.data import ActorPoolStrategy
    from ray.data.checkpoint import CheckpointConfig

    from tinyspec.integrations.ray import Generate, Job

    asked = options.actors * options.threads
    if not ray.is_initialized():
        local = {"address": "local", "num_cpus": asked + SPARE_CPUS, "include_dashboard": False}
        ray.init(**({"address": options.address} if options.address else local))
    there = ray.cluster_resources()
    if there.get("CPU", 0) <= asked:
        allowed = f"with {options.threads} threads each fewer than {there.get('CPU', 0):.0f} CPUs"
        raise refuse("--actors", options.actors, allowed)
    gpus = int(options.device != "cpu" and there.get("GPU", 0) >= options.actors)
    if options.device.startswith("cuda") and not gpus:
        allowed = f"with --device {options.device} at most {there.get('GPU', 0):.0f}, a GPU each"
        raise refuse("--actors", options.actors, allowed)
    loading = common.given(options, common.LOADING)
    if options.device == "auto":
        loading["device"] = "cuda" if gpus else "cpu"
    how = {"threads": options.threads, "fingerprint": results.fingerprint_parts()}
    job = Job(model=model_of(options), seed=seed, loading=loading, **how)
    folder = results.folder
    checkpoint = CheckpointConfig(
        "row", str(folder / "checkpoint"), delete_checkpoint_on_success=False
    )
    rows = ray.data.read_parquet(str(folder / "requests.parquet"))
    rows.context.checkpoint_config = checkpoint
    blocks = rows.repartition(target_num_rows_per_block=options.rows)
    blocks.map_batches(
        Generate,
        fn_constructor_args=[job],
        batch_size=None,
        batch_format="pyarrow",
        compute=ActorPoolStrategy(size=options.actors),
        num_cpus=options.threads,
        num_gpus=gpus,
    ).write_parquet(str(folder / "parts"))


@dataclass(frozen=True)
class Results:
    """A folder: what is computed so far, and at the end one file."""

    folder: Path

    def begin(self, requests: list[str], of_all: dict[str, Any]) -> bool:
        """Whether anything is left to do; raises ValueError for the folder of another job."""
        from pyarrow import parquet, table

        digest = hashlib.sha256("\n".join(requests).encode()).hexdigest()
        job, file = {**of_all, "requests": digest}, self.folder / "job.json"
        ended = (self.folder / "outputs.jsonl").exists()
        self.folder.mkdir(parents=True, exist_ok=True)
        if file.exists():
            begun, other = json.loads(file.read_bytes()), ""
            if ended or next(self._computed(), None):
                other = ", ".join(name for name in job if begun.get(name) != job[name])
            if other:
                raise refuse("OUT", str(self.folder), f"a new folder: it began with other {other}")
        elif any(self.folder.iterdir()):
            raise refuse("OUT", str(self.folder), "a new folder, or one that this command began")
        self._write("job.json", [json.dumps(job)])
        if ended:
            return False
        columns = {"row": range(len(requests)), "request": requests}
        parquet.write_table(table(columns), self.folder / "requests.parquet")
        return True

    def _write(self, name: str, lines: list[str]) -> None:
        """A whole file or none."""
        part = self.folder / f"{name}.part"
        part.write_bytes("".join(f"{line}\n" for line in lines).encode())
        os.replace(part, self.folder / name)

    def _computed(self) -> Iterator[dict[str, Any]]:
        """The rows of all blocks in the checkpoint; the files of others may be cut off."""
        from pyarrow import parquet

        for block in sorted((self.folder / "checkpoint").glob("*.parquet")):
            for path in (self.folder / "parts").glob(f"{block.stem}-*.parquet"):
                yield from parquet.read_table(path, columns=["row", "output"]).to_pylist()

    def fingerprint_parts(self) -> dict[str, Any] | None:
        """Of the engines that computed what is there; None where nothing is."""
        if (first := next(self._computed(), None)) is None:
            return None
        parts = json.loads(first["output"])["fingerprint_parts"]
        return {name: part for name, part in parts.items() if name not in OF_TEXT}

    def merge(self, count: int) -> None:
        """Write the outputs of all rows in their order, and drop the rest."""
        lines = {row["row"]: row["output"] for row in self._computed()}
        if missing := count - len(lines):
            raise ValueError(f"{missing} of {count} rows are missing: the same command continues")
        self._write("outputs.jsonl", [lines[row] for row in range(count)])
        for name in ("parts", "checkpoint"):
            shutil.rmtree(self.folder / name)
        (self.folder / "requests.parquet").unlink()

    def errors(self) -> list[str]:
        """Of completions that were not finished, in their order."""
        outputs = map(json.loads, (self.folder / "outputs.jsonl").read_bytes().splitlines())
        found = (one["error"] for output in outputs for one in output["completions"])
        return [error for error in found if error is not None]
