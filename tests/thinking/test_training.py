"""Training: the data, a small run beside its control, checkpoints, transformers' Trainer."""

from dataclasses import replace
from random import Random

import pytest
import torch
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers import Trainer, TrainingArguments

from benchmarks.coin_reader import train
from benchmarks.coin_reader.tasks import SHARED, TASKS, is_held_out
from benchmarks.coin_reader.training import Run, Training
from tinyspec.thinking.model import IGNORED, ThinkingModel

SMALL = Run(steps=4, tokens=200, hidden_size=32, layers=3, operations=3)


def trained(run):
    training = Training(run)
    while training.done < run.steps:
        training.step()
    return training


@pytest.mark.parametrize("task", TASKS)
def test_held_out_sequences_are_never_trained_on(task):
    """Of three operations and more, in whatever words; control: shorter ones are in both."""
    made = {True: set(), False: set()}
    for held_out, seen in made.items():
        rng = Random(f"{task} {held_out}")
        for _ in range(300):
            example = TASKS[task].example(rng, rng.randint(0, 4), held_out)
            seen.add(example.operations)
    longer = {key: {s for s in seen if len(s) >= SHARED} for key, seen in made.items()}
    assert longer[True] and longer[False] and not longer[True] & longer[False]
    assert all(is_held_out(s) == key for key, seen in longer.items() for s in seen)
    assert made[True] & made[False]


def test_same_seed_same_weights_and_going_on(tmp_path):
    """Bit for bit, also where a run is interrupted and goes on; another seed gives others."""
    half, resumed = Training(SMALL), Training(SMALL)
    for _ in range(2):
        half.step()
    half.save(tmp_path)
    resumed.resume(tmp_path)
    assert resumed.done == 2
    while resumed.done < SMALL.steps:
        resumed.step()
    runs = trained(SMALL), resumed, trained(replace(SMALL, seed=1))
    whole, again, other = (run.model.state_dict() for run in runs)
    assert all(torch.equal(tensor, again[name]) for name, tensor in whole.items())
    assert not all(torch.equal(tensor, other[name]) for name, tensor in whole.items())
    with pytest.raises(ValueError, match=r"seed=1 is not allowed: the run in .* has 0"):
        Training(replace(SMALL, seed=1)).resume(tmp_path)


def test_transformers_trainer(tmp_path):
    """Takes the model as it is, and saves checkpoints that load."""
    pytest.importorskip("accelerate")
    training = Training(SMALL)
    rows = [
        {name: tensor[row] for name, tensor in training.batch(n).items()}
        for n in range(3)
        for row in (0, 1)
    ]
    before = {name: tensor.clone() for name, tensor in training.model.state_dict().items()}

    def collate(items):
        """Thoughts [chunks, tokens] are padded in both."""
        width = max(item["thoughts"].shape[1] for item in items)
        for item in items:
            missing = width - item["thoughts"].shape[1]
            item["thoughts"] = pad(item["thoughts"], (0, missing), value=IGNORED)
        fills = {"input_ids": 0, "labels": IGNORED, "thoughts": IGNORED}
        return {
            name: pad_sequence([item[name] for item in items], True, fill)
            for name, fill in fills.items()
        }

    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=2, save_steps=2,
        report_to=[], disable_tqdm=True, use_cpu=True, learning_rate=1e-2,
    )  # fmt: skip
    trainer = Trainer(training.model, arguments, train_dataset=rows, data_collator=collate)
    assert trainer.train().training_loss > 0
    assert any(
        not torch.equal(tensor, before[n]) for n, tensor in training.model.state_dict().items()
    )
    trainer.model.save_pretrained(tmp_path / "model")
    loaded = ThinkingModel.from_pretrained(tmp_path / "model").state_dict()
    assert all(torch.equal(tensor, loaded[n]) for n, tensor in training.model.state_dict().items())


@pytest.mark.slow("thinking", 70)
def test_thinking_learns_what_its_control_does_not():
    """Trained on up to 10 operations: right at 10 and 40, and wrong there with states of other
    prompts or none. The same backbone, data and steps without thoughts: right at 3, not at 40."""
    run = replace(train.RUNS["parity"], steps=350)
    training, control = trained(run), trained(replace(run, mode="none"))
    assert min(*training.accuracy((10,), 100), *training.accuracy((40,), 100)) >= 0.98
    assert control.accuracy((3,), 100)[0] >= 0.9 and control.accuracy((40,), 100)[0] < 0.75
    states = training.model.states
    for alter in (torch.zeros_like, lambda found: found.roll(1, 0)):
        training.model.states = lambda thoughts, alter=alter: alter(states(thoughts))
        assert training.accuracy((40,), 100)[0] < 0.75
