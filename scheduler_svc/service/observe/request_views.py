"""Requests and their events in the form in which operators get them."""

from __future__ import annotations

from scheduler_svc.core.listing import RequestRow
from scheduler_svc.core.observe.request_events import RequestEvent
from scheduler_svc.ipc.snapshot import (
    BlockCounts,
    EventEntry,
    EventList,
    ListArgument,
    RequestList,
    RequestSummary,
)


def request_list(rows: list[RequestRow], wanted: ListArgument, now: float) -> RequestList:
    """
    Return a page of the live choices that match a query.

    Args:
        rows: All live choices, oldest first.
        wanted: Tenant, states and page of the query.
        now: Seconds, on the clock of the arrivals.
    """
    chosen = [
        row
        for row in rows
        if (wanted.tenant is None or row.tenant == wanted.tenant)
        and (not wanted.states or row.state.value in wanted.states)
    ]
    left = [row for row in chosen if row.number > wanted.after]
    page = left[: wanted.page_size]
    return RequestList(
        requests=tuple(_summary(row, now) for row in page),
        total=len(chosen),
        last=page[-1].number if len(left) > len(page) else None,
    )


def event_list(events: list[RequestEvent]) -> EventList:
    """
    Return a request's events with times in seconds since its first event, the arrival.

    Args:
        events: Events of one request, in order of time.
    """
    arrival_s = events[0].time_s if events else 0.0
    return EventList(tuple(_entry(event, arrival_s) for event in events))


def _summary(row: RequestRow, now: float) -> RequestSummary:
    return RequestSummary(
        request_id=row.request_id,
        choice=row.choice,
        state=row.state.value,
        tenant=row.tenant,
        priority=row.priority,
        prompt_tokens=row.num_prompt_tokens,
        output_tokens=row.num_output_tokens,
        cached_tokens=row.num_cached_tokens,
        age_s=now - row.arrival_s,
        preemptions=row.num_preemptions,
        time_to_first_token_s=row.ttft_s,
    )


def _entry(event: RequestEvent, arrival_s: float) -> EventEntry:
    blocks = event.blocks
    return EventEntry(
        kind=int(event.kind),
        choice=event.choice,
        at_s=event.time_s - arrival_s,
        token_id=event.token_id,
        blocks=None
        if blocks is None
        else BlockCounts(
            used_blocks=blocks.used, cached_blocks=blocks.cached, free_blocks=blocks.free
        ),
        detail=event.detail,
        time_to_first_token_s=event.ttft_s,
        dropped_events=event.num_dropped,
    )
