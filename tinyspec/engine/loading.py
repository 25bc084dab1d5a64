"""A model and its tokenizer by name: what cannot be loaded is refused in one line.

Knows transformers' loaders, not engines.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tinyspec.errors import refuse
from tinyspec.thinking.config import FILE as THINKING
from tinyspec.thinking.model import ThinkingModel

DEVICES = "auto, cpu, cuda or cuda:N"
DTYPES = "auto, float32, bfloat16, float16, or a dtype of torch"
# Writes two lines every time that the hub does not answer.
HUB = "huggingface_hub.utils._http"


def load(name_or_path: str | Path, dtype: str | torch.dtype, device: str) -> tuple[Any, Any]:
    """Model and tokenizer, from the hub or a folder; device "auto": a GPU if there is one. A folder
    that a ThinkingModel was saved to gives one.

    Raises ValueError naming the argument, its value and what is allowed, the first two checked
    before anything is loaded: device, dtype, model.
    """
    place = checked_device(device)
    if isinstance(dtype, str) and dtype != "auto":
        found = getattr(torch, dtype, None)
        if not isinstance(found, torch.dtype):
            raise refuse("dtype", dtype, DTYPES)
        dtype = found
    try:
        with _one_warning():
            thinks = (Path(name_or_path) / THINKING).is_file()
            kind: Any = ThinkingModel if thinks else AutoModelForCausalLM
            model: Any = kind.from_pretrained(name_or_path, dtype=dtype)
            tokenizer = AutoTokenizer.from_pretrained(name_or_path)
    except (OSError, ValueError) as error:
        allowed = "a folder with a model and its tokenizer, or the name of one on the hub"
        reason = " ".join(str(error).split())
        raise refuse("model", str(name_or_path), f"{allowed} ({reason})") from error
    return model.to(place), tokenizer


def checked_device(device: str | torch.device) -> torch.device:
    """The device to use. Raises ValueError for one that is not served or not there."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise refuse("device", device, DEVICES) from None
    if found.type not in ("cpu", "cuda"):
        raise refuse("device", str(device), DEVICES)
    count = torch.cuda.device_count()
    if found.type == "cuda" and (found.index or 0) >= count:
        there = f"torch finds {count} CUDA devices" if count else "torch finds no CUDA device"
        raise refuse("device", str(device), f"{DEVICES}, and {there} here")
    return found


@contextmanager
def _one_warning() -> Iterator[None]:
    """In the block the hub's client says once that it tries again, not every time."""
    said: list[logging.LogRecord] = []

    def first(record: logging.LogRecord) -> bool:
        said.append(record)
        return len(said) == 1

    logger = logging.getLogger(HUB)
    logger.addFilter(first)
    try:
        yield
    finally:
        logger.removeFilter(first)
