"""Suspension of steps: the mode that was asked for, and the one that the executor knows of."""

from __future__ import annotations

from scheduler_svc.core.invariants import require
from tandem.link.commands import KvMode


class Suspension:
    """
    Wish to plan no steps for a while, and how far the executor was told.

    Attributes:
        mode: Mode in which steps are to be suspended; None for none.
        sent_mode: Mode in which the executor suspended, until it is told to resume; None for none.
    """

    __slots__ = ("mode", "sent_mode")

    def __init__(self) -> None:
        self.mode: KvMode | None = None
        self.sent_mode: KvMode | None = None

    @property
    def is_in_force(self) -> bool:
        """True from `begin` until the end was asked for and the executor told of it."""
        return self.mode is not None or self.sent_mode is not None

    @property
    def is_command_due(self) -> bool:
        """True while the executor is yet to be told of the mode, or of the end."""
        return self.sent_mode is not self.mode

    def begin(self, mode: KvMode) -> None:
        """Ask for a suspension in this mode."""
        self.mode = mode

    def end(self) -> None:
        """Ask for the end of the suspension, if there is one."""
        self.mode = None

    def note_told(self) -> None:
        """Note that the executor is told to suspend in the mode that was asked for."""
        self.sent_mode = self.mode

    def note_resumed(self) -> None:
        """Note that the executor is told to resume, or is another one, which knows of none."""
        self.sent_mode = None

    def check_integrity(self, num_live: int) -> None:
        """
        Compare with the number of live slots.

        Raises:
            InternalError: A slot is live though the executor dropped the KV of all.
        """
        has_dropped = self.sent_mode is KvMode.RECOMPUTE
        require(not (has_dropped and num_live), "a slot is live whose KV a suspension dropped")
