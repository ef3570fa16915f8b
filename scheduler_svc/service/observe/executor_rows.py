"""Rows about executors, as operators get them."""

from __future__ import annotations

from scheduler_svc.ipc.snapshot import ExecutorRow
from scheduler_svc.service.executors.member import Member
from scheduler_svc.service.executors.members import Members


def executor_rows(members: Members, *, ready_grace_s: float, now: float) -> tuple[ExecutorRow, ...]:
    """
    Return one row per executor that serves or is expected to.

    Args:
        members: The executors.
        ready_grace_s: Seconds without a sign of life after which one counts as silent.
        now: The time.
    """
    return tuple(_row(member, ready_grace_s, now) for member in members)


def _row(member: Member, ready_grace_s: float, now: float) -> ExecutorRow:
    session, port, description = member.session, member.port, member.description
    limits = None if port is None else port.limits
    since_s = session.detached_since_s
    return ExecutorRow(
        address=member.address,
        reached_at=session.address,
        state=_state(member, ready_grace_s),
        why=session.refusals.text,
        boot_id="" if description is None else description.boot_id,
        model="" if description is None else description.model_name,
        device="" if description is None else description.device,
        dtype="" if description is None else description.dtype,
        running_requests=0 if port is None else port.num_running,
        max_requests=0 if limits is None else limits.max_running,
        used_blocks=0 if port is None else port.num_used_blocks,
        total_blocks=0 if limits is None else limits.num_blocks,
        cached_blocks=0 if port is None else port.num_cached_blocks,
        steps=member.num_steps,
        step_s=session.usual_step_s,
        sessions=session.counts.executor_sessions,
        losses=session.counts.executor_losses,
        device_memory_bytes=member.device_memory_bytes,
        away_s=0.0 if since_s is None else now - since_s,
    )


def _state(member: Member, ready_grace_s: float) -> str:
    states = (
        (member.is_drained, "drained"),
        (member.drain_until_s is not None, "draining"),
        (not member.is_serving and bool(member.session.refusals.text), "refused"),
        (not member.is_serving, "connecting"),
        (member.is_suspended, "suspended"),
        (not member.is_computing(ready_grace_s), "silent"),
    )
    return next((state for holds, state in states if holds), "serving")
