"""
The messages of the step link that carry no step: who attaches, what the other end holds, signs of
life; who a scheduler is, and why a session ended.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerId:
    """
    Who asks for a session.

    `name` stays over restarts of one scheduler and differs between schedulers; `incarnation` is
    random per start. A restarted scheduler is its predecessor's heir by its name, and the
    predecessor, should it live on, is told apart by the incarnation.
    """

    name: str
    incarnation: str

    def __str__(self) -> str:
        return f"{self.name}/{self.incarnation}"


class LossCause(enum.Enum):
    """
    Why a session ended. The first four travel as `SessionLost.metadata["cause"]`, `PROTOCOL` where
    that is absent; the others only the scheduler knows.
    """

    PROTOCOL = "protocol"
    """The two ends do not know the same steps; a bug, or a message that makes no sense."""
    NEW_BOOT = "new_boot"
    """The executor's process is another one: all KV is gone."""
    FENCED = "fenced"
    """Another scheduler, or another incarnation of this one, holds the executor."""
    STATE_HASH = "state_hash"
    """After a step the two ends held different slots; a bug."""
    STEP_FAILED = "step_failed"
    """A whole step failed; the process may live on."""
    OUT_OF_MEMORY = "out_of_memory"
    """A step failed because it was more than there is memory for."""
    STUCK = "stuck"
    """A step took too long for too long."""
    SILENT = "silent"
    """Nothing was heard for too long."""
    MOVED = "moved"
    """The executor could not be reached, and another took the work."""
    DRAINING = "draining"
    """The executor is stopping in good order."""

    @property
    def blames_step(self) -> bool:
        """Whether the step that was running may be what ended it; where `may_live`, if it died."""
        return self in _BLAMES_STEP

    @property
    def may_live(self) -> bool:
        """Whether the executor may be alive and at work: it was only not heard."""
        return self in {LossCause.SILENT, LossCause.MOVED}

    @property
    def may_repeat(self) -> bool:
        """Whether the same step may end every session alike, though no process dies of it."""
        return self in {LossCause.PROTOCOL, LossCause.STATE_HASH}

    @classmethod
    def of(cls, metadata: Mapping[str, str]) -> LossCause:
        """As a peer told it."""
        try:
            return cls(metadata.get("cause", cls.PROTOCOL.value))
        except ValueError:
            return cls.PROTOCOL

    def as_metadata(self) -> dict[str, str]:
        """For the error that ends a session."""
        return {"cause": self.value}


_BLAMES_STEP = frozenset(
    {
        LossCause.NEW_BOOT,
        LossCause.STEP_FAILED,
        LossCause.OUT_OF_MEMORY,
        LossCause.STUCK,
        LossCause.SILENT,
        LossCause.MOVED,
    }
)


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
    Sign of life: the step now computing (0: idle), milliseconds since it started in which the
    process was not stopped, and the highest step completed in this session.
    """

    running_step_id: int
    elapsed_ms: int
    last_completed_step_id: int
