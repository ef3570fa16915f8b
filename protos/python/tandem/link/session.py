"""
Messages of the step link that carry no step (Attach, Attached, Heartbeat), the identity of a
scheduler, and the causes that end a session.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerId:
    """
    Identity of a scheduler.

    `name` stays the same over restarts of one scheduler and differs between schedulers;
    `incarnation` is random per start. By its name a restarted scheduler may take over the session
    of its predecessor; a predecessor that still lives differs by its incarnation.
    """

    name: str
    incarnation: str

    def __str__(self) -> str:
        return f"{self.name}/{self.incarnation}"


class LossCause(enum.Enum):
    """
    Cause that ended a session. The first five travel as `SessionLost.metadata["cause"]`, and an
    absent one means `PROTOCOL`; the others are set only by the scheduler.
    """

    PROTOCOL = "protocol"
    """The two ends do not agree on the steps, which is a bug, or a message is malformed."""
    NEW_BOOT = "new_boot"
    """The executor's process is another one: all KV is lost."""
    FENCED = "fenced"
    """Another scheduler, or another incarnation of this one, holds the executor."""
    STATE_HASH = "state_hash"
    """After a step the two ends held different slot states; a bug."""
    REFUSED = "refused"
    """The executor refused a batch of its scheduler, which is the scheduler's bug (`refusal`)."""
    STEP_FAILED = "step_failed"
    """A whole step failed; the process may still live."""
    OUT_OF_MEMORY = "out_of_memory"
    """A step failed because it needed more memory than there is."""
    STUCK = "stuck"
    """A step was late for too long."""
    SILENT = "silent"
    """No message came for too long."""
    MOVED = "moved"
    """The executor could not be reached, and another one took the work."""
    MISFIT = "misfit"
    """The executor cannot serve beside those that do: its model or its blocks are others."""
    DRAINING = "draining"
    """The executor is stopping in an orderly way."""

    @property
    def blames_step(self) -> bool:
        """True if the running step may have ended the session; with `may_live`, only if it died."""
        return self in _BLAMES_STEP

    @property
    def may_live(self) -> bool:
        """True if the executor may be alive and at work, as it was only not heard."""
        return self in {LossCause.SILENT, LossCause.MOVED}

    @property
    def may_repeat(self) -> bool:
        """True if the same step may end every session, although no process dies of it."""
        return self in {LossCause.PROTOCOL, LossCause.STATE_HASH}

    @classmethod
    def of(cls, metadata: Mapping[str, str]) -> LossCause:
        """Return the cause in a peer's error metadata; PROTOCOL if it is absent or unknown."""
        try:
            return cls(metadata.get("cause", cls.PROTOCOL.value))
        except ValueError:
            return cls.PROTOCOL

    def as_metadata(self) -> dict[str, str]:
        """Return the metadata of the error that ends a session."""
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
    First message from the scheduler on a stream: the session to attach to and the results applied.

    `attach_id` grows with every stream of a session, from 1. Results up to `acked_step_id` were
    applied and may be dropped; 0 for none yet.
    """

    boot_id: str
    session_epoch: int
    attach_id: int
    acked_step_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Attached:
    """
    First message from the executor on a stream: highest step received and completed in this
    session; 0 for none.
    """

    boot_id: str
    last_received_step_id: int
    last_completed_step_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """
    Sign of life from the executor: the step that is now computed (0 if idle), milliseconds since it
    started without those in which the process was stopped, and the highest step completed in this
    session.
    """

    running_step_id: int
    elapsed_ms: int
    last_completed_step_id: int
