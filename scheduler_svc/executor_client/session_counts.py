"""Counts of sessions with executors since the start."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.link.session import LossCause


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
