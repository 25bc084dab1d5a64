"""tinyspec: deterministic continuous batching for Hugging Face models."""

from tinyspec.config import EngineConfig
from tinyspec.drafter import Drafter
from tinyspec.drop_in import generate, patch, unpatch
from tinyspec.engine import Engine
from tinyspec.errors import DeterminismError, TinyspecError, UnsupportedModelError
from tinyspec.outputs import Completion, RequestOutput, StreamEvent
from tinyspec.params import SamplingParams
from tinyspec.probe import DoctorReport, doctor
from tinyspec.replay import AuditReport, audit

__all__ = [
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
