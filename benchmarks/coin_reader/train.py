"""``python -m benchmarks.coin_reader.train parity``: trains a small model that thinks.

Then shows how often it is right, also on longer prompts than it was trained on.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

import torch
from tqdm import tqdm

from benchmarks.coin_reader.tasks import TASKS
from benchmarks.coin_reader.training import Loss, Mode, Run, Training

# What each task needs to be learnt.
RUNS = {
    "coin": Run(
        task="coin", steps=800, tokens=4096, window=None, filler=0.9, least=0, chunk_size=4
    ),
    "parity": Run(task="parity", steps=400),
    "variables": Run(task="variables", steps=1200),
}
EVALUATED = (1, 5, 10, 20, 40, 100)
# Parts of the sentences that change nothing, for which "coin" is evaluated.
SHARES = (0.0, 0.5, 0.7, 0.85)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0; 2 for bad arguments."""
    parser = _parser()
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    if options.resume and options.output is None:
        parser.error("--resume needs the folder to go on from: --output")
    try:
        training = Training(_run(options))
        if options.resume:
            training.resume(options.output)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    _train(training, options.output, options.every)
    run = training.run
    print(f"{run.task}, {run.mode}: held-out prompts, {options.count} each")
    if run.task == "coin":
        kinds = [(f"filler {share:4}", range(run.operations + 1), share) for share in SHARES]
    else:
        kinds = [(f"{n:5} operations", (n,), None) for n in options.evaluate]
    for name, operations, share in kinds:
        answers, thoughts = training.accuracy(operations, options.count, share)
        print(f"{name}  answers {answers:.3f}  thoughts {thoughts:.4f}", flush=True)
    return 0


def _train(training: Training, output: Path | None, every: int) -> None:
    run = training.run
    with tqdm(total=run.steps, initial=training.done, unit="step", file=sys.stderr) as bar:
        while training.done < run.steps:
            loss = training.step()
            bar.update()
            bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
            if output is not None and (training.done % every == 0 or training.done == run.steps):
                training.save(output)


def _run(options: argparse.Namespace) -> Run:
    run = RUNS[options.task]
    names = ("mode", "loss", "steps", "seed", "operations", "filler")
    given = {name: getattr(options, name) for name in names}
    given = {name: value for name, value in given.items() if value is not None}
    if options.window is not None:
        given["window"] = options.window or None
    return replace(run, **given)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m benchmarks.coin_reader.train", description=__doc__)
    parser.add_argument("task", choices=list(TASKS))
    parser.add_argument(
        "--mode",
        choices=get_args(Mode),
        help="thoughts (default), none: the answer alone, chain: the states written out before it, "
        "retold: these and the sentences that they follow from",
    )
    parser.add_argument(
        "--loss",
        choices=get_args(Loss),
        help="of thoughts: the sum over a prompt's chunks (default), or the mean over all tokens",
    )
    parser.add_argument("--steps", type=int, help="default: what the task needs")
    parser.add_argument("--seed", type=int, help="of weights and examples (default: 0)")
    parser.add_argument(
        "--operations", type=int, help="most operations of a training example (default: 10)"
    )
    parser.add_argument(
        "--filler", type=float, help="part of the sentences that change nothing (default: 0)"
    )
    parser.add_argument(
        "--window", type=int, help="of attention, in tokens; 0: full attention (default: 16)"
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", type=Path, help="folder for the model and its checkpoint")
    parser.add_argument("--every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on from the folder's checkpoint")
    parser.add_argument("--evaluate", type=int, nargs="*", default=EVALUATED, metavar="OPERATIONS")
    parser.add_argument("--count", type=int, default=500, help="prompts for each (default: 500)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
