"""
What follows when an executor runs out of memory in a step: smaller steps, or the end of a request.

Unlike a death this blames nobody of several: most often it is all of them together that do not fit.
See `step_room` for how steps become smaller, down to few tokens of one request alone. That one is
tried a few times, since what lay in memory beside it is gone each time, and fails then: what it has
computed does not count for it, or a request that grows past what there is would be tried for ever.
"""

from __future__ import annotations

from scheduler_svc.core.observe.step_log import sentence_line
from scheduler_svc.core.request.request import Request
from scheduler_svc.core.slots.planned_rows import PlannedRows
from scheduler_svc.core.state.state import CoreState
from tandem.errors import OutOfMemory

FAILS_AT = 3
"""Small steps of a request alone that ran out of memory, however far apart, at which it fails."""
SMALL_STEP_TOKENS = 64
"""Tokens of a small step: a larger one says of a request only that its prompt needs more steps."""


def only_request_of(state: CoreState, rows: PlannedRows) -> Request | None:
    """Whose the one row of a step is; None where it has several, or its request has ended."""
    if len(rows.slot) != 1:
        return None
    key = int(rows.slot[0]), int(rows.generation[0])
    if (draining := state.draining.get(key)) is not None:
        return draining
    holder = state.slots.requests[key[0]]
    return holder if holder is not None and holder.slot_key == key else None


def note_out_of_memory(state: CoreState, rows: PlannedRows, alone: Request | None) -> None:
    """
    Make steps smaller after the executor had no memory for this one; to be called when everybody
    waits again.

    Args:
        state: The core.
        rows: The step; one without rows, as a command is, leaves steps as they are.
        alone: Whose step it was, if it was only one's.
    """
    state.counters.out_of_memory_steps += 1
    num_rows, num_tokens = len(rows.slot), int(rows.num_tokens.sum())
    if not num_rows:
        return
    room, limits = state.room, state.limits
    room.note_failure(num_rows, num_tokens, state.counters.steps)
    _log(
        state,
        f"Executor out of memory in a step of {num_rows} rows and {num_tokens} tokens: the next "
        f"{room.patience_steps} steps have at most {room.rows(limits.max_running)} rows and "
        f"{room.tokens(limits.max_total_tokens)} tokens.",
    )
    if alone is None or num_tokens > SMALL_STEP_TOKENS:
        return
    alone.num_out_of_memory += 1
    if alone.num_out_of_memory >= FAILS_AT:
        room.note_culprit_gone(state.counters.steps)
        _fail(state, alone)


def let_steps_grow(state: CoreState) -> None:
    """Undo some of what ran out of memory long ago; to be called before each plan."""
    room, limits = state.room, state.limits
    if room.max_rows is None:
        return
    if room.advance(state.counters.steps, limits.max_running, limits.max_total_tokens):
        _log(
            state,
            f"Steps may have {room.rows(limits.max_running)} rows and "
            f"{room.tokens(limits.max_total_tokens)} tokens again, as memory lasted.",
        )


def _fail(state: CoreState, request: Request) -> None:
    name = request.new.request_id
    _log(state, f"Request {name} fails as OUT_OF_MEMORY: so did {FAILS_AT} small steps of it.")
    message = (
        f"the executor ran out of memory {FAILS_AT} times in small steps of request {name} "
        f"alone, at last with {request.num_known} tokens: make it shorter, or have the operator "
        "give the KV cache less memory, so that steps have more"
    )
    state.fail(request, OutOfMemory(message))


def _log(state: CoreState, text: str) -> None:
    state.events.add_log(sentence_line("memory_ran_out", text))
