"""The newest steps and faults of the core process, which operators' views show."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple

from scheduler_svc.core.request.events import Failed
from scheduler_svc.executor_client.session_events import SessionEnded
from scheduler_svc.ipc.activity import MAX_STEPS, ActivitySnapshot, FaultEntry, StepSample
from scheduler_svc.ipc.snapshot import HistogramSnapshot
from tandem.admin.v1 import activity_pb2
from tandem.link.batch import Batch
from tandem.link.commands import Command
from tandem.link.results import StepResult, StepTimings

MAX_FAULTS = 32
"""Faults that differ in kind, place or reason; the one that came again last is kept longest."""
MAX_MESSAGE_CHARS = 500


class _Step(NamedTuple):
    """An applied step, of which a sample is made once one is asked for."""

    executor: str
    num_tokens: int
    num_rows: int
    timings: StepTimings
    is_graph: bool
    total_s: float
    """Seconds from sending it to its result."""
    at_s: float
    """Time of the result, on the clock of every `now`."""


class Activity:
    """Ring buffers of what happened lately. Owned by the core loop."""

    def __init__(self, started_s: float) -> None:
        """
        Args:
            started_s: Start of the scheduler, on the clock of every `now`.
        """
        self._started_s = started_s
        self._num_steps = 0
        self._steps: deque[_Step] = deque(maxlen=MAX_STEPS)
        self._faults: dict[tuple[int, str, str], FaultEntry] = {}  # the newest is the last

    def note_step(
        self,
        executor: str,
        command: Command,
        result: StepResult,
        *,
        num_tokens: int,
        total_s: float,
        now: float,
    ) -> None:
        """
        Note a step whose result was applied.

        Args:
            executor: Address of its executor.
            command: Batch or command of the step, of which nothing is kept but the number of rows.
            result: Its result.
            num_tokens: Number of its tokens, which are counted once for all that shows them.
            total_s: Seconds from sending it to the result.
            now: Time of the result.
        """
        self._num_steps += 1
        num_rows = len(command.row_slot) if isinstance(command, Batch) else 0
        is_graph = result.graph > 0
        timings = result.timings
        self._steps.append(_Step(executor, num_tokens, num_rows, timings, is_graph, total_s, now))

    def note_loss(self, executor: str, event: SessionEnded, now: float) -> None:
        """Note that a session with an executor was lost."""
        self._note(
            activity_pb2.FAULT_KIND_EXECUTOR_LOST,
            now,
            where=executor,
            reason=event.cause.value,
            message=event.message,
        )

    def note_failures(self, failed: Sequence[Failed], now: float) -> None:
        """Note requests that ended by an error, once for each reason."""
        for reason, count in Counter(one.error.reason for one in failed).items():
            kind = activity_pb2.FAULT_KIND_REQUESTS_FAILED
            self._note(kind, now, reason=reason, count=count)

    def note_frontend_gone(self, frontend: int, now: float) -> None:
        """Note that a frontend process ended."""
        self._note(activity_pb2.FAULT_KIND_FRONTEND_GONE, now, where=str(frontend))

    def note_bookkeeping(self, message: str, now: float) -> None:
        """Note an inconsistency that the core found in itself."""
        self._note(activity_pb2.FAULT_KIND_BOOKKEEPING, now, message=message)

    def snapshot(
        self, histograms: dict[str, HistogramSnapshot], *, max_steps: int, now: float
    ) -> ActivitySnapshot:
        """Return the newest steps and faults, beside the histograms of this moment."""
        count = min(max_steps, len(self._steps))
        newest = list(self._steps)[len(self._steps) - count :]
        first = self._num_steps - count + 1
        return ActivitySnapshot(
            uptime_s=now - self._started_s,
            histograms=histograms,
            steps=tuple(self._sample(number, step) for number, step in enumerate(newest, first)),
            faults=tuple(self._faults.values()),
        )

    def _sample(self, number: int, step: _Step) -> StepSample:
        return StepSample(
            number=number,
            executor=step.executor,
            at_s=step.at_s - self._started_s,
            total_s=step.total_s,
            compute_s=step.timings.compute_ns / 1e9,
            tokens=step.num_tokens,
            requests=step.num_rows,
            is_graph=step.is_graph,
        )

    def _note(
        self,
        kind: int,
        now: float,
        *,
        where: str = "",
        reason: str = "",
        message: str = "",
        count: int = 1,
    ) -> None:
        """Add a fault as the newest; one of the same kind, place and reason is counted in it."""
        key = (int(kind), where, reason)
        known = self._faults.pop(key, None)
        if known is not None:
            count += known.count
        elif len(self._faults) == MAX_FAULTS:
            del self._faults[next(iter(self._faults))]
        self._faults[key] = FaultEntry(
            kind=int(kind),
            at_s=now - self._started_s,
            where=where,
            reason=reason,
            message=message[:MAX_MESSAGE_CHARS],
            count=count,
        )
