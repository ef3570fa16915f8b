"""The whole engine in one process: the same scheduler core and model runner, without gRPC."""

from executor_svc.slots.metadata import DEFAULT_METADATA_TYPES, MetadataType
from scheduler_svc.core.request.options import (
    CoreOptions,
    Eviction,
    OnPressure,
    Overlength,
    PreemptionMode,
    SchedulePolicy,
    StepPriority,
    VictimRule,
)
from scheduler_svc.core.request.request import FinishReason
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
from tandem_embedded.facade import (
    ExecutionBatch,
    ExecutionOutput,
    GPUExecutorTrait,
    KVCacheManager,
    KVCacheManagerTrait,
    ModelExecutor,
    Scheduler,
    SchedulerOutput,
    SchedulerTrait,
    Sequence,
    TokenizerTrait,
    executor_backend,
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
    "DEFAULT_METADATA_TYPES",
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
    "ExecutionBatch",
    "ExecutionError",
    "ExecutionOutput",
    "FinishReason",
    "GPUExecutorTrait",
    "GenerationParams",
    "HuggingFaceTokenizer",
    "InferenceEngine",
    "KVCacheManager",
    "KVCacheManagerTrait",
    "MemoryStats",
    "MetadataType",
    "ModelExecutor",
    "OnPressure",
    "Overlength",
    "PreemptionMode",
    "Request",
    "RequestState",
    "Runner",
    "SamplingDefaults",
    "SchedulePolicy",
    "Scheduler",
    "SchedulerError",
    "SchedulerOutput",
    "SchedulerTrait",
    "Sequence",
    "SimpleTokenizer",
    "StepPriority",
    "TextPiece",
    "TextStream",
    "Tokenizer",
    "TokenizerTrait",
    "ValidationError",
    "VictimRule",
    "executor_backend",
]
