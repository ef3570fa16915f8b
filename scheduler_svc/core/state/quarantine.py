"""
The one executor that runs requests with marks, and executors that die of anything.

Among several executors a request that kills would kill one after the other. So from the first death
on, the requests of the step that died run on one executor only, the *quarantined* one; all others
go on with requests without a mark. Which one it is may change, see `faults.quarantine`.
"""

from __future__ import annotations

from scheduler_svc.core.invariants import require

CAUTIOUS_STEPS = 64
"""Steps after a death that are sent one at a time, while any request has a mark."""
PATIENCE_S = 30.0
"""
Seconds that suspects wait for the quarantined executor to come back before another takes them over;
twice as long each time, so that requests that kill take ever fewer executors away.
"""


class Quarantine:
    """
    The executor that requests with marks are confined to.

    Attributes:
        number: Its number; None while no request has a mark, or until an executor takes it over.
        broken: Executors that die of anything, by number, and the number of results at which each
            is trusted again.
    """

    __slots__ = (
        "_caution_left",
        "_deaths_in_row",
        "_out_since_s",
        "_patience_s",
        "broken",
        "number",
    )

    def __init__(self) -> None:
        self.number: int | None = None
        self.broken: dict[int, int] = {}
        self._caution_left = 0
        self._deaths_in_row: dict[int, tuple[int, int]] = {}
        """Deaths in a row that no mark explains, and the number of results at the latest."""
        self._out_since_s: float | None = None
        self._patience_s = PATIENCE_S

    @property
    def is_cautious(self) -> bool:
        """True for some steps after a death."""
        return self._caution_left > 0

    def begin_caution(self) -> None:
        """Let one step at a time be in flight for a while, after a death or on another executor."""
        self._caution_left = CAUTIOUS_STEPS

    def note_step(self) -> None:
        """Count a result of the quarantined executor."""
        self._caution_left = max(self._caution_left - 1, 0)

    def move_to(self, number: int) -> None:
        """Let this executor, and no other, run requests with marks from now on."""
        self.number = number
        self._out_since_s = None
        self.begin_caution()

    def open(self) -> None:
        """Let another executor take over; until one does, no request with a mark runs."""
        self.number = None
        self._out_since_s = None

    def end(self) -> None:
        """Confine no request any more, as none has a mark."""
        self.open()
        self._patience_s = PATIENCE_S

    def note_in(self) -> None:
        """Note that the quarantined executor is there."""
        self._out_since_s = None

    def is_out_for_long(self, now: float) -> bool:
        """
        Note that no quarantined executor is there now; returns True once that has lasted so long
        that suspects wait for it no longer.
        """
        if self._out_since_s is None:
            self._out_since_s = now
        return now - self._out_since_s >= self._patience_s

    def lose_patience(self) -> None:
        """Let suspects wait for twice as long next time, as they were taken over this time."""
        self._patience_s *= 2

    def note_unexplained(self, number: int, num_results: int) -> int:
        """
        Count a death in a step of requests of which none had a mark; returns the number of such
        deaths of this executor with at most `CAUTIOUS_STEPS` results from each to the next.

        Args:
            number: The executor.
            num_results: Its results so far.
        """
        count, latest = self._deaths_in_row.get(number, (0, 0))
        count = count + 1 if num_results - latest <= CAUTIOUS_STEPS else 1
        self._deaths_in_row[number] = count, num_results
        return count

    def note_broken(self, number: int, num_results: int) -> None:
        """Note that an executor is to blame for deaths itself; it has had so many results."""
        self.broken[number] = num_results + CAUTIOUS_STEPS
        self._deaths_in_row.pop(number, None)

    def is_broken(self, number: int, num_results: int) -> bool:
        """Return True until an executor that died of anything has got on for some steps."""
        trusted_at = self.broken.get(number)
        if trusted_at is None:
            return False
        if num_results < trusted_at:
            return True
        del self.broken[number]
        return False

    def forget(self, number: int) -> None:
        """Forget an executor that left; no other will have its number."""
        self.broken.pop(number, None)
        self._deaths_in_row.pop(number, None)
        if self.number == number:
            self.open()

    def check_integrity(self, *, has_marks: bool) -> None:
        """
        Check that there is a quarantine only where it confines something.

        Raises:
            InternalError: No request has a mark, and an executor is quarantined.
        """
        require(has_marks or self.number is None, "an executor is quarantined for no request")
        require(0 <= self._caution_left <= CAUTIOUS_STEPS, "caution has no end")
        require(self._patience_s >= PATIENCE_S, "suspects wait too short")
