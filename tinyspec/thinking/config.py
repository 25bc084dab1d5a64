"""Where a model thinks: chunk size, the two layers, and how long a thought may be.

Does not know what the blocks compute.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from tinyspec.errors import refuse

FILE = "thinking_config.json"


@dataclass(frozen=True)
class ThinkingConfig:
    """chunk_size: tokens of the prompt that are read between two thoughts.
    layer_in: index of the decoder layer to whose output the state is added; layer_out: of the one
    whose output a thought is read from; negative ones count from the last layer.
    max_thought_tokens: longest thought, its end token included. end_token_id: ends a thought; a
    thought that begins with it is trivial. max_thought_tokens=1 would allow trivial thoughts alone.
    """

    end_token_id: int
    chunk_size: int = 8
    layer_in: int = 0
    layer_out: int = -2
    max_thought_tokens: int = 8

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise refuse(field.name, value, "an int")
        for name, least in (("end_token_id", 0), ("chunk_size", 1), ("max_thought_tokens", 2)):
            if getattr(self, name) < least:
                raise refuse(name, getattr(self, name), f"at least {least}")

    @property
    def state_tokens(self) -> int:
        """Length of what the compression block reads: a thought, padded with its end token."""
        return max(self.chunk_size, self.max_thought_tokens)

    def of(self, num_layers: int, vocab_size: int) -> ThinkingConfig:
        """The same with layers counted from the first, for a backbone of so many layers."""
        found = {}
        for name in ("layer_in", "layer_out"):
            value = getattr(self, name)
            if not -num_layers <= value < num_layers:
                allowed = f"{-num_layers} to {num_layers - 1} for a model of {num_layers} layers"
                raise refuse(name, value, allowed)
            found[name] = value % num_layers
        if found["layer_in"] >= found["layer_out"]:
            raise ValueError(
                f"layer_in={self.layer_in}, layer_out={self.layer_out} are not allowed: a thought "
                f"is read behind the layer that its state is added to ({num_layers} layers)"
            )
        if self.end_token_id >= vocab_size:
            allowed = f"below the {vocab_size} tokens of the vocabulary"
            raise refuse("end_token_id", self.end_token_id, allowed)
        return replace(self, **found)

    def save(self, folder: Path) -> None:
        """Beside the backbone's own files."""
        (folder / FILE).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> ThinkingConfig:
        """From what ``save`` wrote."""
        try:
            values = json.loads((folder / FILE).read_text(encoding="utf-8"))
            return cls(**values)
        except (OSError, ValueError, TypeError) as error:
            raise ValueError(f"{folder / FILE} is no ThinkingConfig: {error}") from error
