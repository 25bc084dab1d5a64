"""Heads for multi-token prediction that ship with checkpoints, and that transformers drops.

A head is a decoder layer of the model's family between two projections: its row of a token gets the
token's embedding beside the model's last hidden state of the token before, both normed, and tells
the token behind. Embedding and unembedding are the model's own. So a head is made as a model of the
family with that one layer (DeepSeek-V3, arXiv 2412.19437, section 2.2).
"""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import cached_file

from tinyspec.errors import named
from tinyspec.runner.batch import Batch
from tinyspec.runner.device_queue import to_device
from tinyspec.runner.model_runner import ModelRunner
from tinyspec.scheduler.sequence_table import Array

# Parts of the combination: as DeepSeek-V3's checkpoints name them, and Qwen3-Next's.
PARTS = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc"}
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


class Head(nn.Module):
    """What a head has beside its layer; its rows begin as ``combined``."""

    def __init__(self, hidden: int, norm: nn.Module):
        super().__init__()
        self.enorm, self.hnorm = copy.deepcopy(norm), copy.deepcopy(norm)
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)

    def combined(self, embeds: Tensor, before: Tensor) -> Tensor:
        """embeds [N, H] of tokens, before [N, H]: last hidden states of those before them."""
        found: Tensor = self.eh_proj(torch.cat((self.enorm(embeds), self.hnorm(before)), -1))
        return found


def head_of(model: PreTrainedModel) -> PreTrainedModel:
    """The head of the checkpoint that ``model`` was loaded from; its own is a ``Head``,
    ``mtp_head``. ValueError with the reason, where there is none."""
    name, depth = str(model.config.name_or_path), model.config.num_hidden_layers
    try:
        weights = _weights(name, depth)
    except Exception as error:
        raise ValueError(f"the weights of {name!r} cannot be read ({named(error)})") from error
    if not weights:
        keys = f"keys like mtp.fc.weight or model.layers.{depth}.eh_proj.weight"
        raise ValueError(f"the checkpoint {name!r} has no head for multi-token prediction ({keys})")
    base = type(model)

    class WithHead(base):  # type: ignore[misc, valid-type]
        _keys_to_ignore_on_load_missing = ("embed_tokens", "lm_head")  # the model's own
        _keys_to_ignore_on_load_unexpected = (r".*",)

        def __init__(self, config: Any):
            super().__init__(config)
            self.mtp_head = Head(config.hidden_size, self.get_decoder().norm)

    WithHead.__name__ = base.__name__  # by which transformers knows how its weights are kept
    found, told = WithHead.from_pretrained(
        None,
        config=_of_one_layer(model.config),
        state_dict=weights,
        dtype=model.dtype,
        output_loading_info=True,
    )
    if lacking := sorted(told["missing_keys"]):
        raise ValueError(f"the head of {name!r} lacks {', '.join(lacking)}")
    found = found.to(model.device).eval()
    found.set_input_embeddings(model.get_input_embeddings())
    found.set_output_embeddings(model.get_output_embeddings())
    return found


def _of_one_layer(config: Any) -> Any:
    """Of a model of the family with nothing but the head's layer."""
    own = copy.deepcopy(config)
    own.num_hidden_layers = 1
    for name, kind in (("layer_types", "full_attention"), ("mlp_layer_types", "sparse")):
        if getattr(own, name, None) is not None:
            setattr(own, name, list(getattr(own, f"mtp_{name}", None) or [kind])[:1])
    if hasattr(own, "first_k_dense_replace"):  # a head's layer has experts
        own.first_k_dense_replace = 0
    return own


def _weights(name: str, depth: int) -> dict[str, Tensor]:
    """The head's, by their names in a model of one layer; empty where there are none."""
    missing = {"_raise_exceptions_for_missing_entries": False}
    if (index := cached_file(name, INDEX, **missing)) is not None:
        files = json.loads(Path(index).read_text())["weight_map"]
    else:
        with safe_open(_file(name, SINGLE), framework="pt") as held:
            files = dict.fromkeys(held.keys(), SINGLE)
    wanted = {key: own for key in files if (own := _renamed(key, depth)) is not None}
    found: dict[str, Tensor] = {}
    for file in sorted({files[key] for key in wanted}):
        with safe_open(_file(name, file), framework="pt") as held:
            found |= {own: held.get_tensor(k) for k, own in wanted.items() if files[k] == file}
    return found


def _file(name: str, file: str) -> str:
    path = cached_file(name, file)
    assert path is not None
    return path


def _renamed(key: str, depth: int) -> str | None:
    """The name in a model of one layer of what a checkpoint has under ``key``; None: no part of a
    head."""
    own = re.sub(rf"^model\.(language_model\.)?layers\.{depth}\.", "mtp.layers.0.", key)
    if not own.startswith("mtp.") or "embed_tokens" in own or "shared_head.head" in own:
        return None
    own = own.replace("mtp.layers.0.shared_head.norm.", "mtp.norm.")
    for part, other in PARTS.items():
        own = re.sub(rf"^mtp\.(layers\.0\.)?({part}|{other})\.", f"mtp_head.{part}.", own)
    return re.sub(r"^mtp\.", "model.", own)


class HeadRunner(ModelRunner):
    """Runs a head on the pages of ``target``'s model. The row of a token lies at the place of the
    token before, whose hidden state it begins with; what that was guessed to be, for drafts."""

    def __init__(self, target: ModelRunner, *given: Any):
        super().__init__(*given)
        self.target, self.memory.shift = target, 1

    def _inputs(self, batch: Batch) -> dict[str, Tensor]:
        embeds = self.model.get_input_embeddings()(batch.input_ids)
        before = self._places()[batch.slot_mapping.clamp(min=0)].to(embeds.dtype)
        head: Any = self.model.mtp_head
        return {"inputs_embeds": head.combined(embeds, before)[None]}

    def keep(self, hidden: Tensor, batch: Batch, keep: Tensor | None) -> None:
        """Those of rows that give logits are kept for ``guess``."""
        self._guessed = hidden if keep is None else hidden[keep]

    def guess(self, slots: Array) -> None:
        """Let the target's hidden states at ``slots`` [N] of the latest rows be these, until its
        own pass says."""
        where = to_device(slots, self.device)
        self._places()[where] = self._guessed[: len(slots)].to(self._places().dtype)

    def _places(self) -> Tensor:
        """[P, H]: hidden states by slots."""
        hidden = self.target.cache.hidden
        assert hidden is not None
        return hidden.flatten(2).flatten(0, 1)
