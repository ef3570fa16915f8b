"""
Handling of requests that may have killed an executor: trials, failures, and their log lines.

See `suspects` for the rules by which requests are blamed and tried.
"""

from __future__ import annotations

from collections.abc import Iterator

from scheduler_svc.core.observe.request_events import EventKind
from scheduler_svc.core.observe.step_log import sentence_line
from scheduler_svc.core.request.request import Request, RequestState
from scheduler_svc.core.slots.planned_rows import PlannedRows
from scheduler_svc.core.state.ends import fail
from scheduler_svc.core.state.replica import Replica
from scheduler_svc.core.state.suspects import CLEARED_AFTER, Mark
from tandem.errors import ExecutorLost, PoisonRequest

NUM_NAMED = 8
"""Most requests that one line of the log names."""


def rows_of_death(replica: Replica, died_in: int) -> list[tuple[Request, int]]:
    """
    Return the live requests of the step that was running when the executor died, each with the
    number of computed tokens at which it is trusted again.

    `died_in` is the step's place among those in flight, 0 for the oldest.
    """
    ends = dict[tuple[int, int], int]()
    rows = replica.in_flight[0]
    for i in range(died_in + 1):
        rows = replica.in_flight[i]
        for key, num_tokens in _tokens(rows):
            ends[key] = ends.get(key, 0) + num_tokens
    blamed = []
    for key, num_tokens in _tokens(rows):
        if (found := _stand(replica, key)) is not None:
            request, stood = found
            after = max(ends[key], num_tokens - 1 + CLEARED_AFTER)
            blamed.append((request, stood + after))
    return blamed


def _tokens(rows: PlannedRows) -> Iterator[tuple[tuple[int, int], int]]:
    """Return the (slot, generation) and the number of tokens of each row of a step."""
    keys = zip(rows.slot.tolist(), rows.generation.tolist(), strict=True)
    return zip(keys, rows.num_tokens.tolist(), strict=True)


def _stand(replica: Replica, key: tuple[int, int]) -> tuple[Request, int] | None:
    """Return a row's request and its number of computed tokens; None if the request has ended."""
    request = replica.request_at(*key)
    if request is None:
        return None
    is_draining = request.place.slot is None
    return request, request.place.applied if is_draining else int(
        replica.slots.tokens.applied[key[0]]
    )


def note_death(
    replica: Replica, rows: list[tuple[Request, int]], num_ended: int, now: float
) -> None:
    """
    Count a death against these requests, which wait again by now; `num_ended` others of the step
    have ended.

    A request that died alone twice fails as poison. Where the executor turns out to be broken, the
    requests that died alone once each fail as EXECUTOR_LOST.
    """
    cell = replica.cell
    suspects, counters = cell.suspects, cell.counters
    counters.faults.executor_deaths += 1
    suspects.begin_caution(counters.compute.steps)
    verdict = suspects.note_death(rows, len(cell.requests), num_ended=num_ended)
    if cell.recorder is not None:
        for mark in verdict.blamed:
            detail = f"executor died: {mark.deaths} times, now in a step of {len(rows)}"
            cell.recorder.note(EventKind.SUSPECTED, mark.request, now, detail)
    text = f"Executor died in a step of {_named(verdict.blamed)}."
    if count := suspects.num_suspects:
        text += (
            f" {count} request{' was' if count == 1 else 's were'} in more than one such step "
            "without getting on in between: tried in parts while all others wait."
        )
    _log(replica, text)
    if verdict.poison is not None:
        counters.faults.poison_requests += 1
        _fail_poison(replica, verdict.poison)
    if verdict.victims:
        _fail_victims(replica, verdict.victims)


def hold_trial(replica: Replica) -> None:
    """
    Preempt all running requests that are not tried; begin a new trial if the last one is over.

    To be called while there are suspects and nothing is in flight, before a step is planned.
    """
    suspects = replica.cell.suspects
    if not suspects.trial:
        _begin_trial(replica)
    for slot in replica.slots.running.nonzero()[0].tolist():
        if int(replica.slots.admitted.number[slot]) not in suspects.trial:
            replica.preempt(slot, "waits while others are tried")


def waiting_for_trial(replica: Replica) -> list[Request]:
    """Return the tried requests that wait for a slot, in order of arrival."""
    tried = [mark.request for mark in replica.cell.suspects.trial.values()]
    return [request for request in tried if request.state is RequestState.WAITING]


def note_progress(replica: Replica, now: float) -> None:
    """Trust requests again that made enough progress by a result that was just applied."""
    cell = replica.cell
    suspects, applied = cell.suspects, replica.slots.tokens.applied
    was_trial = bool(suspects.trial)
    cleared = suspects.note_progress(
        (mark, int(applied[mark.request.place.slot]))
        for mark in suspects.marks()
        if mark.request.place.slot is not None
    )
    if not cleared:
        return
    if cell.recorder is not None:
        for mark in cleared:
            cell.recorder.note(EventKind.CLEARED, mark.request, now)
    if was_trial:
        left = suspects.num_suspects
        text = f"Trial passed by {_named(cleared)}; suspects left: {left}."
        _log(replica, text if left else f"{text} All requests run again.")


def _begin_trial(replica: Replica) -> None:
    cell = replica.cell
    suspects = cell.suspects
    tried = suspects.begin_trial(cell.requests)
    is_control = not any(mark.is_suspect for mark in tried)
    if is_control:
        detail = "control: does the executor live with it alone?"
        text = f"Trial of the executor: only {_named(tried)} may run, which is not suspected."
    else:
        detail = f"{len(tried)} of {suspects.num_suspects} suspects"
        text = f"Trial: of {suspects.num_suspects} suspects only {_named(tried)} may run."
    _log(replica, text)
    for mark in tried:
        cell.note(EventKind.TRIAL, mark.request, detail)


def _fail_poison(replica: Replica, request: Request) -> None:
    name = request.new.request_id
    _log(replica, f"Request {name} fails as POISON_REQUEST: executors died twice with it alone.")
    message = (
        f"executors died twice while they computed request {name} and nothing else, so it is not "
        "tried again: change it, and report it with its id, as executors should survive any request"
    )
    fail(replica, request, PoisonRequest(message))


def _fail_victims(replica: Replica, victims: tuple[Request, ...]) -> None:
    text = (
        f"{len(victims)} requests fail as EXECUTOR_LOST: the executor died under each of them "
        "alone and got on with no other, so it is to blame itself: see its log, and replace it."
    )
    _log(replica, text)
    for request in victims:
        message = (
            f"the executor died under request {request.new.request_id} and under "
            f"{len(victims) - 1} others, one at a time: try again later, or another replica"
        )
        fail(replica, request, ExecutorLost(message))


def _named(marks: list[Mark]) -> str:
    """Return the number of requests and the names of the first ones, for the log."""
    if not marks:
        return "no live request"
    names = [mark.request.new.request_id for mark in marks[:NUM_NAMED]]
    more = ", ..." if len(marks) > NUM_NAMED else ""
    count = "1 request" if len(marks) == 1 else f"{len(marks)} requests"
    return f"{count} ({', '.join(names)}{more})"


def _log(replica: Replica, text: str) -> None:
    replica.cell.events.add_log(sentence_line("executor_trial", text))
