"""
Consequences of an executor's loss for the requests of the step it was computing.

    it died in a step, or the step failed      a death, counted against the step's requests
                                               (`deaths`)
    the step failed for want of memory         smaller steps (`out_of_memory`)
    it fell silent, or another took the work   not known yet whether it died: the death is counted
                                               once that is proven, forgotten once it is seen alive
    only its session was lost                  no request is blamed

After many such losses in a row, with no step done in between, the caller may name the step and
leave out `may_live` for losses of the last two kinds too: they count as deaths then.

A network that drops all packets looks like a process that is gone. If silence counted at once, two
network faults could make a harmless request count as poison.
"""

from __future__ import annotations

from scheduler_svc.core.faults.deaths import note_death, rows_of_death
from scheduler_svc.core.faults.out_of_memory import note_out_of_memory, only_request_of
from scheduler_svc.core.state.replica import Replica
from scheduler_svc.core.state.suspects import UnprovenDeath


def lose_executor(
    replica: Replica, died_in: int | None, now: float, *, out_of_memory: bool, may_live: str
) -> None:
    """Start over with an empty executor; see `Scheduler.executor_lost`."""
    if died_in is None or died_in >= len(replica.steps.in_flight):
        replica.start_over(replica.limits)
        return
    step = replica.steps.in_flight[died_in]
    if out_of_memory:
        alone = only_request_of(replica, step)
        replica.start_over(replica.limits)
        note_out_of_memory(replica, step, alone)
        return
    rows = rows_of_death(replica, died_in)
    num_ended = len(step.slot) - len(rows)
    replica.start_over(replica.limits)
    if may_live:
        num_known = [request.num_known for request, _ in rows]
        death = UnprovenDeath(
            rows=rows, num_known=num_known, num_ended=num_ended, executor=replica.slots.replica
        )
        replica.cell.suspects.note_silence(may_live, death)
    else:
        note_death(replica, rows, num_ended, now, executor=replica.slots.replica)


def prove(replica: Replica, boot_id: str, now: float, *, died: bool) -> None:
    """
    Count the death that an executor may have died, or forget it; see `Scheduler.executor_seen`.
    """
    cell = replica.cell
    death = cell.suspects.take_silence(boot_id)
    if death is None or not died:
        return
    # A request that made progress elsewhere since then did not kill the executor, and perhaps no
    # other did. Only a new token shows progress: all tokens before it were computed once more.
    rows = [
        (request, cleared_at)
        for (request, cleared_at), num_known in zip(death.rows, death.num_known, strict=True)
        if cell.requests.find(request.new.handle) is request
        and request.num_known <= max(cleared_at, num_known)
    ]
    num_ended = death.num_ended + len(death.rows) - len(rows)
    note_death(replica, rows, num_ended, now, executor=death.executor)
