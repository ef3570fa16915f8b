"""
Which executor runs the requests with marks of deaths, where there are several.

The one that died first is quarantined, and while it is away another takes over (`state.quarantine`
says why there is one):

    no request is a suspect yet        at once: the first executor with room for the oldest of these
                                       requests, also where the quarantined one is full
    there are suspects                 after `PATIENCE_S`, then after twice that, and so on, as each
                                       that takes over may die of them
    the quarantined one cannot hold    at once, or as above with suspects: one that can
    the oldest of these requests

Requests with marks that run elsewhere are preempted. That is so for controls, and where a death is
proven late.

So a request that kills takes away one executor by its first death, and then only the quarantined
one: in a time t about log2(t / `PATIENCE_S`) executors if none comes back. A request too large for
the quarantined executor waits until all older ones with marks have got on or ended.
"""

from __future__ import annotations

from scheduler_svc.core.faults.trial_lines import quarantine_line
from scheduler_svc.core.request.request import Request
from scheduler_svc.core.state.cell import Cell
from scheduler_svc.core.state.replica import Replica


def settle_quarantine(replica: Replica, now: float) -> None:
    """
    Let an executor take over as the quarantined one, or leave that to others, if need be.

    To be called before it plans a step while any request has a mark.
    """
    cell, own = replica.cell, replica.slots.replica
    suspects = cell.suspects
    quarantine = suspects.quarantine
    if quarantine.number == own:
        quarantine.note_in()
        if cell.has_others and not _is_fit(replica, _oldest(cell)):
            _leave(cell)
        return
    is_in = quarantine.number is not None and cell.holder(quarantine.number).gate.takes_new
    if is_in:
        quarantine.note_in()
        if not _is_stuck(cell):
            return
    oldest = _oldest(cell)
    if not _is_fit(replica, oldest):
        return
    if suspects.num_suspects or is_broken(cell, own):
        if not quarantine.is_out_for_long(now):
            return
        quarantine.lose_patience()
    elif oldest is None or not replica.has_room_for(oldest):
        return
    _take_over(replica)


def confine(cell: Cell) -> None:
    """Preempt requests with marks that run on another executor than the quarantined one."""
    suspects = cell.suspects
    for mark in suspects.marks():
        place = mark.request.place
        if place.slot is None or place.replica is None:
            continue
        if place.replica != suspects.quarantine.number:
            cell.holder(place.replica).preempt(place.slot, "runs on the quarantined executor only")


def is_broken(cell: Cell, number: int) -> bool:
    """Return True for an executor that died of anything and has not got on since."""
    return cell.suspects.quarantine.is_broken(number, cell.holder(number).steps.num_done)


def _leave(cell: Cell) -> None:
    """Let another executor take over, as the quarantined one should not go on."""
    cell.suspects.end_trial()
    cell.suspects.quarantine.open()
    confine(cell)
    cell.reopen()


def _take_over(replica: Replica) -> None:
    """Make an executor the quarantined one."""
    cell, own = replica.cell, replica.slots.replica
    suspects = cell.suspects
    suspects.end_trial()
    suspects.quarantine.move_to(own)
    confine(cell)
    cell.reopen()
    cell.events.add_log(quarantine_line(own, suspects.marks()))


def _oldest(cell: Cell) -> Request | None:
    """Return the oldest request with a mark that an executor could run now; None without one."""
    holders = [cell.holder(number) for number in cell.holder_numbers()]
    ready = [holder for holder in holders if holder.gate.takes_new]
    for mark in cell.suspects.marks():
        if any(holder.can_ever_take(mark.request) for holder in ready):
            return mark.request
    return None


def _is_fit(replica: Replica, oldest: Request | None) -> bool:
    """Return True where an executor can hold this request, and no sound one should instead."""
    cell, own = replica.cell, replica.slots.replica
    if oldest is None or not replica.can_ever_take(oldest):
        return False
    if not is_broken(cell, own):
        return True
    return not any(
        cell.holder(number).gate.takes_new
        and cell.holder(number).can_ever_take(oldest)
        and not is_broken(cell, number)
        for number in cell.holder_numbers()
    )


def _is_stuck(cell: Cell) -> bool:
    """
    Return True while the quarantined executor, which is there, is full of requests without marks:
    it runs none that has one, and cannot admit the oldest.
    """
    suspects = cell.suspects
    number = suspects.quarantine.number
    if suspects.num_suspects or number is None:
        return False
    is_here = any(
        mark.request.place.replica == number and mark.request not in cell.queue
        for mark in suspects.marks()
    )
    oldest = _oldest(cell)
    if is_here or oldest is None:
        return False
    return not cell.holder(number).has_room_for(oldest)
