"""
Consequences of a step that ran out of memory on the executor: smaller steps, or a failed request.

Unlike a death, this blames no request in a step of several: most often they do not fit together.
See `step_room` for the way steps become smaller, down to a few tokens of one request alone. Such a
request is tried a few times, since each time the data of others is gone from memory, and then
fails. Its progress in between does not clear it; otherwise a request that outgrows the memory would
be tried forever. Before it fails, it is tried as often on the largest executor that is there; so it
fails after `FAILS_AT` such steps for each size of executors at most.
"""

from __future__ import annotations

from scheduler_svc.core.observe.step_log import sentence_line
from scheduler_svc.core.request.request import Request
from scheduler_svc.core.slots.planned_rows import PlannedRows
from scheduler_svc.core.state.ends import fail
from scheduler_svc.core.state.replica import Replica
from tandem.errors import OutOfMemory

FAILS_AT = 3
"""Number of small steps of a request alone that ran out of memory, in all, at which it fails."""
SMALL_STEP_TOKENS = 64
"""Most tokens of a small step; after a larger one, the prompt may fit in smaller chunks."""


def only_request_of(replica: Replica, rows: PlannedRows) -> Request | None:
    """Return the request of a step's only row; None if it has several, or the request has ended."""
    if len(rows.slot) != 1:
        return None
    key = int(rows.slot[0]), int(rows.generation[0])
    return replica.request_at(*key)


def note_out_of_memory(replica: Replica, rows: PlannedRows, alone: Request | None) -> None:
    """
    Make steps smaller after one ran out of memory; to be called when all its requests wait again.

    Args:
        replica: The executor.
        rows: The step; one without rows, such as a command, leaves the size of steps as it is.
        alone: The step's request, if it had only one.
    """
    counters = replica.cell.telemetry.counters
    counters.faults.out_of_memory_steps += 1
    num_rows, num_tokens = len(rows.slot), int(rows.num_tokens.sum())
    if not num_rows:
        return
    room, limits = replica.room, replica.limits
    room.note_failure(num_rows, num_tokens, replica.steps.num_done)
    _log(
        replica,
        f"Executor out of memory in a step of {num_rows} rows and {num_tokens} tokens: the next "
        f"{room.patience_steps} steps have at most {room.rows(limits.max_running)} rows and "
        f"{room.tokens(limits.max_total_tokens)} tokens.",
    )
    if alone is None or num_tokens > SMALL_STEP_TOKENS:
        return
    alone.setbacks.note_out_of_memory()
    if alone.setbacks.num_out_of_memory >= FAILS_AT:
        room.note_culprit_gone(replica.steps.num_done)
        if not _try_larger(replica, alone):
            _fail(replica, alone)


def let_steps_grow(replica: Replica) -> None:
    """Make steps larger if none ran out of memory for long; to be called before each plan."""
    room, limits = replica.room, replica.limits
    if room.max_rows is None:
        return
    num_steps = replica.steps.num_done
    if room.advance(num_steps, limits.max_running, limits.max_total_tokens):
        _log(
            replica,
            f"Steps may have {room.rows(limits.max_running)} rows and "
            f"{room.tokens(limits.max_total_tokens)} tokens again, as none failed since.",
        )


def _try_larger(replica: Replica, request: Request) -> bool:
    """Leave a request to the largest executor, if that is larger than those it was left to."""
    cell = replica.cell
    holders = [cell.holder(number) for number in cell.holder_numbers()]
    sizes = [
        holder.limits.num_blocks
        for holder in holders
        if holder.gate.takes_new and holder.can_ever_take(request)
    ]
    largest, before = max(sizes, default=0), request.setbacks.min_blocks
    if largest <= max(replica.limits.num_blocks, before):
        return False
    request.setbacks.leave_to(largest)
    _log(
        replica,
        f"Request {request.new.request_id} runs on an executor with {largest} KV blocks from now "
        f"on: {FAILS_AT} small steps of it ran out of memory on one with "
        f"{replica.limits.num_blocks}.",
    )
    return True


def _fail(replica: Replica, request: Request) -> None:
    name = request.new.request_id
    _log(replica, f"Request {name} fails as OUT_OF_MEMORY: so did {FAILS_AT} small steps of it.")
    message = (
        f"the executor ran out of memory {FAILS_AT} times in small steps of request {name} "
        f"alone, at last with {request.num_known} tokens: make it shorter, or have the operator "
        "give the KV cache less memory, so that steps have more"
    )
    fail(replica.cell, request, OutOfMemory(message))


def _log(replica: Replica, text: str) -> None:
    replica.cell.events.add_log(sentence_line("memory_ran_out", text))
