"""
The messages of the step link that carry no step: who attaches, what the other end holds, signs of
life.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Attach:
    """
    First message down a stream: which session the scheduler believes in and what it has applied.

    `attach_id` grows with every stream of a session, from 1. Results up to `acked_step_id` were
    applied and may be forgotten; 0 for none yet.
    """

    boot_id: str
    session_epoch: int
    attach_id: int
    acked_step_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Attached:
    """First message up a stream: highest step received and completed in this session, 0: none."""

    boot_id: str
    last_received_step_id: int
    last_completed_step_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """
    Sign of life: the step now computing (0: idle), milliseconds since it started, and the highest
    step completed in this session.
    """

    running_step_id: int
    elapsed_ms: int
    last_completed_step_id: int
