"""Listing of the live requests for operators, and of the slots for comparison."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from scheduler_svc.core.request.request import Request, RequestState
from scheduler_svc.core.state.fleet import Fleet
from scheduler_svc.core.state.replica import Replica


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRow:
    """
    One live choice of a request.

    Attributes:
        number: Its number in order of arrival.
        request_id: Its id, shared by all choices of a request.
        handle: The submitter's number for it.
        choice: Number of the choice (completion of the prompt), from 0.
        state: Its state.
        tenant: Tenant of the request; empty for none.
        priority: Its priority; lower goes first.
        num_prompt_tokens: Tokens of the prompt.
        num_cached_tokens: Prompt tokens found cached when it was first admitted.
        num_output_tokens: Output tokens known so far.
        arrival_s: Its arrival time, on the clock the core is driven with.
        ttft_s: Seconds from arrival to the first token; None before it.
        num_preemptions: Number of times it lost its slot, losses of the executor not counted.
    """

    number: int
    request_id: str
    handle: int
    choice: int
    state: RequestState
    tenant: str
    priority: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    arrival_s: float
    ttft_s: float | None
    num_preemptions: int


def list_requests(fleet: Fleet) -> list[RequestRow]:
    """Return one row per live choice, in order of arrival."""
    requests = sorted(fleet.cell.requests, key=lambda request: request.number)
    return [_row(fleet, request) for request in requests]


def num_outputs(fleet: Fleet, request: Request) -> int:
    """Return the number of output tokens known of a live request."""
    replica, slot = fleet.of(request), request.place.slot
    if replica is None or slot is None:
        return len(request.outputs)
    return len(request.outputs) + replica.slots.tokens.tail_len(slot)


def _row(fleet: Fleet, request: Request) -> RequestRow:
    new, first_s = request.new, request.times.first_token_s
    return RequestRow(
        number=request.number,
        request_id=new.request_id,
        handle=new.handle,
        choice=new.sampling.choice,
        state=request.state,
        tenant=new.tenant,
        priority=new.priority,
        num_prompt_tokens=request.prompt_len,
        num_cached_tokens=request.prefix.num_cached_tokens,
        num_output_tokens=num_outputs(fleet, request),
        arrival_s=new.arrival_s,
        ttft_s=None if first_s is None else first_s - new.arrival_s,
        num_preemptions=request.setbacks.num_preemptions,
    )


def slot_columns(replica: Replica) -> dict[str, list[Any]]:
    """
    Return slot, generation, planned tokens and blocks of every live slot: the columns that the
    state hash covers, under the names by which the executor logs its own.
    """
    slots = replica.slots
    live = slots.live.nonzero()[0]
    return {
        "slot": live.tolist(),
        "generation": slots.generation[live].tolist(),
        "planned": slots.planned[live].tolist(),
        "blocks": [slots.blocks.of_slot(slot).tolist() for slot in live],
    }
