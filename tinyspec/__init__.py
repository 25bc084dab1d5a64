"""tinyspec: deterministic continuous batching for Hugging Face models."""

from tinyspec.config import EngineConfig
from tinyspec.drop_in.patching import generate, patch, unpatch
from tinyspec.engine.async_engine import AsyncEngine
from tinyspec.engine.drafter import Drafter
from tinyspec.engine.engine import Engine
from tinyspec.errors import DeterminismError, TinyspecError, UnsupportedModelError
from tinyspec.outputs import Completion, RequestOutput, StreamEvent
from tinyspec.sampling_params import SamplingParams
from tinyspec.tools.audit import AuditReport, audit
from tinyspec.tools.doctor import DoctorReport, doctor

__all__ = [
    "AsyncEngine",
    "AuditReport",
    "Completion",
    "DeterminismError",
    "DoctorReport",
    "Drafter",
    "Engine",
    "EngineConfig",
    "RequestOutput",
    "SamplingParams",
    "StreamEvent",
    "TinyspecError",
    "UnsupportedModelError",
    "audit",
    "doctor",
    "generate",
    "patch",
    "unpatch",
]
