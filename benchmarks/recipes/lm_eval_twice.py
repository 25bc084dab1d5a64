"""A multiple-choice task of lm-eval in batches of 1, 7 and 32: by the harness's ``hf`` its scores
hang on the batch size, by ``tinyspec`` they do not.

    python benchmarks/recipes/lm_eval_twice.py

The bundled model reads a few stories in bfloat16. The harness's own command line with that model is
``python -m tinyspec.integrations.lm_eval run --model tinyspec``. Needs ``pip install lm-eval[hf]``.
"""

from __future__ import annotations

import json
import tempfile
import warnings
from pathlib import Path

import lm_eval

import tinyspec.integrations.lm_eval  # noqa: F401  registers the name
from tinyspec.tools.demo import BUNDLED

ANIMALS = ("fox", "dog", "bee", "small green turtle", "bird", "cat", "frog", "grey mouse")
ENDS = [" was happy.", " slept until the next morning.", " ran home."]
BATCHES = (1, 7, 32)
TASK = {"task": "stories", "dataset_path": "json", "test_split": "test", "target_delimiter": ""}
TASK |= {"output_type": "multiple_choice", "doc_to_choice": ENDS}
TASK |= {"doc_to_text": "{{told}}", "doc_to_target": "right"}


def evaluate(model: str, batch_size: int, folder: str) -> tuple[float, float]:
    """Accuracy, and the log-likelihood of all answers together."""
    files = {"data_files": {"test": f"{folder}/stories.jsonl"}, "cache_dir": folder}
    given = {"pretrained": str(BUNDLED), "dtype": "bfloat16"}
    settings = {"batch_size": batch_size, "device": "cpu", "bootstrap_iters": 0}
    task = {**TASK, "dataset_kwargs": files}
    found = lm_eval.simple_evaluate(model=model, model_args=given, tasks=[task], **settings)
    answers = [answer for s in found["samples"]["stories"] for answer in s["filtered_resps"]]
    return found["results"]["stories"]["acc,none"], sum(value for value, _ in answers)


def main() -> None:
    warnings.filterwarnings("ignore")
    stories = [
        {"told": f"One {'very ' * n}dark day a {animal} woke up. The {animal}", "right": n % 3}
        for n, animal in enumerate(ANIMALS)
    ]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "stories.jsonl").write_text("\n".join(map(json.dumps, stories)))
        scores = {
            model: [evaluate(model, size, folder) for size in BATCHES]
            for model in ("hf", "tinyspec")
        }
    for model, found in scores.items():
        print(model)
        for size, (accuracy, total) in zip(BATCHES, found, strict=True):
            print(f"  batch size {size:2}: {100 * accuracy:.1f} % right, {total!r} nats in all")
    assert len(set(scores["hf"])) > 1, "a control: hf's scores hang on the batch size"
    assert len(set(scores["tinyspec"])) == 1, "the scores hang on the batch size"
    print("  the same, to the last digit")


if __name__ == "__main__":
    main()
