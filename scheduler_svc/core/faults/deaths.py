"""
Deaths of executors, counted against the requests of the step that was running.

See `suspects` for the rules by which requests are blamed, and `trials` for what is done about it.
"""

from __future__ import annotations

from scheduler_svc.core.faults.trial_lines import broken_line, death_line, poison_line
from scheduler_svc.core.observe.request_events import EventKind
from scheduler_svc.core.request.request import Request
from scheduler_svc.core.state.ends import fail
from scheduler_svc.core.state.replica import Replica
from scheduler_svc.core.state.suspects import CLEARED_AFTER
from tandem.errors import ExecutorLost, PoisonRequest


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
        for key, num_tokens in rows.tokens_by_key():
            ends[key] = ends.get(key, 0) + num_tokens
    blamed = []
    for key, num_tokens in rows.tokens_by_key():
        if (found := _stand(replica, key)) is not None:
            request, stood = found
            after = max(ends[key], num_tokens - 1 + CLEARED_AFTER)
            blamed.append((request, stood + after))
    return blamed


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
    cell.events.add_log(death_line(verdict.blamed, suspects.num_suspects))
    if verdict.poison is not None:
        counters.faults.poison_requests += 1
        _fail_poison(replica, verdict.poison)
    if verdict.victims:
        _fail_victims(replica, verdict.victims)


def _fail_poison(replica: Replica, request: Request) -> None:
    name = request.new.request_id
    replica.cell.events.add_log(poison_line(name))
    message = (
        f"executors died twice while they computed request {name} and nothing else, so it is not "
        "tried again: change it, and report it with its id, as executors should survive any request"
    )
    fail(replica.cell, request, PoisonRequest(message))


def _fail_victims(replica: Replica, victims: tuple[Request, ...]) -> None:
    replica.cell.events.add_log(broken_line(len(victims)))
    for request in victims:
        message = (
            f"the executor died under request {request.new.request_id} and under "
            f"{len(victims) - 1} others, one at a time: try again later, or another replica"
        )
        fail(replica.cell, request, ExecutorLost(message))
