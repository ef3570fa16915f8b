"""Scheduler's end of the step link: the steps in flight, and those to send again."""

from __future__ import annotations

import enum
from typing import NoReturn

from tandem.errors import InternalError, SessionLost
from tandem.link.codec.step_encoder import StepEncoder
from tandem.link.commands import Command
from tandem.link.results import StepFailed, StepResult
from tandem.link.session import Attach, Attached, Heartbeat, LossCause


class LinkState(enum.Enum):
    """
    State of the link.

    Transitions are CLOSED or LOST to DETACHED (`open`), DETACHED to ATTACHING (`attach`), ATTACHING
    to ATTACHED (`on_attached`), both back to DETACHED (`detach`), and any of these three to LOST.
    """

    CLOSED = "closed"
    """No session was opened yet."""
    DETACHED = "detached"
    """A session is open, but no stream is."""
    ATTACHING = "attaching"
    """`Attach` was sent, `Attached` was not received yet."""
    ATTACHED = "attached"
    """A stream is attached: steps and results flow."""
    LOST = "lost"
    """The session is over: results of the steps in flight will never be applied."""


class SchedulerEnd:
    """
    Scheduler's end of the link. It numbers steps, keeps their bytes until their result is applied,
    and accepts every result exactly once and in order.

    The caller passes only messages of the stream that its newest `attach()` opened. Results that
    arrive while no stream is attached are ignored; they come again after the next attach.

    Attributes:
        state: State of the link.
        boot_id: Boot id of the session's executor.
        session_epoch: Number of the session, issued by the executor; 0 before the first.
        last_applied_step_id: Highest step with an accepted result; acknowledged with the next
            message to the executor.
        last_sent_step_id: Highest step sent in this session.
        lost_because: Reason why the last session ended; empty while none was lost.
    """

    __slots__ = (
        "_attach_id",
        "_encoder",
        "_max_inflight_steps",
        "_sent",
        "boot_id",
        "last_applied_step_id",
        "last_sent_step_id",
        "lost_because",
        "session_epoch",
        "state",
    )

    def __init__(self) -> None:
        self._max_inflight_steps = 0
        self._encoder = StepEncoder()
        self.state = LinkState.CLOSED
        self.boot_id = ""
        self.session_epoch = 0
        self.lost_because = ""
        self._reset()

    def _reset(self) -> None:
        self.last_applied_step_id = 0
        self.last_sent_step_id = 0
        self._attach_id = 0
        self._sent: dict[int, bytes] = {}

    @property
    def num_inflight(self) -> int:
        """Number of steps sent and without an accepted result; 0 when the session is lost."""
        return len(self._sent)

    @property
    def num_inflight_bytes(self) -> int:
        """Serialized size of the steps in flight, in bytes."""
        return sum(map(len, self._sent.values()))

    @property
    def can_send(self) -> bool:
        """True while a stream is attached and credit is left."""
        return self.state is LinkState.ATTACHED and len(self._sent) < self._max_inflight_steps

    def open(self, boot_id: str, session_epoch: int, max_inflight_steps: int) -> None:
        """
        Start a session that OpenSession has just granted; steps count from 1 again.

        Args:
            boot_id: Boot id of the executor.
            session_epoch: Number of the session.
            max_inflight_steps: Credit, from 1 to the executor's `max_inflight_steps`: no step is
                sent while this many are in flight.

        Raises:
            SessionLost: The epoch is not above the last one of the same boot.
        """
        if boot_id == self.boot_id and session_epoch <= self.session_epoch:
            self._raise_lost(
                f"the executor granted session {session_epoch} after {self.session_epoch}"
            )
        self._reset()
        self.boot_id = boot_id
        self.session_epoch = session_epoch
        self._max_inflight_steps = max_inflight_steps
        self.lost_because = ""
        self.state = LinkState.DETACHED

    def attach(self) -> Attach:
        """
        Begin a new stream, which replaces any earlier one; the answer goes to `on_attached`.

        Raises:
            SessionLost: No session is open.
        """
        if self.state in (LinkState.CLOSED, LinkState.LOST):
            raise SessionLost(f"no session to attach to: {self.lost_because or 'none was opened'}")
        self._attach_id += 1
        self.state = LinkState.ATTACHING
        return Attach(
            boot_id=self.boot_id,
            session_epoch=self.session_epoch,
            attach_id=self._attach_id,
            acked_step_id=self.last_applied_step_id,
        )

    def on_attached(self, attached: Attached) -> list[bytes]:
        """
        Take the first answer of the stream.

        Returns:
            Encoded steps that the executor has not received, to be sent in this order before any
            other; empty for a duplicate answer.

        Raises:
            SessionLost: Another boot answers, or the two ends do not agree on the steps.
        """
        if self.state is not LinkState.ATTACHING:
            return []
        if attached.boot_id != self.boot_id:
            self._raise_lost(
                f"boot {attached.boot_id!r} answered for boot {self.boot_id!r}", LossCause.NEW_BOOT
            )
        received, completed = attached.last_received_step_id, attached.last_completed_step_id
        known = (self.last_applied_step_id, completed, received, self.last_sent_step_id)
        if sorted(known) != list(known):
            self._raise_lost(
                "applied, completed, received and sent step ids must not decrease in this order, "
                f"they are {known}"
            )
        self.state = LinkState.ATTACHED
        missing = range(received + 1, self.last_sent_step_id + 1)
        return [self._sent[step_id] for step_id in missing]

    def send(self, command: Command, state_hash: int) -> tuple[int, bytes]:
        """
        Make the next step from a command; its id is used even if the bytes are never sent.

        Args:
            command: Batch or other command of the step.
            state_hash: Hash of the slot state after the step.

        Returns:
            The step's id and its bytes, to be written to the stream once.

        Raises:
            InternalError: `can_send` is false.
        """
        if not self.can_send:
            raise InternalError(
                f"a step was planned while the link was {self.state.value} "
                f"with {self.num_inflight} steps in flight"
            )
        step_id = self.last_sent_step_id + 1
        raw = self._encoder.encode(
            command,
            session_epoch=self.session_epoch,
            step_id=step_id,
            acked_step_id=self.last_applied_step_id,
            state_hash=state_hash,
        )
        self._sent[step_id] = raw
        self.last_sent_step_id = step_id
        return step_id, raw

    def on_result(self, result: StepResult | StepFailed) -> bool:
        """
        Take the result of a step; a `StepFailed` that is accepted ends the session.

        Returns:
            True if it is the next in order, to be applied now. False if it is a duplicate, or no
            stream is attached.

        Raises:
            SessionLost: The result is of another boot, one before it is missing, or its step was
                never sent.
        """
        if self.state is not LinkState.ATTACHED:
            return False
        if result.boot_id != self.boot_id:
            self._raise_lost(f"boot {result.boot_id!r} sent a result to boot {self.boot_id!r}")
        if result.step_id <= self.last_applied_step_id:
            return False
        if result.step_id > self.last_sent_step_id:
            self._raise_lost(
                f"a result came for step {result.step_id}, only {self.last_sent_step_id} were sent"
            )
        if result.step_id != self.last_applied_step_id + 1:
            self._raise_lost(
                f"the result of step {self.last_applied_step_id + 1} is missing: "
                f"that of step {result.step_id} came"
            )
        self.last_applied_step_id = result.step_id
        del self._sent[result.step_id]
        if isinstance(result, StepFailed):
            self.lose(f"step {result.step_id} failed: {result.reason}: {result.message}")
        return True

    def on_heartbeat(self, heartbeat: Heartbeat) -> None:
        """
        Check a heartbeat against the steps sent.

        Raises:
            SessionLost: The heartbeat names a step that was never sent.
        """
        if self.state is not LinkState.ATTACHED:
            return
        newest = max(heartbeat.running_step_id, heartbeat.last_completed_step_id)
        if newest > self.last_sent_step_id:
            self._raise_lost(
                f"a heartbeat speaks of step {newest}, only {self.last_sent_step_id} were sent"
            )

    def detach(self) -> None:
        """Note that the stream broke; the session and the steps in flight stay."""
        if self.state in (LinkState.ATTACHING, LinkState.ATTACHED):
            self.state = LinkState.DETACHED

    def lose(self, why: str) -> None:
        """End the session: every slot, block and step in flight is lost."""
        if self.state in (LinkState.CLOSED, LinkState.LOST):
            return
        self.state = LinkState.LOST
        self.lost_because = why
        self._sent.clear()

    def _raise_lost(self, why: str, cause: LossCause = LossCause.PROTOCOL) -> NoReturn:
        self.lose(why)
        raise SessionLost(f"the executor session is lost: {why}", metadata=cause.as_metadata())
