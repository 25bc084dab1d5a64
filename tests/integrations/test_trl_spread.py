"""GRPO by ``rollout`` and RLOO by patched ``generate``, under TRL's trainers: completions do not
hang on how rows are spread over batches, calls and processes."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as distributed
from transformers import AutoModelForCausalLM, AutoTokenizer

from tinyspec.tools.demo import BUNDLED

pytest.importorskip("trl")

import datasets
import trl

from tinyspec.integrations.trl import patch_trainer, rollout

pytestmark = [pytest.mark.slow("random use", 40), pytest.mark.filterwarnings("ignore")]

PROMPTS = [f"User: Tell me a story about a {animal}.\nAssistant:" for animal in ("fox", "bee")]
GROUP, STEPS = 4, 2
# Per-device batch size, batches that are generated at once (None: those of an optimizer step),
# processes. In the last one every group is on both of them.
WAYS = [(4, None, 1), (1, None, 1), (2, None, 1), (4, 1, 1), (1, None, 2), (2, 1, 2)]


def trained(kind, way, folder, exact=True):
    """Prompt and tokens of all completions, and how far the log-probabilities of training were
    from those of ``rollout``. Weights stay: gradients would be added up in other orders."""
    batch, at_once, processes = way
    seen, differences = [], []

    def reward(prompts, completion_ids, **_):
        seen.extend(zip(prompts, map(tuple, completion_ids), strict=True))
        return [float(len(set(ids))) for ids in completion_ids]

    class Trainer(getattr(trl, f"{kind}Trainer")):
        def _get_per_token_logps_and_entropies(self, *args, **kwargs):
            found = super()._get_per_token_logps_and_entropies(*args, **kwargs)
            self.trained = found[0].detach()
            return found

        def _compute_loss(self, model, inputs):
            loss = super()._compute_loss(model, inputs)
            if (drawn := inputs.get("sampling_per_token_logps")) is not None:
                apart = (self.trained - drawn).abs()[inputs["completion_mask"].bool()]
                differences.append(apart.max().item())
            return loss

    arguments = {
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": len(PROMPTS) * GROUP // (batch * processes),
        "steps_per_generation": at_once,
        "num_generations": GROUP,
        "max_completion_length": 8,
        "max_steps": STEPS,
        "learning_rate": 0.0,
        "temperature": 1.5,
        "seed": 3,
        **{"output_dir": str(folder), "use_cpu": True, "bf16": False, "report_to": "none"},
        **{"save_strategy": "no", "disable_tqdm": True},
    }
    trainer = Trainer(
        model=AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32),
        reward_funcs=reward,
        args=getattr(trl, f"{kind}Config")(**arguments),
        train_dataset=datasets.Dataset.from_dict({"prompt": PROMPTS}),
        processing_class=AutoTokenizer.from_pretrained(BUNDLED),
        **({"rollout_func": rollout} if kind == "GRPO" and exact else {}),
    )
    if exact:
        patch_trainer(trainer)
    trainer.train()
    return seen, differences


def on_a_rank(rank, kind, way, folder, exact):
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    distributed.init_process_group("gloo", f"file://{folder}/store", world_size=2, rank=rank)
    torch.save(trained(kind, way, folder, exact), f"{folder}/{rank}.pt")
    distributed.destroy_process_group()


def spread(kind, way, folder, exact=True):
    """As ``trained``, by two processes together."""
    folder.mkdir()
    torch.multiprocessing.spawn(on_a_rank, (kind, way, str(folder), exact), 2)
    one, other = (torch.load(folder / f"{rank}.pt") for rank in range(2))
    return one[0] + other[0], one[1] + other[1]


@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
def test_completions_do_not_hang_on_how_rows_are_spread(kind, tmp_path):
    """With ``rollout`` training has its log-probabilities."""
    first = None
    for way in WAYS:
        run = trained if way[2] == 1 else spread
        seen, differences = run(kind, way, tmp_path / str(way))
        first = first or sorted(seen)
        assert sorted(seen) == first, way
        assert set(differences) == ({0.0} if kind == "GRPO" else set())
    assert len(set(first)) == len(first) == STEPS * len(PROMPTS) * GROUP


def test_control_transformers_own(tmp_path):
    """It draws as rows lie in the batch, and in each process anew."""
    alone, called, two = WAYS[0], WAYS[3], WAYS[4]
    first = sorted(trained("GRPO", alone, tmp_path, exact=False)[0])
    assert sorted(trained("GRPO", called, tmp_path, exact=False)[0]) != first
    assert sorted(spread("GRPO", two, tmp_path / "two", exact=False)[0]) != first
