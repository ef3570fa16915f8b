"""How much of its time an executor is idle although requests run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleReport:
    """
    Totals since the start; two reports tell about the time between them by their differences.

    Attributes:
        steps: Steps whose time is counted, those followed by another while requests ran.
        rows: Rows of these steps.
        busy_ns: What these steps should have taken: their number times the fixed time.
        idle_ns: What passed beyond that from their starts to the starts of the next ones.
        host_ns: The part of `busy_ns` in which a batch was applied to the slot state.
    """

    steps: int
    rows: int
    busy_ns: int
    idle_ns: int
    host_ns: int

    @property
    def idle_percent(self) -> float:
        """Idle time over all time while requests ran."""
        return 100.0 * self.idle_ns / max(1, self.busy_ns + self.idle_ns)


class IdleAccount:
    """
    Adds up while steps run. Written by the runner thread, `report` may be read by any other.

    A step counts from its start to the start of the next one. What exceeds the fixed time is idle:
    waiting for the next step, taking and delivering, and waking late, be it the timer's fault or
    that of a thread which held the interpreter's lock. Time without a live slot does not count.
    """

    def __init__(self) -> None:
        self._report = IdleReport(steps=0, rows=0, busy_ns=0, idle_ns=0, host_ns=0)
        self._started_ns: int | None = None
        self._rows = self._step_ns = self._host_ns = 0

    @property
    def report(self) -> IdleReport:
        """The totals so far."""
        return self._report

    def start(self, now_ns: int) -> None:
        """Note that a step begins; closes the one before."""
        began_ns, self._started_ns = self._started_ns, now_ns
        if began_ns is None:
            return
        past = self._report
        self._report = IdleReport(
            steps=past.steps + 1,
            rows=past.rows + self._rows,
            busy_ns=past.busy_ns + self._step_ns,
            idle_ns=past.idle_ns + max(0, now_ns - began_ns - self._step_ns),
            host_ns=past.host_ns + self._host_ns,
        )

    def end(self, *, rows: int, step_ns: int, host_ns: int, requests_run: bool) -> None:
        """
        Note that the step is over.

        Args:
            rows: It had.
            step_ns: It should have taken.
            host_ns: Of these went into applying the batch.
            requests_run: Slots are live after it: waiting for the next step counts.
        """
        self._rows, self._step_ns, self._host_ns = rows, step_ns, host_ns
        if not requests_run:
            self._started_ns = None

    def forget(self) -> None:
        """Count no time until the next step starts: slots were reset."""
        self._started_ns = None
