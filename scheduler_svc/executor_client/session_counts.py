"""What happened to sessions with executors since the start."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.link.session import LossCause


@dataclass(slots=True, eq=False, kw_only=True)
class SessionCounts:
    """
    Numbers that only grow; see tandem.admin.v1.GetStatsResponse.

    Attributes:
        sessions: Sessions opened.
        reattachments: Broken streams that were attached again.
        losses: Sessions lost, however.
        steps_sent_again: Steps that the executor had not received when a stream broke.
        state_hash_mismatches: Sessions lost because the two ends held different slots: bugs.
        fencings: Sessions lost to another scheduler.
    """

    sessions: int = 0
    reattachments: int = 0
    losses: int = 0
    steps_sent_again: int = 0
    state_hash_mismatches: int = 0
    fencings: int = 0

    def note_loss(self, cause: LossCause) -> None:
        """A session was lost."""
        self.losses += 1
        self.state_hash_mismatches += cause is LossCause.STATE_HASH
        self.fencings += cause is LossCause.FENCED
