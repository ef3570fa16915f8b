"""The whole engine in one process: same core, same runner, no gRPC."""

from scheduler_svc.core.options import (
    CoreOptions,
    Eviction,
    OnPressure,
    Overlength,
    PreemptionMode,
    SchedulePolicy,
    StepPriority,
    VictimRule,
)
from scheduler_svc.core.request import FinishReason
from tandem.engine_config import PRESETS, EngineConfig
from tandem_embedded.backend import Backend, Runner
from tandem_embedded.engine import InferenceEngine
from tandem_embedded.errors import (
    ConfigError,
    EngineError,
    EngineMemoryError,
    ExecutionError,
    SchedulerError,
    ValidationError,
)
from tandem_embedded.params import GenerationParams, SamplingDefaults
from tandem_embedded.results import (
    CompletedChoice,
    CompletedRequest,
    EngineMetrics,
    MemoryStats,
    Request,
    RequestState,
)
from tandem_embedded.stream import TextPiece, TextStream
from tandem_embedded.tokenizer import HuggingFaceTokenizer, SimpleTokenizer, Tokenizer

__all__ = [
    "PRESETS",
    "Backend",
    "CompletedChoice",
    "CompletedRequest",
    "ConfigError",
    "CoreOptions",
    "EngineConfig",
    "EngineError",
    "EngineMemoryError",
    "EngineMetrics",
    "Eviction",
    "ExecutionError",
    "FinishReason",
    "GenerationParams",
    "HuggingFaceTokenizer",
    "InferenceEngine",
    "MemoryStats",
    "OnPressure",
    "Overlength",
    "PreemptionMode",
    "Request",
    "RequestState",
    "Runner",
    "SamplingDefaults",
    "SchedulePolicy",
    "SchedulerError",
    "SimpleTokenizer",
    "StepPriority",
    "TextPiece",
    "TextStream",
    "Tokenizer",
    "ValidationError",
    "VictimRule",
]
