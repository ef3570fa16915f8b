"""Python client and command line of Tandem."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tandem_client.admin import AdminClient, Setting, Stats, is_serving
    from tandem_client.admin.activity import Activity, Fault, FaultKind, Histogram, StepSample
    from tandem_client.admin.aio import AsyncAdminClient
    from tandem_client.admin.executors import ExecutorState, ExecutorSummary
    from tandem_client.admin.profile import Profile, ProfileProgress
    from tandem_client.admin.requests import (
        BlockStats,
        KvMode,
        RequestEvent,
        RequestEventKind,
        RequestList,
        RequestState,
        RequestSummary,
    )
    from tandem_client.aio import AsyncClient
    from tandem_client.channel import ChannelOptions
    from tandem_client.client import Client
    from tandem_client.errors import (
        Aborted,
        AddressInUse,
        AlreadyExists,
        CallCancelled,
        Cancelled,
        ChatTemplateError,
        CoreTimeout,
        CorruptMessage,
        DataLoss,
        DeadlineExceeded,
        Draining,
        DuplicateRequestId,
        EmptyPrompt,
        EventsNotTracked,
        ExecutorLoading,
        ExecutorLost,
        FailedPrecondition,
        FeatureUnsupported,
        HandedOver,
        IncompatibleExecutor,
        Internal,
        InternalError,
        InvalidArgument,
        InvalidConfig,
        InvalidLogits,
        InvalidModel,
        InvalidParameter,
        MemoryPressure,
        ModelChanged,
        ModelNotFound,
        NeverFits,
        NoExecutor,
        NotFound,
        OutOfMemory,
        OutOfRange,
        PeerUnavailable,
        PermissionDenied,
        PoisonRequest,
        ProfileRunning,
        ProfileUnsupported,
        PromptTooLong,
        QueueFull,
        RequestNotFound,
        ResourceExhausted,
        ResponseTooLarge,
        SessionHeld,
        SessionLost,
        SlowConsumer,
        StreamReplaced,
        TandemError,
        TotalTooLong,
        Unauthenticated,
        Unavailable,
        Unimplemented,
        Unknown,
    )
    from tandem_client.events import (
        Choice,
        Completion,
        Delta,
        Done,
        Event,
        Finished,
        FinishReason,
        Prefilled,
        PromptLogprobs,
        Queued,
        Scheduled,
        Started,
        Timings,
        TokenLogprobs,
        Usage,
    )
    from tandem_client.model import Model, ModelCapabilities, PromptTokens
    from tandem_client.params import (
        SAMPLING_PRESETS,
        GenerateOptions,
        PriorOutput,
        PromptOptions,
        ResolvedParams,
        TokenizeOptions,
    )
    from tandem_client.streams.aio_stream import AsyncGenerationStream
    from tandem_client.streams.retry import NO_RETRY, RetryPolicy
    from tandem_client.streams.stream import GenerationStream

__all__ = [
    "NO_RETRY",
    "SAMPLING_PRESETS",
    "Aborted",
    "Activity",
    "AddressInUse",
    "AdminClient",
    "AlreadyExists",
    "AsyncAdminClient",
    "AsyncClient",
    "AsyncGenerationStream",
    "BlockStats",
    "CallCancelled",
    "Cancelled",
    "ChannelOptions",
    "ChatTemplateError",
    "Choice",
    "Client",
    "Completion",
    "CoreTimeout",
    "CorruptMessage",
    "DataLoss",
    "DeadlineExceeded",
    "Delta",
    "Done",
    "Draining",
    "DuplicateRequestId",
    "EmptyPrompt",
    "Event",
    "EventsNotTracked",
    "ExecutorLoading",
    "ExecutorLost",
    "ExecutorState",
    "ExecutorSummary",
    "FailedPrecondition",
    "Fault",
    "FaultKind",
    "FeatureUnsupported",
    "FinishReason",
    "Finished",
    "GenerateOptions",
    "GenerationStream",
    "HandedOver",
    "Histogram",
    "IncompatibleExecutor",
    "Internal",
    "InternalError",
    "InvalidArgument",
    "InvalidConfig",
    "InvalidLogits",
    "InvalidModel",
    "InvalidParameter",
    "KvMode",
    "MemoryPressure",
    "Model",
    "ModelCapabilities",
    "ModelChanged",
    "ModelNotFound",
    "NeverFits",
    "NoExecutor",
    "NotFound",
    "OutOfMemory",
    "OutOfRange",
    "PeerUnavailable",
    "PermissionDenied",
    "PoisonRequest",
    "Prefilled",
    "PriorOutput",
    "Profile",
    "ProfileProgress",
    "ProfileRunning",
    "ProfileUnsupported",
    "PromptLogprobs",
    "PromptOptions",
    "PromptTokens",
    "PromptTooLong",
    "QueueFull",
    "Queued",
    "RequestEvent",
    "RequestEventKind",
    "RequestList",
    "RequestNotFound",
    "RequestState",
    "RequestSummary",
    "ResolvedParams",
    "ResourceExhausted",
    "ResponseTooLarge",
    "RetryPolicy",
    "Scheduled",
    "SessionHeld",
    "SessionLost",
    "Setting",
    "SlowConsumer",
    "Started",
    "Stats",
    "StepSample",
    "StreamReplaced",
    "TandemError",
    "Timings",
    "TokenLogprobs",
    "TokenizeOptions",
    "TotalTooLong",
    "Unauthenticated",
    "Unavailable",
    "Unimplemented",
    "Unknown",
    "Usage",
    "is_serving",
]

_HOMES = {
    "admin": "AdminClient Setting Stats is_serving",
    "admin.activity": "Activity Fault FaultKind Histogram StepSample",
    "admin.aio": "AsyncAdminClient",
    "admin.executors": "ExecutorState ExecutorSummary",
    "admin.profile": "Profile ProfileProgress",
    "admin.requests": (
        "BlockStats KvMode RequestEvent RequestEventKind RequestList RequestState RequestSummary"
    ),
    "aio": "AsyncClient",
    "streams.aio_stream": "AsyncGenerationStream",
    "channel": "ChannelOptions",
    "client": "Client",
    "events": (
        "Choice Completion Delta Done Event Finished FinishReason Prefilled PromptLogprobs "
        "Queued Scheduled Started Timings TokenLogprobs Usage"
    ),
    "model": "Model ModelCapabilities PromptTokens",
    "params": (
        "GenerateOptions PriorOutput PromptOptions ResolvedParams SAMPLING_PRESETS TokenizeOptions"
    ),
    "streams.retry": "NO_RETRY RetryPolicy",
    "streams.stream": "GenerationStream",
}
"""
Public names by the module that defines them, the errors left out; each is loaded on first use, to
start quickly.
"""


def __getattr__(name: str) -> Any:
    """Load the module of a name on its first use, and return the name's value."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    homes = (module for module, names in _HOMES.items() if name in names.split())
    value = getattr(import_module(f"tandem_client.{next(homes, 'errors')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
