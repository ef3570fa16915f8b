"""Executor's end of the step link: the session's holder, received steps, unacknowledged results."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import NoReturn

from tandem.errors import InternalError, SessionHeld, SessionLost, StreamReplaced
from tandem.link.commands import Step
from tandem.link.session import Attach, Attached, Heartbeat, LossCause, SchedulerId

MAX_FENCED = 256
"""
Number of fenced schedulers that are remembered; one that is forgotten could at most succeed a
holder of its own name again.
"""

UNATTACHED_LEASE_S = 5.0
"""
Longest lease of a holder that was granted its session and has attached no stream to it since. A
scheduler attaches at once; a caller that only opens sessions must not shut others out.
"""


class ExecutorEnd:
    """
    Executor's end of the link. It grants sessions, accepts every step exactly once and in order,
    and keeps results until they are acknowledged: at most `max_inflight_steps` steps and as many
    results.

    It is not thread-safe: its owner serialises the calls. A violation of the protocol by the
    session's own scheduler ends the session; messages of fenced schedulers and replaced streams are
    refused and do not change the session.

    Attributes:
        boot_id: Boot id of this process.
        session_epoch: Number of the newest session; 0 before the first.
        holder: Scheduler that holds the session; None before the first.
        attach_id: Id of the session's newest stream if it is attached, else 0.
        last_received_step_id: Highest step received in this session.
        last_completed_step_id: Highest step completed in this session.
        acked_step_id: Step up to which the scheduler has applied results, which are dropped here.
        running_step_id: Step that is now computed; 0 when idle.
    """

    __slots__ = (
        "_failed_step_id",
        "_fenced",
        "_is_granted",
        "_lease_s",
        "_lost_because",
        "_lost_metadata",
        "_max_inflight_steps",
        "_newest_attach_id",
        "_received",
        "_results",
        "_sign_of_life_s",
        "_started_s",
        "acked_step_id",
        "attach_id",
        "boot_id",
        "holder",
        "last_completed_step_id",
        "last_received_step_id",
        "running_step_id",
        "session_epoch",
    )

    def __init__(self, boot_id: str, max_inflight_steps: int = 0) -> None:
        """
        Args:
            boot_id: Boot id of this process.
            max_inflight_steps: Credit of schedulers; 0 where `give_credit` tells it later.
        """
        self.boot_id = boot_id
        self._max_inflight_steps = max_inflight_steps
        self.session_epoch = 0
        self.holder: SchedulerId | None = None
        self._fenced: deque[SchedulerId] = deque(maxlen=MAX_FENCED)
        self._is_granted = False
        self._lease_s = 0.0
        self._sign_of_life_s = 0.0
        self._reset()

    def _reset(self) -> None:
        self.attach_id = 0
        self._newest_attach_id = 0
        self.last_received_step_id = 0
        self.last_completed_step_id = 0
        self.acked_step_id = 0
        self.running_step_id = 0
        self._started_s = 0.0
        self._received: dict[int, bytes] = {}
        self._results: dict[int, bytes] = {}
        self._lost_because = ""
        self._lost_metadata = LossCause.PROTOCOL.as_metadata()
        self._failed_step_id = 0

    def give_credit(self, max_inflight_steps: int) -> None:
        """Let schedulers send so many steps ahead of the results that they have acknowledged."""
        self._max_inflight_steps = max_inflight_steps

    @property
    def can_execute(self) -> bool:
        """False once the session is lost or a step of it failed; queued steps must not run then."""
        return self.session_epoch > 0 and not self._lost_because and not self._failed_step_id

    def open_session(
        self, scheduler: SchedulerId, take_over: bool, lease_s: float, now: float
    ) -> int:
        """
        Make a scheduler the only holder, and drop all state of the session before.

        Before it answers with the epoch, the caller does four things. It ends the stream of the
        session before with the error that `fenced` makes, as that scheduler may wait for a result
        that will never come. It drops steps that are still queued (their epoch is not
        `session_epoch`), waits for the running one, and resets its slots; then it calls `grant`.

        Args:
            scheduler: Scheduler that asks for the session. The holder itself is never refused.
                Another incarnation of its name is refused only while the holder's stream is
                attached; without a stream the holder counts as dead. Any other scheduler, and one
                that was replaced before, must wait until the holder's lease has ended.
            take_over: Fence a live holder.
            lease_s: Seconds without a sign of life after which another scheduler may open a
                session. An attached stream is a sign of life at every `heartbeat`. Between `grant`
                and the first stream it counts as at most `UNATTACHED_LEASE_S`.
            now: Seconds, on the clock of all calls.

        Returns:
            The new epoch: the one before plus 1.

        Raises:
            SessionHeld: The holder's lease has not ended and the scheduler may not replace it;
                metadata has `holder`, `incarnation`, `age_ms` and `lease_left_ms`.
        """
        holder = self.holder
        if holder is not None and holder != scheduler:
            if not take_over and not self._is_heir(scheduler):
                self._check_lease(holder, now)
            if holder not in self._fenced:
                self._fenced.append(holder)
        if scheduler in self._fenced:
            self._fenced.remove(scheduler)
        self._reset()
        self.session_epoch += 1
        self.holder = scheduler
        self._lease_s = lease_s
        self._is_granted = False
        self._sign_of_life_s = now
        return self.session_epoch

    def grant(self, session_epoch: int, now: float) -> None:
        """Note that the holder is answered now, and may attach; an older session is ignored."""
        if session_epoch == self.session_epoch and not self._newest_attach_id:
            self._is_granted = True
            self._sign_of_life_s = now

    def fenced(self) -> SessionLost:
        """Return the error that ends the stream of the session before the newest."""
        return SessionLost(
            f"scheduler {self.holder} opened session {self.session_epoch}",
            metadata=LossCause.FENCED.as_metadata() | self._holder_metadata(),
        )

    def _is_heir(self, scheduler: SchedulerId) -> bool:
        """Return True if the holder counts as dead and this is its next incarnation."""
        is_namesake = self.holder is not None and scheduler.name == self.holder.name
        return is_namesake and not self.attach_id and scheduler not in self._fenced

    def _check_lease(self, holder: SchedulerId, now: float) -> None:
        age_s = now - self._sign_of_life_s
        is_unattached = self._is_granted and not self._newest_attach_id
        lease_s = min(self._lease_s, UNATTACHED_LEASE_S) if is_unattached else self._lease_s
        if age_s >= lease_s:
            return
        age_ms = max(0, int(age_s * 1000))
        left_ms = max(1, int(lease_s * 1000) - age_ms)
        # No figures in the text: a scheduler asks every second or two, and logs each new text.
        raise SessionHeld(
            f"scheduler {holder} holds this executor's session and its lease has not ended; stop "
            "it, wait for that, or take over",
            metadata=self._holder_metadata()
            | {"age_ms": str(age_ms), "lease_left_ms": str(left_ms)},
        )

    def _holder_metadata(self) -> dict[str, str]:
        holder = self.holder
        return {} if holder is None else {"holder": holder.name, "incarnation": holder.incarnation}

    def attach(self, attach: Attach, now: float) -> tuple[Attached, list[bytes]]:
        """
        Begin a stream; the caller ends an older one of the session with `StreamReplaced`.

        Returns:
            The first answer, and the encoded results to send again after it, in this order.

        Raises:
            SessionLost: The boot or session is another, a step is acknowledged that was not
                completed, or a result above `acked_step_id` is dropped already.
            StreamReplaced: A stream with this or a higher attach_id was begun before.
        """
        self._check_session(attach.boot_id, attach.session_epoch)
        if attach.attach_id <= self._newest_attach_id:
            raise StreamReplaced(
                f"stream {attach.attach_id} of session {self.session_epoch} was replaced by "
                f"stream {self._newest_attach_id}"
            )
        acked = attach.acked_step_id
        if acked > self.last_completed_step_id:
            self._raise_lost(
                f"step {acked} is acknowledged, only {self.last_completed_step_id} were completed"
            )
        if acked < self.acked_step_id:
            self._raise_lost(
                f"results above {acked} are asked for, those up to {self.acked_step_id} were "
                "acknowledged and are gone"
            )
        self._sign_of_life_s = now
        self._newest_attach_id = self.attach_id = attach.attach_id
        self._acknowledge(acked)
        attached = Attached(
            boot_id=self.boot_id,
            last_received_step_id=self.last_received_step_id,
            last_completed_step_id=self.last_completed_step_id,
        )
        return attached, [self._results[step_id] for step_id in sorted(self._results)]

    def receive(self, step: Step, raw: bytes, attach_id: int, now: float) -> bool:
        """
        Take a step from a stream.

        Args:
            step: The decoded `raw`.
            raw: The message as received; kept until the step is acknowledged.
            attach_id: Id of the stream.
            now: Seconds.

        Returns:
            True if the step is new and the next in order, to be queued for execution. False if it
            is a duplicate, or if a step of this session has failed and no more steps of it run.

        Raises:
            SessionLost: The session is another, a step is missing before this one, a received step
                came again with other bytes, the step is over the credit, or it acknowledges a step
                that was not completed.
            StreamReplaced: A newer stream of the session was attached.
        """
        self._check_session(self.boot_id, step.session_epoch)
        if attach_id != self._newest_attach_id:
            raise StreamReplaced(
                f"stream {attach_id} of session {self.session_epoch} was replaced by "
                f"stream {self._newest_attach_id}"
            )
        self._sign_of_life_s = now
        if step.step_id <= self.last_received_step_id:
            known = self._received.get(step.step_id)
            if known is not None and known != raw:
                self._raise_lost(f"step {step.step_id} came again with other bytes")
            return False
        if self._failed_step_id:
            return False
        if step.step_id != self.last_received_step_id + 1:
            self._raise_lost(
                f"step {step.step_id} came after step {self.last_received_step_id}: "
                "the ones between are missing"
            )
        if step.step_id - step.acked_step_id > self._max_inflight_steps:
            self._raise_lost(
                f"step {step.step_id} came with {step.acked_step_id} acknowledged, "
                f"the credit is {self._max_inflight_steps} steps"
            )
        if step.acked_step_id > self.last_completed_step_id:
            self._raise_lost(
                f"step {step.acked_step_id} is acknowledged, only {self.last_completed_step_id} "
                "were completed"
            )
        self.last_received_step_id = step.step_id
        self._received[step.step_id] = raw
        self._acknowledge(step.acked_step_id)
        return True

    def start(self, step_id: int, now: float) -> None:
        """
        Note that a step begins to compute; check `can_execute` and the step's epoch before.

        Raises:
            InternalError: The step is not the next one in order, or another one is running.
        """
        if self.running_step_id or step_id != self.last_completed_step_id + 1:
            raise InternalError(
                f"step {step_id} was started after {self.last_completed_step_id} with step "
                f"{self.running_step_id} running"
            )
        self.running_step_id = step_id
        self._started_s = now

    def complete(
        self, session_epoch: int, step_id: int, encoded_result: bytes, *, failed: bool = False
    ) -> bool:
        """
        Keep the result of a step until it is acknowledged; that of an older session is dropped.

        Args:
            session_epoch: Session of the step.
            step_id: Id of the step.
            encoded_result: The message to send, now or after the next attach.
            failed: True for a `StepFailed`: no later step of the session will run.

        Returns:
            True if a stream of that session is attached and must get the message now.

        Raises:
            InternalError: The step is not the next one in order.
        """
        if session_epoch != self.session_epoch:
            return False
        if not self.last_completed_step_id < step_id <= self.last_received_step_id:
            raise InternalError(f"step {step_id} was completed twice or never received")
        if step_id != self.last_completed_step_id + 1:
            raise InternalError(f"step {self.last_completed_step_id + 1} was never completed")
        self.last_completed_step_id = step_id
        self.running_step_id = 0
        self._results[step_id] = encoded_result
        if failed:
            self._failed_step_id = step_id
        return self.attach_id > 0

    def heartbeat(self, now: float) -> Heartbeat:
        """Return the heartbeat to send; while a stream is attached, also renew the lease."""
        if self.attach_id:
            self._sign_of_life_s = now
        elapsed_s = now - self._started_s if self.running_step_id else 0.0
        return Heartbeat(
            running_step_id=self.running_step_id,
            elapsed_ms=max(0, int(elapsed_s * 1000)),
            last_completed_step_id=self.last_completed_step_id,
        )

    def was_stopped(self, seconds: float) -> None:
        """Leave time in which the whole process was stopped out of the running step's age."""
        self._started_s += seconds

    def detach(self, session_epoch: int, attach_id: int) -> None:
        """
        Note that a stream ended; one that was replaced, or is of an older session, is ignored. Call
        this only for streams that `attach` accepted: a refused one may have the ids of a live one.
        """
        if session_epoch == self.session_epoch and attach_id == self.attach_id:
            self.attach_id = 0

    def lose(
        self,
        why: str,
        cause: LossCause = LossCause.PROTOCOL,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """
        End the session, for example after a wrong state hash; its messages are refused then, with
        the cause and any other metadata.
        """
        if not self._lost_because:
            self._lost_because = why
            self._lost_metadata = dict(metadata or {}) | cause.as_metadata()

    def _acknowledge(self, acked: int) -> None:
        for step_id in range(self.acked_step_id + 1, acked + 1):
            del self._results[step_id], self._received[step_id]
        self.acked_step_id = max(self.acked_step_id, acked)

    def _check_session(self, boot_id: str, session_epoch: int) -> None:
        if boot_id != self.boot_id:
            raise SessionLost(
                f"this is boot {self.boot_id!r}, boot {boot_id!r} is gone",
                metadata=LossCause.NEW_BOOT.as_metadata(),
            )
        if session_epoch != self.session_epoch or session_epoch == 0:
            raise SessionLost(
                f"session {session_epoch} is over: scheduler {self.holder} holds session "
                f"{self.session_epoch}",
                metadata=LossCause.FENCED.as_metadata() | self._holder_metadata(),
            )
        if self._lost_because:
            raise SessionLost(
                f"session {session_epoch} is lost: {self._lost_because}",
                metadata=self._lost_metadata,
            )

    def _raise_lost(self, why: str) -> NoReturn:
        self.lose(why)
        raise SessionLost(f"session {self.session_epoch} is lost: {why}")
