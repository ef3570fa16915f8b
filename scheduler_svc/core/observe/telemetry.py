"""The numbers, lines and events of requests that operators are told."""

from __future__ import annotations

from scheduler_svc.core.invariants import require
from scheduler_svc.core.observe.latencies import Latencies
from scheduler_svc.core.observe.request_events import EventKind, EventRecorder
from scheduler_svc.core.observe.stats import Counters
from scheduler_svc.core.observe.step_log import StepLog
from scheduler_svc.core.request.options import CoreOptions
from scheduler_svc.core.request.request import Request


class Telemetry:
    """
    Record of what happens in a cell; nothing that is planned depends on it.

    Attributes:
        counters: Numbers that only grow.
        latencies: Histograms of the latencies that clients see.
        step_log: Lines for operators about steps.
        recorder: Recorder of events per request; None where no such events are asked for.
    """

    __slots__ = ("counters", "latencies", "recorder", "step_log")

    def __init__(self, options: CoreOptions) -> None:
        self.counters = Counters()
        self.latencies = Latencies()
        self.step_log = StepLog()
        self.recorder = EventRecorder.of(options)

    @property
    def is_decode_line_due(self) -> bool:
        """True from the step with decodes on that has a line, until the line is written."""
        return self.counters.decode_steps >= self.step_log.due_step

    def note_accepted(self, request: Request, *, is_first: bool) -> None:
        """Count an accepted request; `is_first` says that no other is in the system."""
        if is_first:
            self.step_log.wake(request.new.arrival_s, self.counters.compute.output_tokens)
        self.counters.requests.accepted_requests += 1
        self.note(EventKind.ADD, request, request.new.arrival_s)

    def note(self, kind: EventKind, request: Request, now: float, detail: str = "") -> None:
        """Record an event of a request, if request events are kept."""
        if self.recorder is not None:
            self.recorder.note(kind, request, now, detail)

    def check_integrity(self, num_live: int) -> None:
        """
        Compare the counts of requests with the number in the system.

        Raises:
            InternalError: Accepted requests were lost, or ended twice.
        """
        counters = self.counters.requests
        num_ended = counters.finished_requests + counters.failed_requests
        in_system = counters.accepted_requests - num_ended
        require(in_system == num_live, "accepted requests were lost or ended twice")
