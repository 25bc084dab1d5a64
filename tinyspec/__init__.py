"""tinyspec: deterministic continuous batching for Hugging Face models.

Names are imported when they are first used (PEP 562): the command line, settings and outputs need
neither torch nor transformers.
"""

# ruff: noqa: F401  others import these names from here
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tinyspec.config import EngineConfig
    from tinyspec.drafts.drafter import Drafter
    from tinyspec.drop_in.forward import canonical
    from tinyspec.drop_in.patching import generate, patch, unpatch
    from tinyspec.engine.async_engine import AsyncEngine
    from tinyspec.engine.engine import Engine
    from tinyspec.errors import DeterminismError, QueueFull, TinyspecError, UnsupportedModelError
    from tinyspec.outputs import Completion, RequestOutput, StreamEvent
    from tinyspec.runner.token_logprobs import token_logprobs
    from tinyspec.sampling_params import SamplingParams
    from tinyspec.tools.audit import AuditReport, audit
    from tinyspec.tools.doctor import DoctorReport, doctor
else:
    # The same once more, for imports on demand.
    _HOMES = {
        "config": ("EngineConfig",),
        "drop_in.forward": ("canonical",),
        "drop_in.patching": ("generate", "patch", "unpatch"),
        "engine.async_engine": ("AsyncEngine",),
        "drafts.drafter": ("Drafter",),
        "engine.engine": ("Engine",),
        "errors": ("DeterminismError", "QueueFull", "TinyspecError", "UnsupportedModelError"),
        "outputs": ("Completion", "RequestOutput", "StreamEvent"),
        "runner.token_logprobs": ("token_logprobs",),
        "sampling_params": ("SamplingParams",),
        "tools.audit": ("AuditReport", "audit"),
        "tools.doctor": ("DoctorReport", "doctor"),
    }
    _HOME = {name: home for home, names in _HOMES.items() for name in names}
    __all__ = sorted(_HOME)

    def __getattr__(name):
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
        return value

    def __dir__():
        return sorted({*globals(), *__all__})
