"""How much of its time a device is idle although requests run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """
    One step on the device, monotonic nanoseconds.

    Attributes:
        rows: It has.
        start_ns: When the device begins.
        end_ns: When it is done.
        host_ns: What the host spent on applying the batch before.
    """

    rows: int
    start_ns: int
    end_ns: int
    host_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleReport:
    """
    Totals since the start; two reports tell about the time between them by their differences.

    Attributes:
        steps: Steps given to the device.
        rows: Rows of these steps.
        busy_ns: What they take.
        idle_ns: From the end of one to the start of the next, while requests ran.
        host_ns: What the host spent on launching them.
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
    Adds up while steps are launched. Written by the runner thread; any thread may read `report`,
    which is replaced whole.

    Whatever keeps the device from its next step is idle time: waiting for it, taking it, applying
    it. Only time in which no slot is live does not count.
    """

    def __init__(self) -> None:
        self._report = IdleReport(steps=0, rows=0, busy_ns=0, idle_ns=0, host_ns=0)
        self._last_end_ns: int | None = None

    @property
    def report(self) -> IdleReport:
        """The totals so far."""
        return self._report

    def add(self, step: StepTimes, *, requests_run: bool) -> None:
        """
        Add a launched step.

        Args:
            step: Its times.
            requests_run: Slots are live after it: waiting for the next step counts.
        """
        last_end_ns = self._last_end_ns
        past = self._report
        self._report = IdleReport(
            steps=past.steps + 1,
            rows=past.rows + step.rows,
            busy_ns=past.busy_ns + step.end_ns - step.start_ns,
            idle_ns=past.idle_ns + (0 if last_end_ns is None else step.start_ns - last_end_ns),
            host_ns=past.host_ns + step.host_ns,
        )
        self._last_end_ns = step.end_ns if requests_run else None

    def forget(self) -> None:
        """Count no time until the next step: slots were reset."""
        self._last_end_ns = None
