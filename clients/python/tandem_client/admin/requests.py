"""Plain values of the admin API: states, events and lists of requests, and KV modes."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from tandem.admin.v1 import requests_pb2


class RequestState(enum.IntEnum):
    """State of a request; see tandem.admin.v1.RequestState."""

    UNSPECIFIED = 0
    WAITING = 1
    PREFILL = 2
    DECODE = 3
    DRAINING = 4
    PAUSED = 5

    @classmethod
    def _missing_(cls, value: object) -> RequestState:  # noqa: ARG003  # enum's signature
        return cls.UNSPECIFIED  # a newer server may know more


class RequestEventKind(enum.IntEnum):
    """Kind of an event of a request; see tandem.admin.v1.RequestEventKind."""

    UNSPECIFIED = 0
    ADD = 1
    SCHEDULED = 2
    GENERATED_TOKEN = 3
    PAUSE = 4
    EVICT = 5
    RETRACT = 6
    FINISH = 7
    FAIL = 8
    SUSPECTED = 9
    TRIAL = 10
    CLEARED = 11

    @classmethod
    def _missing_(cls, value: object) -> RequestEventKind:  # noqa: ARG003  # enum's signature
        return cls.UNSPECIFIED  # a newer server may know more


class KvMode(enum.IntEnum):
    """Treatment of the KV cache during a suspension; see tandem.admin.v1.KvMode."""

    PERSIST = 1
    OFFLOAD = 2
    RECOMPUTE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSummary:
    """
    One choice of a live request. Times are in seconds; `time_to_first_token_s` is None before the
    first token.
    """

    request_id: str
    choice: int
    state: RequestState
    tenant: str
    priority: int
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    age_s: float
    preemptions: int
    time_to_first_token_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestList:
    """
    One page of requests, oldest first; `total` counts those of all pages, and `next_page_token` is
    empty on the last one.
    """

    requests: tuple[RequestSummary, ...]
    total: int
    next_page_token: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockStats:
    """Numbers of KV blocks at one moment: used by requests, held only as prefix cache, and free."""

    used_blocks: int
    cached_blocks: int
    free_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestEvent:
    """One event of a request; tandem.admin.v1.RequestEvent lists the fields of each kind."""

    kind: RequestEventKind
    choice: int
    at_s: float
    token_id: int | None
    blocks: BlockStats | None
    detail: str
    time_to_first_token_s: float | None
    dropped_events: int


def list_from_proto(response: requests_pb2.ListRequestsResponse) -> RequestList:
    """Decode the answer of ListRequests."""
    return RequestList(
        requests=tuple(
            RequestSummary(
                request_id=one.request_id,
                choice=one.choice,
                state=RequestState(one.state),
                tenant=one.tenant,
                priority=one.priority,
                prompt_tokens=one.prompt_tokens,
                output_tokens=one.output_tokens,
                cached_tokens=one.cached_tokens,
                age_s=one.age_s,
                preemptions=one.preemptions,
                time_to_first_token_s=_first_token_s(one),
            )
            for one in response.requests
        ),
        total=response.total,
        next_page_token=response.next_page_token,
    )


def events_from_proto(response: requests_pb2.GetRequestEventsResponse) -> list[RequestEvent]:
    """Decode the answer of GetRequestEvents."""
    return [
        RequestEvent(
            kind=RequestEventKind(one.kind),
            choice=one.choice,
            at_s=one.at_s,
            token_id=one.token_id if one.HasField("token_id") else None,
            blocks=_blocks(one.blocks) if one.HasField("blocks") else None,
            detail=one.detail,
            time_to_first_token_s=_first_token_s(one),
            dropped_events=one.dropped_events,
        )
        for one in response.events
    ]


def _first_token_s(
    message: requests_pb2.RequestSummary | requests_pb2.RequestEvent,
) -> float | None:
    known = message.HasField("time_to_first_token_s")
    return message.time_to_first_token_s if known else None


def _blocks(message: requests_pb2.BlockStats) -> BlockStats:
    return BlockStats(
        used_blocks=message.used_blocks,
        cached_blocks=message.cached_blocks,
        free_blocks=message.free_blocks,
    )
