"""The scheduler's end of the step link: which steps are under way, and what to send again."""

from __future__ import annotations

import enum
from typing import NoReturn

from tandem.errors import InternalError, SessionLost
from tandem.link.batch import Command, StepFailed, StepResult
from tandem.link.session import Attach, Attached, Heartbeat, LossCause
from tandem.link.step_encoder import StepEncoder


class LinkState(enum.Enum):
    """
    Where the link is.

    Moves: CLOSED or LOST to DETACHED (`open`), DETACHED to ATTACHING (`attach`), ATTACHING to
    ATTACHED (`on_attached`), both back to DETACHED (`detach`), any of these three to LOST.
    """

    CLOSED = "closed"
    """No session was opened yet."""
    DETACHED = "detached"
    """A session is open, no stream is."""
    ATTACHING = "attaching"
    """`Attach` went out, `Attached` has not come."""
    ATTACHED = "attached"
    """Steps and results flow."""
    LOST = "lost"
    """The session is over: what was in flight will never be applied."""


class SchedulerEnd:
    """
    Numbers steps, keeps their bytes until their result is applied, and lets every result through
    exactly once and in order.

    The caller hands in only messages of the stream opened by its newest `attach()`; results that
    come while no stream is attached are left alone and come again after the next one.

    Attributes:
        state: Where the link is.
        boot_id: The executor's boot this session belongs to.
        session_epoch: The session, as issued by the executor; 0 before the first.
        last_applied_step_id: Highest step whose result was let through; acknowledged with the next
            message down.
        last_sent_step_id: Highest step sent in this session.
        lost_because: Why the last session ended; empty while none was lost.
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

    def __init__(self, max_inflight_steps: int) -> None:
        """
        Args:
            max_inflight_steps: Credit, at least 1: no step is sent while this many wait for their
                result. At most the executor's `max_inflight_steps`.
        """
        self._max_inflight_steps = max_inflight_steps
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
        """Steps sent whose result may still be let through; 0 when the session is lost."""
        return len(self._sent)

    @property
    def num_inflight_bytes(self) -> int:
        """Bytes of these steps as they are sent."""
        return sum(map(len, self._sent.values()))

    @property
    def can_send(self) -> bool:
        """True when attached and credit is left."""
        return self.state is LinkState.ATTACHED and len(self._sent) < self._max_inflight_steps

    def open(self, boot_id: str, session_epoch: int) -> None:
        """
        Start a session that OpenSession has just granted; steps count from 1 again.

        Raises:
            SessionLost: The epoch does not grow within one boot.
        """
        if boot_id == self.boot_id and session_epoch <= self.session_epoch:
            self._raise_lost(
                f"the executor granted session {session_epoch} after {self.session_epoch}"
            )
        self._reset()
        self.boot_id = boot_id
        self.session_epoch = session_epoch
        self.lost_because = ""
        self.state = LinkState.DETACHED

    def attach(self) -> Attach:
        """
        Begin a new stream, replacing any earlier one; the answer goes to `on_attached`.

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
            Encoded steps the executor has not received, to be sent in this order before any other;
            none for a duplicate.

        Raises:
            SessionLost: Another boot answers, or the two ends do not know the same steps.
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
        Make the next step of a command; its id is used up whatever happens to the bytes.

        Args:
            command: What to do.
            state_hash: Hash of slot state after it.

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
        Take the outcome of a step; a `StepFailed` let through ends the session.

        Returns:
            True: the next in order, to be applied now. False: a duplicate, or no stream is
            attached.

        Raises:
            SessionLost: Another boot's outcome, one before it is missing, or its step was never
                sent.
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
        Compare what the executor says with what was sent.

        Raises:
            SessionLost: It speaks of steps that were never sent.
        """
        if self.state is not LinkState.ATTACHED:
            return
        newest = max(heartbeat.running_step_id, heartbeat.last_completed_step_id)
        if newest > self.last_sent_step_id:
            self._raise_lost(
                f"a heartbeat speaks of step {newest}, only {self.last_sent_step_id} were sent"
            )

    def detach(self) -> None:
        """Note that the stream broke; the session, and the steps in flight, live on."""
        if self.state in (LinkState.ATTACHING, LinkState.ATTACHED):
            self.state = LinkState.DETACHED

    def lose(self, why: str) -> None:
        """End the session: every slot, block and step in flight is gone."""
        if self.state in (LinkState.CLOSED, LinkState.LOST):
            return
        self.state = LinkState.LOST
        self.lost_because = why
        self._sent.clear()

    def _raise_lost(self, why: str, cause: LossCause = LossCause.PROTOCOL) -> NoReturn:
        self.lose(why)
        raise SessionLost(f"the executor session is lost: {why}", metadata=cause.as_metadata())
