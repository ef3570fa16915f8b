"""Python client and command line of Tandem."""

from tandem_client.admin import AdminClient, Setting, Stats, is_serving
from tandem_client.admin_requests import (
    BlockStats,
    KvMode,
    RequestEvent,
    RequestEventKind,
    RequestList,
    RequestState,
    RequestSummary,
)
from tandem_client.aio import AsyncClient
from tandem_client.aio_stream import AsyncGenerationStream
from tandem_client.channel import ChannelOptions
from tandem_client.client import Client
from tandem_client.events import (
    Choice,
    Completion,
    Delta,
    Done,
    Event,
    Finished,
    FinishReason,
    Model,
    Prefilled,
    Queued,
    ResolvedParams,
    Scheduled,
    Started,
    Timings,
    TokenLogprobs,
    Usage,
)
from tandem_client.profile import Profile, ProfileProgress
from tandem_client.request import GenerateOptions
from tandem_client.retry import NO_RETRY, RetryPolicy
from tandem_client.stream import GenerationStream

__all__ = [
    "NO_RETRY",
    "AdminClient",
    "AsyncClient",
    "AsyncGenerationStream",
    "BlockStats",
    "ChannelOptions",
    "Choice",
    "Client",
    "Completion",
    "Delta",
    "Done",
    "Event",
    "FinishReason",
    "Finished",
    "GenerateOptions",
    "GenerationStream",
    "KvMode",
    "Model",
    "Prefilled",
    "Profile",
    "ProfileProgress",
    "Queued",
    "RequestEvent",
    "RequestEventKind",
    "RequestList",
    "RequestState",
    "RequestSummary",
    "ResolvedParams",
    "RetryPolicy",
    "Scheduled",
    "Setting",
    "Started",
    "Stats",
    "Timings",
    "TokenLogprobs",
    "Usage",
    "is_serving",
]
