"""One modelled executor beside its port of the core: its steps under way, its pace and its loss."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace

import numpy as np

from scheduler_svc.core.executor_port import ExecutorPort
from scheduler_svc.core.request.geometry import ExecutorGeometry
from tandem.link.batch import ROW_SAMPLES, Batch
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
        done_s: Time at which the executor is done with it.
        step_s: Seconds that each stage of the executor computes it.
        due_s: Time at which its result is back.
    """

    batch: Batch
    result: StepResult
    work: ModelledWork
    start_s: float
    done_s: float
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

    def __init__(
        self,
        port: ExecutorPort,
        geometry: ExecutorGeometry,
        step_time: StepTime,
        num_stages: int = 1,
    ) -> None:
        self.port = port
        self.model = ExecutorModel(geometry)
        self.flights: deque[Flight] = deque()
        self.handles = [-1] * geometry.num_slots
        self.usual_step_s = 0.0
        self.back_s: float | None = None
        self.may_plan = True
        self._step_time = step_time
        self._free_s = [0.0] * num_stages
        """Time from which on each stage is free."""
        self._sampled_s = np.zeros(geometry.num_slots)
        """Time at which the first stage has the latest token of each slot, if there are more."""

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
        step_s /= len(self._free_s)
        came_s = now + times.link_s
        start_s, done_s = self._pass_stages(batch, came_s, step_s)
        if not self.usual_step_s:
            self.usual_step_s = step_s
        self.usual_step_s += USUAL_STEP_WEIGHT * (step_s - self.usual_step_s)
        queued_ns, forward_ns = round((start_s - came_s) * 1e9), round((done_s - start_s) * 1e9)
        timings = StepTimings(
            queued_ns=queued_ns, forward_ns=forward_ns, total_ns=queued_ns + forward_ns
        )
        flight = Flight(
            batch=batch,
            result=replace(result, timings=timings),
            work=work,
            start_s=start_s,
            done_s=done_s,
            step_s=step_s,
            due_s=done_s + times.link_s,
        )
        self.flights.append(flight)
        return flight

    def _pass_stages(self, batch: Batch, came_s: float, step_s: float) -> tuple[float, float]:
        """
        Let the stages compute a step, `step_s` each, as soon as they are free and have its input:
        the first the tokens of all its rows. Returns when the first begins and the last is done.
        """
        free_s, hop_s = self._free_s, self._step_time.hop_s
        if len(free_s) == 1:
            start_s = max(came_s, free_s[0])
            free_s[0] = start_s + step_s
            return start_s, free_s[0]
        self._sampled_s[[admission.slot for admission in batch.admits]] = 0.0
        known_s = float(self._sampled_s[batch.row_slot].max(initial=0.0))
        begin_s = start_s = max(came_s, known_s, free_s[0])
        for stage, other_s in enumerate(free_s):
            begin_s = max(begin_s, other_s)
            free_s[stage] = begin_s + step_s
            begin_s = free_s[stage] + hop_s
        self._sampled_s[batch.row_slot[batch.row_flags == ROW_SAMPLES]] = begin_s
        return start_s, free_s[-1]

    def step_at(self, now: float) -> int | None:
        """Return the index among those under way of the oldest step being computed, if any."""
        for index, flight in enumerate(self.flights):
            if flight.start_s <= now < flight.done_s:
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
        self.back_s = back_s
        self._free_s = [back_s] * len(self._free_s)
        return computed

    def come_back(self) -> None:
        """Be there again, empty."""
        self.back_s = None
        self.may_plan = True
