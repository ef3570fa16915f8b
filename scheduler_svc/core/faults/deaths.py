"""
Deaths of executors, counted against the requests of the step that was running.

See `suspects` for the rules by which requests are blamed, and `trials` for what is done about it.
"""

from __future__ import annotations

from scheduler_svc.core.faults.quarantine import confine, is_broken
from scheduler_svc.core.faults.trial_lines import (
    broken_line,
    death_line,
    dies_of_anything_line,
    doubt_line,
    poison_line,
    spared_line,
)
from scheduler_svc.core.observe.request_events import EventKind
from scheduler_svc.core.request.request import Request
from scheduler_svc.core.state.cell import Holder
from scheduler_svc.core.state.ends import fail
from scheduler_svc.core.state.replica import Replica
from scheduler_svc.core.state.suspects import BROKEN_AT, CLEARED_AFTER, Verdict
from tandem.errors import ExecutorLost, PoisonRequest


def rows_of_death(replica: Replica, died_in: int) -> list[tuple[Request, int]]:
    """
    Return the live requests of the step that was running when the executor died, each with the
    number of computed tokens at which it is trusted again.

    `died_in` is the step's place among those in flight, 0 for the oldest.
    """
    ends = dict[tuple[int, int], int]()
    rows = replica.steps.in_flight[0]
    for i in range(died_in + 1):
        rows = replica.steps.in_flight[i]
        for key, num_tokens in rows.tokens_by_key():
            ends[key] = ends.get(key, 0) + num_tokens
    blamed = []
    for key, num_tokens in rows.tokens_by_key():
        if (request := replica.request_at(*key)) is not None:
            after = max(ends[key], num_tokens - 1 + CLEARED_AFTER)
            blamed.append((request, replica.num_computed(request) + after))
    return blamed


def note_death(
    replica: Replica,
    rows: list[tuple[Request, int]],
    num_ended: int,
    now: float,
    *,
    executor: int,
) -> None:
    """
    Count a death against these requests; `num_ended` others of the step have ended.

    A request that died alone twice fails as poison. Where the executor turns out to be broken, the
    requests that died alone once each run on another one, or fail as EXECUTOR_LOST without one. One
    of several executors is also blamed where it dies again and again of requests without marks.

    Args:
        replica: The executor that died, or that it was seen at.
        rows: The live requests of the step, as of `rows_of_death`.
        num_ended: Number of requests of the step that have ended.
        now: The time.
        executor: Number of the executor that died, which may have left since.
    """
    cell = replica.cell
    suspects, counters = cell.suspects, cell.telemetry.counters
    counters.faults.executor_deaths += 1
    is_explained = any(suspects.has_mark(request) for request, _ in rows)
    verdict = _count(replica, rows, num_ended, executor)
    confine(cell)
    for mark in verdict.blamed:
        detail = f"executor died: {mark.deaths} times, now in a step of {len(rows)}"
        cell.telemetry.note(EventKind.SUSPECTED, mark.request, now, detail)
    told = executor if cell.has_others else None
    cell.events.add_log(death_line(verdict.blamed, suspects.num_suspects, told))
    if verdict.poison is not None:
        if not verdict.is_certain and _may_be_spared(replica, verdict.poison):
            cell.events.add_log(doubt_line(executor, verdict.poison))
            _spare(replica, is_certain=False)
        else:
            counters.faults.poison_requests += 1
            _fail_poison(replica, verdict.poison)
    elif verdict.victims:
        _judge_executor(replica, verdict.victims)
    elif executor == replica.slots.replica and cell.has_others and not is_explained:
        num_steps = replica.steps.num_done
        if (count := suspects.quarantine.note_unexplained(executor, num_steps)) >= BROKEN_AT:
            cell.events.add_log(dies_of_anything_line(executor, count))
            _note_broken(replica)


def _count(
    replica: Replica, rows: list[tuple[Request, int]], num_ended: int, executor: int
) -> Verdict:
    """Count a death against the requests of its step, and begin a quarantine if there is none."""
    suspects = replica.cell.suspects
    quarantine = suspects.quarantine
    if rows and not suspects.has_marks:
        # Where a death is proven late, its requests may run by now, and had better stay there.
        places = [request.place for request, _ in rows]
        running = [place.replica for place in places if place.slot is not None]
        home = running[0] if running else None
        quarantine.move_to(replica.slots.replica if home is None else home)
    quarantine.begin_caution()
    if suspects.has_marks and executor != quarantine.number:
        return suspects.note_death_elsewhere(rows)
    return suspects.note_death(rows, _num_live(replica), num_ended=num_ended)


def _num_live(replica: Replica) -> int:
    """Count the live requests, without those that could be no control on this executor."""
    cell = replica.cell
    if not cell.has_others:
        return len(cell.requests)
    return sum(
        replica.can_ever_take(request) or cell.suspects.died_alone(request)
        for request in cell.requests
    )


def _judge_executor(replica: Replica, victims: tuple[Request, ...]) -> None:
    """
    Let requests that died alone on a broken executor run on another, or fail those that have none.
    """
    cell, own = replica.cell, replica.slots.replica
    failed = tuple(request for request in victims if not _may_be_spared(replica, request))
    num_spared = len(victims) - len(failed)
    if num_spared:
        cell.events.add_log(spared_line(own, num_spared))
        _spare(replica, is_certain=True)
    elif cell.has_others:
        _note_broken(replica)
    if failed:
        _fail_victims(replica, failed)


def _may_be_spared(replica: Replica, request: Request) -> bool:
    """
    Return True where another executor may be sound, and not each has been blamed once already
    instead of this request. So a request that gets on nowhere goes on at most that often.
    """
    cell = replica.cell
    if cell.suspects.num_spared(request) >= len(cell.holder_numbers()) - 1:
        return False
    return any(holder.can_ever_take(request) for holder in _sound_others(replica))


def _spare(replica: Replica, *, is_certain: bool) -> None:
    """Let the suspects run on another executor, as this one is broken, or may be."""
    suspects = replica.cell.suspects
    _note_broken(replica)
    suspects.spare(is_certain=is_certain)
    suspects.quarantine.open()


def _sound_others(replica: Replica) -> list[Holder]:
    """
    Return the other executors that are not known to be broken. One that is away counts as sound
    until this executor is blamed for the second time.
    """
    cell, own = replica.cell, replica.slots.replica
    others = [number for number in cell.holder_numbers() if number != own]
    sound = [cell.holder(number) for number in others if not is_broken(cell, number)]
    return [holder for holder in sound if holder.gate.takes_new or not is_broken(cell, own)]


def _note_broken(replica: Replica) -> None:
    num_steps = replica.steps.num_done
    replica.cell.suspects.quarantine.note_broken(replica.slots.replica, num_steps)
    replica.room.run_one(num_steps)


def _fail_poison(replica: Replica, request: Request) -> None:
    name = request.new.request_id
    replica.cell.events.add_log(poison_line(request))
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
