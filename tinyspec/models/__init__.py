"""The model that ships inside the package, for tests and demos that must run without a network.

Knows where the folder is; does not load it (that is `AutoModelForCausalLM.from_pretrained`) and
does not know how it was made (`train.py`, `stories.py`).
"""

from pathlib import Path

BUNDLED: Path = Path(__file__).resolve().parent / "storyteller"

__all__ = ["BUNDLED"]
