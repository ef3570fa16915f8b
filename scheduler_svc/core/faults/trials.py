"""
Trials: while there are requests that may have killed an executor, only those that are tried run, on
one executor; others go on with requests that nothing speaks against (`quarantine`).

See `suspects` for the rules by which requests are blamed and tried, and `deaths` for the failures.
"""

from __future__ import annotations

from scheduler_svc.core.faults.quarantine import confine
from scheduler_svc.core.faults.trial_lines import passed_line, trial_line
from scheduler_svc.core.observe.request_events import EventKind
from scheduler_svc.core.request.request import Request, RequestState
from scheduler_svc.core.state.replica import Replica


def hold_trial(replica: Replica) -> None:
    """
    Preempt all running requests that are not tried; begin a new trial if the last one is over, and
    if this executor, which is the quarantined one, can hold a suspect.

    To be called while there are suspects and nothing is in flight, before a step is planned.
    """
    suspects = replica.cell.suspects
    if not any(replica.can_ever_take(mark.request) for mark in suspects.trial.values()):
        suspects.end_trial()
    if not suspects.trial:
        _begin_trial(replica)
    if not suspects.trial:
        return
    for slot in replica.slots.running.nonzero()[0].tolist():
        if int(replica.slots.admitted.number[slot]) not in suspects.trial:
            replica.preempt(slot, "waits while others are tried")


def waiting_for_trial(replica: Replica) -> list[Request]:
    """Return the tried requests that wait for a slot, in order of arrival."""
    tried = [mark.request for mark in replica.cell.suspects.trial.values()]
    return [
        request
        for request in tried
        if request.state is RequestState.WAITING and replica.can_ever_take(request)
    ]


def note_progress(replica: Replica, now: float) -> None:
    """Trust requests again that made enough progress by a result that was just applied."""
    cell = replica.cell
    suspects = cell.suspects
    if suspects.quarantine.number != replica.slots.replica:
        return
    suspects.quarantine.note_step()
    was_trial = bool(suspects.trial)
    cleared = suspects.note_progress(
        (mark, replica.num_computed(mark.request))
        for mark in suspects.marks()
        if replica.slots.holds(mark.request)
    )
    if not cleared:
        return
    for mark in cleared:
        cell.telemetry.note(EventKind.CLEARED, mark.request, now)
    if was_trial:
        cell.events.add_log(passed_line(cleared, suspects.num_suspects))


def _begin_trial(replica: Replica) -> None:
    cell = replica.cell
    suspects = cell.suspects
    tried = suspects.begin_trial(cell.requests, replica.can_ever_take if cell.has_others else None)
    if not tried:
        return
    # A control may run on another executor.
    confine(cell)
    cell.events.add_log(trial_line(tried, suspects.num_suspects))
    detail = f"{len(tried)} of {suspects.num_suspects} suspects"
    if not any(mark.is_suspect for mark in tried):
        detail = "control: does the executor live with it alone?"
    for mark in tried:
        cell.note(EventKind.TRIAL, mark.request, detail)
