"""Account of the time in which a device is idle although requests run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """
    Times of one step on the device, in nanoseconds of the monotonic clock.

    Attributes:
        rows: Rows of the step.
        start_ns: Time at which the device begins the step.
        end_ns: Time at which the device has done it.
        host_ns: Duration of the host's work before, which is applying the batch.
    """

    rows: int
    start_ns: int
    end_ns: int
    host_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleReport:
    """
    Totals since the start; the difference of two reports describes the time between them.

    Attributes:
        steps: Steps given to the device.
        rows: Rows of these steps.
        busy_ns: Nanoseconds that these steps take.
        idle_ns: Nanoseconds from the end of a step to the start of the next, while requests ran.
        host_ns: Nanoseconds that the host spent on launching them.
    """

    steps: int
    rows: int
    busy_ns: int
    idle_ns: int
    host_ns: int

    @property
    def idle_percent(self) -> float:
        """Idle time as a percentage of all time in which requests ran."""
        return 100.0 * self.idle_ns / max(1, self.busy_ns + self.idle_ns)


class IdleAccount:
    """
    Running totals of a device's busy and idle time.

    The runner thread adds each step that it launches; any thread may read `report`, which is
    replaced as a whole. All time between two steps is idle time: until the host receives the next
    batch, takes it and applies it. Only time in which no slot is live does not count.
    """

    def __init__(self) -> None:
        self._report = IdleReport(steps=0, rows=0, busy_ns=0, idle_ns=0, host_ns=0)
        self._last_end_ns: int | None = None

    @property
    def report(self) -> IdleReport:
        """Totals so far."""
        return self._report

    def add(self, step: StepTimes, *, requests_run: bool) -> None:
        """
        Add a launched step.

        Args:
            step: Times of the step.
            requests_run: Requests run after it, so that the wait for the next step counts as idle.
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
        """Count no time until the next step, because all slots were reset."""
        self._last_end_ns = None
