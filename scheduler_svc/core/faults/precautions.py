"""Bounds that earlier faults of an executor set to its next plan."""

from __future__ import annotations

from enum import Enum, auto

from scheduler_svc.core.faults.out_of_memory import let_steps_grow
from scheduler_svc.core.faults.quarantine import settle_quarantine
from scheduler_svc.core.faults.trials import hold_trial
from scheduler_svc.core.state.replica import Replica


class PlanScope(Enum):
    """
    Requests that a plan may run.

    Attributes:
        ALL: Any request may run that nothing speaks against.
        TRIAL: Only those of the trial under way may run.
        NONE: No step may be planned now.
    """

    ALL = auto()
    TRIAL = auto()
    NONE = auto()


def settle_faults(replica: Replica, now: float) -> PlanScope:
    """
    Bring what earlier faults left up to the time of a plan: the executor that runs suspects, their
    trial, and the size of steps after want of memory. Returns what the plan may run.
    """
    scope = _scope(replica, now) if replica.cell.suspects.has_marks else PlanScope.ALL
    if scope is not PlanScope.NONE:
        let_steps_grow(replica)
    return scope


def _scope(replica: Replica, now: float) -> PlanScope:
    """Settle on which executor suspects run, and hold their trial if it is this one."""
    suspects = replica.cell.suspects
    settle_quarantine(replica, now)
    if not suspects.num_suspects or suspects.quarantine.number != replica.slots.replica:
        return PlanScope.ALL
    if replica.steps.in_flight:
        # The step of a trial is alone, so that a death is known to be its own.
        return PlanScope.NONE
    hold_trial(replica)
    return PlanScope.TRIAL if suspects.trial else PlanScope.ALL
