"""Python client and command line of Tandem."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
        Scheduled,
        Started,
        Timings,
        TokenLogprobs,
        Usage,
    )
    from tandem_client.params import SAMPLING_PRESETS, GenerateOptions, ResolvedParams
    from tandem_client.profile import Profile, ProfileProgress
    from tandem_client.retry import NO_RETRY, RetryPolicy
    from tandem_client.stream import GenerationStream

__all__ = [
    "NO_RETRY",
    "SAMPLING_PRESETS",
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

_HOMES = {
    "admin": "AdminClient Setting Stats is_serving",
    "admin_requests": (
        "BlockStats KvMode RequestEvent RequestEventKind RequestList RequestState RequestSummary"
    ),
    "aio": "AsyncClient",
    "aio_stream": "AsyncGenerationStream",
    "channel": "ChannelOptions",
    "client": "Client",
    "events": (
        "Choice Completion Delta Done Event Finished FinishReason Model Prefilled Queued "
        "Scheduled Started Timings TokenLogprobs Usage"
    ),
    "params": "GenerateOptions ResolvedParams SAMPLING_PRESETS",
    "profile": "Profile ProfileProgress",
    "retry": "NO_RETRY RetryPolicy",
    "stream": "GenerationStream",
}
"""Public names by the module that defines them; each is loaded on first use, to start quickly."""


def __getattr__(name: str) -> Any:
    """Load the module of a name on its first use, and return the name's value."""
    for module, names in _HOMES.items():
        if name in names.split():
            value = getattr(import_module(f"tandem_client.{module}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
