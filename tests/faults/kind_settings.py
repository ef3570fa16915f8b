"""What services a kind of fault needs to be done to."""

from __future__ import annotations

from pathlib import Path

from tests.faults.rig import RigSettings
from tests.faults.schedule import BYTE_KINDS, MESSAGE_KINDS, Kind

LOST_AFTER_S = 3.0
"""Where executors hang: after how long the scheduler gives one up."""
_DRAIN_GRACE_S = 1.0


def settings_for(kind: Kind, model: Path) -> RigSettings:
    """Services for faults of one kind."""
    if kind in BYTE_KINDS:
        return RigSettings(link="bytes", model=model)
    if kind in MESSAGE_KINDS:
        return RigSettings(link="messages", model=model)
    if kind in (Kind.EXECUTOR_HUNG, Kind.STEP_HANGS):
        scheduler = (f"--lost-after-s={LOST_AFTER_S:g}",)
        return RigSettings(num_executors=2, scheduler=scheduler, model=model)
    if kind is Kind.POISON:
        return RigSettings(num_executors=2, model=model)
    if kind is Kind.SCHEDULER_STOPPED:
        return RigSettings(scheduler=(f"--drain-grace-s={_DRAIN_GRACE_S:g}",), model=model)
    return RigSettings(model=model)
