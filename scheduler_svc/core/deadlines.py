"""Times by which a request must have ended, or been admitted first."""

from __future__ import annotations

from scheduler_svc.core.request.new_request import NewRequest
from scheduler_svc.core.request.request import FinishReason
from scheduler_svc.core.state.cell import Cell
from scheduler_svc.core.state.ends import fail, finish
from tandem.errors import QueueFull

CERTAINTY = 0.5
"""Share of the expected wait that must be over the time left before a request is refused for it."""


def end_overdue(cell: Cell, now: float) -> None:
    """
    End every request that has reached its deadline, and each that waits past its queue limit or
    longer than its caller. A choice whose sibling was admitted goes on waiting.
    """
    cell.note_time(now)
    if cell.has_others:
        cell.router.forget_due(now)
    while (request := cell.requests.expired(now)) is not None:
        finish(cell, request, FinishReason.DEADLINE, now)
    while (request := cell.queue.overdue(now)) is not None:
        new = request.new
        if any(one.times.scheduled_s is not None for one in request.siblings):
            cell.queue.may_wait(request)
        elif new.give_up_s is not None and new.give_up_s <= now:
            fail(cell, request, _gave_up(cell))
        else:
            fail(cell, request, _waited_too_long(cell, new))


def next_deadline_s(cell: Cell) -> float | None:
    """
    Return the earliest time at which `end_overdue` has something to do, or an executor takes what
    it left to others; None for never.
    """
    earliest = cell.requests.next_deadline_s
    for time_s in (cell.queue.next_overdue_s, cell.router.next_due_s):
        if time_s is not None and (earliest is None or time_s < earliest):
            earliest = time_s
    return earliest


def check_in_time(cell: Cell, new: NewRequest) -> None:
    """
    Check that a request may be admitted while its caller waits, as fast as requests ended lately.

    Raises:
        QueueFull: Its turn would come much later.
    """
    if new.give_up_s is None or not len(cell.queue):
        return
    own = cell.queue.fresh_of(new.tenant)
    # Its tenant's turns come after as many of each other tenant.
    num_turns = (1 + (0 if own is None else len(own))) * max(cell.queue.num_tenants, 1)
    wait_s = cell.retry_advice.after_ends(min(num_turns, len(cell.queue) + 1), cell.now_s)
    left_s = new.give_up_s - cell.now_s
    if wait_s is not None and wait_s * CERTAINTY > left_s:
        message = (
            f"the call's deadline is in {max(left_s, 0.0):.3f} s and the request would wait about "
            f"{wait_s:.1f} s: try again later, or with a longer deadline"
        )
        metadata = {"limit": "deadline", "value": f"{max(left_s, 0.0):.3f}"}
        raise QueueFull(message, metadata=metadata, retry_after_s=wait_s)


def _gave_up(cell: Cell) -> QueueFull:
    # A soft end would look like an answer to a caller whose own clock is a moment late.
    message = (
        "the call's deadline passed while the request waited: try again with a longer deadline"
    )
    retry_after_s = cell.retry_advice.after_ends(1, cell.now_s)
    metadata = {"limit": "deadline", "value": "0.000"}
    return QueueFull(message, metadata=metadata, retry_after_s=retry_after_s)


def _waited_too_long(cell: Cell, new: NewRequest) -> QueueFull:
    message = (
        f"the request waited for {new.queue_limit_s:g} s, its queue_limit, and was not admitted: "
        "try again later, or with a longer limit"
    )
    metadata = {"limit": "queue_limit_s", "value": f"{new.queue_limit_s:g}"}
    retry_after_s = cell.retry_advice.after_ends(1, cell.now_s)
    return QueueFull(message, metadata=metadata, retry_after_s=retry_after_s)
