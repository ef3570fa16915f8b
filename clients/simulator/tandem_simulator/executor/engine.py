"""One modelled executor beside its port of the core: its steps under way, its pace and its loss."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace

from scheduler_svc.core.executor_port import ExecutorPort
from scheduler_svc.core.request.geometry import ExecutorGeometry
from tandem.link.batch import Batch
from tandem.link.results import StepResult, StepTimings
from tandem_simulator.executor.executor_model import ExecutorModel, ModelledWork
from tandem_simulator.executor.step_time import StepTime

USUAL_STEP_WEIGHT = 0.1
"""Weight of the latest step in the usual duration of a step, as in the service."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flight:
    """
    A step under way.

    Attributes:
        batch: The batch.
        result: What it will bring.
        work: The work that it takes.
        start_s: Time at which the executor begins it.
        step_s: Seconds that the executor computes it.
        due_s: Time at which its result is back.
    """

    batch: Batch
    result: StepResult
    work: ModelledWork
    start_s: float
    step_s: float
    due_s: float


class Engine:
    """
    One executor.

    Attributes:
        port: The core's side towards it.
        model: Its slots, KV memory and tokens.
        flights: Steps under way, oldest first.
        handles: Completion that each slot was admitted for, until its release; else -1.
        usual_step_s: Seconds that a step usually takes; 0 before the first.
        back_s: Time at which a lost executor is back; None where it is there.
        may_plan: True where something happened since the latest plan found nothing to send.
    """

    def __init__(self, port: ExecutorPort, geometry: ExecutorGeometry, step_time: StepTime) -> None:
        self.port = port
        self.model = ExecutorModel(geometry)
        self.flights: deque[Flight] = deque()
        self.handles = [-1] * geometry.num_slots
        self.usual_step_s = 0.0
        self.back_s: float | None = None
        self.may_plan = True
        self._step_time = step_time
        self._free_s = 0.0

    @property
    def number(self) -> int:
        """Number of the executor."""
        return self.port.number

    @property
    def due_s(self) -> float:
        """Time of its next result; infinity without one."""
        return self.flights[0].due_s if self.flights else math.inf

    def send(self, batch: Batch, now: float) -> Flight:
        """Let the executor compute a batch behind those under way."""
        result, work = self.model.execute(batch)
        times = self._step_time
        step_s = times.seconds(
            work.tokens, work.context, work.pairs, work.copied_blocks, work.swapped_blocks
        )
        came_s = now + times.link_s
        start_s = max(came_s, self._free_s)
        self._free_s = start_s + step_s
        if not self.usual_step_s:
            self.usual_step_s = step_s
        self.usual_step_s += USUAL_STEP_WEIGHT * (step_s - self.usual_step_s)
        queued_ns, forward_ns = round((start_s - came_s) * 1e9), round(step_s * 1e9)
        timings = StepTimings(
            queued_ns=queued_ns, forward_ns=forward_ns, total_ns=queued_ns + forward_ns
        )
        flight = Flight(
            batch=batch,
            result=replace(result, timings=timings),
            work=work,
            start_s=start_s,
            step_s=step_s,
            due_s=self._free_s + times.link_s,
        )
        self.flights.append(flight)
        return flight

    def step_at(self, now: float) -> int | None:
        """Return the index among those under way of the step that is being computed, if any."""
        for index, flight in enumerate(self.flights):
            if flight.start_s <= now < flight.start_s + flight.step_s:
                return index
        return None

    def lose(self, back_s: float) -> dict[int, int]:
        """
        Lose the executor, with all that is under way, until `back_s`; an empty one is back then.

        Returns how many positions had been computed of each completion with a slot, by handle.
        """
        planned = self.model.planned
        for flight in reversed(self.flights):
            planned[flight.batch.row_slot] = flight.batch.row_start
        computed = {
            handle: int(planned[slot]) for slot, handle in enumerate(self.handles) if handle >= 0
        }
        geometry = self.model.geometry
        self.model = ExecutorModel(geometry)
        self.handles = [-1] * geometry.num_slots
        self.flights.clear()
        self.back_s = self._free_s = back_s
        return computed

    def come_back(self) -> None:
        """Be there again, empty."""
        self.back_s = None
        self.may_plan = True
