"""Settings that services need for each kind of fault."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.faults.processes.rig import RigSettings
from tests.faults.schedule import BYTE_KINDS, FLEET_KINDS, MESSAGE_KINDS, RANK_KINDS, Kind

LOST_AFTER_S = 3.0
"""Seconds after which the scheduler gives up an executor, for kinds where executors hang."""
_SOON_LOST = (f"--lost-after-s={LOST_AFTER_S:g}",)
_DRAIN_GRACE_S = 1.0


_SETTINGS: dict[Kind, RigSettings] = {
    **dict.fromkeys(BYTE_KINDS, RigSettings(link="bytes")),
    **dict.fromkeys(MESSAGE_KINDS, RigSettings(link="messages")),
    Kind.UNREACHABLE: RigSettings(link="bytes", num_executors=2, scheduler=_SOON_LOST),
    Kind.CLIENT_RESET: RigSettings(has_client_proxy=True),
    Kind.EXECUTOR_HUNG: RigSettings(num_executors=2, scheduler=_SOON_LOST),
    Kind.STEP_HANGS: RigSettings(num_executors=2, scheduler=_SOON_LOST),
    Kind.POISON: RigSettings(num_executors=2),
    **dict.fromkeys(FLEET_KINDS, RigSettings(num_executors=4, num_together=4)),
    **dict.fromkeys(RANK_KINDS, RigSettings(executor=("--tp-size=2",))),
    Kind.SCHEDULER_STOPPED: RigSettings(scheduler=(f"--drain-grace-s={_DRAIN_GRACE_S:g}",)),
}


def settings_for(kind: Kind, model: Path) -> RigSettings:
    """
    Return the services for faults of one kind; by default one executor with a direct connection.
    """
    return replace(_SETTINGS.get(kind, RigSettings()), model=model)
