"""Suspension: the executor gives its KV memory back for a while, and the core plans no steps."""

from __future__ import annotations

import numpy as np

from scheduler_svc.core.batch.batch_builder import BatchBuilder
from scheduler_svc.core.slots.planned_rows import PlannedRows
from scheduler_svc.core.state.replica import Replica
from tandem.link.batch import Batch
from tandem.link.commands import KvMode, Resume, Suspend


def suspend(replica: Replica, mode: KvMode) -> None:
    """
    Plan no step until `resume`; new requests wait, and slots of ended ones are released on resume.
    A second suspension does nothing.

    Under RECOMPUTE all running requests are preempted and wait again, in order of arrival (Megatron
    Core puts them back in the order of a set; its partly computed prompts keep wrong KV).
    """
    if replica.gate.suspension.mode is not None:
        return
    replica.gate.suspend(mode)
    if mode is KvMode.RECOMPUTE:
        for slot in np.flatnonzero(replica.slots.running).tolist():
            replica.preempt(slot, "suspended")


def resume(replica: Replica) -> None:
    """End a suspension; without one it does nothing."""
    replica.gate.resume()


def take_command(replica: Replica) -> Suspend | Resume | None:
    """Return the command that must be sent before any further batch; None when there is none."""
    suspension = replica.gate.suspension
    if not suspension.is_command_due:
        return None
    if suspension.sent_mode is not None:  # Also before it is suspended in another mode.
        replica.gate.note_resumed()
        _note_in_flight(replica)
        return Resume()
    assert suspension.mode is not None
    if _must_release(replica):
        return None
    replica.gate.note_suspended()
    if suspension.mode is KvMode.RECOMPUTE:
        replica.kv.prefix_cache.flush()
    _note_in_flight(replica)
    return Suspend(kv_mode=suspension.mode)


def plan_suspended(replica: Replica) -> Batch | None:
    """Return a batch of the releases that the suspension waits for; None without any."""
    if not _must_release(replica):
        return None
    builder = BatchBuilder(replica)
    builder.release_ended()
    return builder.batch()


def _must_release(replica: Replica) -> bool:
    """Return True while slots must be released first: the executor drops KV only without any."""
    suspension = replica.gate.suspension
    is_dropping = suspension.mode is KvMode.RECOMPUTE and suspension.sent_mode is None
    return is_dropping and replica.slots.has_vacated()


def _note_in_flight(replica: Replica) -> None:
    replica.steps.note_sent(PlannedRows.none(replica.slots.num_departures))
