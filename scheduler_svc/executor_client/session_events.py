"""
Events of a session with an executor, on which the core loop acts in the order of the queue, and
counts of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler_svc.core.faults.refusals import Refusal
from scheduler_svc.executor_client.link_events import SessionOpened
from tandem.link.results import StepFailed, StepResult
from tandem.link.session import LossCause


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionEnded:
    """
    End of a session: all slots, blocks and steps in flight are lost.

    Attributes:
        cause: Cause of the loss.
        died_in: Index of the step that may be to blame, counted from the oldest in flight; None if
            no step is.
        may_live: Boot id of the executor if it is unknown whether it died, else empty; an
            ExecutorSeen may tell later.
        refusal: Batch of ours that the executor refused; None if it refused none.
        failed: Step whose failure ended the session, as the executor tells it; None for other ends.
        message: Cause in words, for operators; events of equal consequence may differ in it.
    """

    cause: LossCause
    died_in: int | None
    may_live: str
    refusal: Refusal | None = None
    failed: StepFailed | None = None
    message: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorSeen:
    """
    News of an executor that was lost with `may_live`: it has died, or was seen alive. No session is
    open.
    """

    boot_id: str
    died: bool


class SilentExecutors:
    """Executors that fell silent and may live. Owned by the session."""

    def __init__(self) -> None:
        self._boot_ids: dict[str, str] = {}
        """Boot id by the address at which it was."""

    def note(self, boot_id: str, address: str) -> None:
        """Note that an executor fell silent."""
        self._boot_ids[address] = boot_id

    def seen(self, boot_id: str, address: str) -> list[ExecutorSeen]:
        """
        Return what follows when a boot answers at an address, and forget the executors it is about.

        If it is a silent boot itself, that executor lives. If it is another boot at the address of
        a silent one, that executor has died.
        """
        news = []
        for where, silent in list(self._boot_ids.items()):
            if silent == boot_id or where == address:
                del self._boot_ids[where]
                news.append(ExecutorSeen(boot_id=silent, died=silent != boot_id))
        return news


@dataclass(slots=True, eq=False, kw_only=True)
class SessionCounts:
    """
    Counters that only grow, named as their fields of tandem.admin.v1.GetStatsResponse.

    Attributes:
        executor_sessions: Number of sessions opened.
        executor_reattachments: Number of streams attached in place of a broken one.
        executor_losses: Number of sessions lost for any cause.
        steps_sent_again: Number of steps that the executor had not received when a stream broke.
        state_hash_mismatches: Number of sessions lost because the two ends held different slot
            states; each is a bug.
        executor_fencings: Number of sessions lost to another scheduler.
    """

    executor_sessions: int = 0
    executor_reattachments: int = 0
    executor_losses: int = 0
    steps_sent_again: int = 0
    state_hash_mismatches: int = 0
    executor_fencings: int = 0

    def note_loss(self, cause: LossCause) -> None:
        """Count a session that was lost."""
        self.executor_losses += 1
        self.state_hash_mismatches += cause is LossCause.STATE_HASH
        self.executor_fencings += cause is LossCause.FENCED


SessionEvent = StepResult | SessionOpened | SessionEnded | ExecutorSeen
"""
One event that the loop must act on. A StepResult is the next in order and stands for itself, as
there is one per step.
"""
