"""All mutable state of the core, and the moves of a request between its states."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.block_pool import BlockPool
from scheduler_svc.core.events import Ended, EventLog, Failed
from scheduler_svc.core.geometry import Limits
from scheduler_svc.core.keyed_heap import KeyedHeap
from scheduler_svc.core.options import CoreOptions
from scheduler_svc.core.policies import PrefixView
from scheduler_svc.core.queue import WaitingQueue
from scheduler_svc.core.request import FinishReason, Request, RequestState
from scheduler_svc.core.request_events import EventKind, EventRecorder
from scheduler_svc.core.slots import SlotTable
from scheduler_svc.core.stats import (
    INTER_TOKEN_BOUNDS_S,
    TTFT_BOUNDS_S,
    Counters,
    Histogram,
)
from tandem.errors import TandemError
from tandem.link.batch import Int32Column, UInt32Column


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRows:
    """
    The rows of one batch in flight, columns of shape ``[R]``, the first `num_decodes` are decodes.

    `sampling_slot` and `sampling_generation` are of the rows that sample, shape ``[S]``.
    """

    slot: NDArray[np.intp]
    generation: UInt32Column
    num_tokens: Int32Column
    sampling_slot: NDArray[np.intp]
    sampling_generation: UInt32Column
    num_decodes: int


class CoreState:
    """
    What the core knows. Planner and applier change it through the moves below.

    A request is in `by_id` and `by_handle` from acceptance to its end, and meanwhile in exactly one
        place: the queue,
    a slot, or `draining`, keyed by the slot and generation its results in flight carry.

    Attributes:
        now_s: The time of the call that is served, for moves that are not given it.
        recorder: Keeps what happened to each request; None where nobody asked.
        prefixes: What the order of the queue asks of the prefix cache; None where there is none.
    """

    def __init__(self, limits: Limits, options: CoreOptions) -> None:
        self.limits = limits
        self.options = options
        self.pool = BlockPool(limits.num_blocks)
        self.slots = SlotTable(limits)
        self.queue = WaitingQueue(options)
        self.prefixes: PrefixView | None = None
        self.deadlines: KeyedHeap[Request] = KeyedHeap()
        self.by_id: dict[str, Request] = {}
        self.by_handle: dict[int, Request] = {}
        self.draining: dict[tuple[int, int], Request] = {}
        self.in_flight: deque[PlannedRows] = deque()
        self.events = EventLog()
        self.now_s = 0.0
        self.recorder = EventRecorder.of(options)
        self.counters = Counters()
        self.ttft_s = Histogram(TTFT_BOUNDS_S)
        self.inter_token_s = Histogram(INTER_TOKEN_BOUNDS_S)

    def under_pressure(self) -> bool:
        """True while no prompt may be admitted."""
        return self.pool.usage >= self.limits.memory_threshold

    def accept(self, request: Request) -> None:
        """Take a checked request in."""
        self.by_id[request.new.request_id] = request
        self.by_handle[request.new.handle] = request
        self.queue.add(request, self.now_s)
        if request.new.deadline_s is not None:
            self.deadlines.push(request.new.deadline_s, request.number, request)
        self.counters.accepted += 1
        if self.recorder is not None:
            self.recorder.note(EventKind.ADD, request, request.new.arrival_s)

    def preempt(self, slot: int) -> None:
        """
        Take a running request's slot away; it waits again once all its results in flight were seen.
        """
        request = self.slots.request_of(slot)
        self.slots.vacate(slot)
        request.num_preemptions += 1
        self.counters.preemptions += 1
        if self.recorder is not None:
            self.recorder.note(EventKind.RETRACT, request, self.now_s, "out of memory")
        if request.applied == request.planned:
            self.wait_again(request)
        else:
            request.move(RequestState.DRAINING)
            self.draining[request.slot_key] = request

    def wait_again(self, request: Request) -> None:
        """Put a request that ran back in the queue."""
        self.draining.pop(request.slot_key, None)
        request.move(RequestState.WAITING)
        self.queue.put_back(request, self.now_s)

    def release(self, slot: int) -> None:
        """Free a vacated slot and its blocks."""
        self.pool.give_back(self.slots.forget(slot))

    def finish(
        self,
        request: Request,
        reason: FinishReason,
        now: float,
        *,
        matched_token: int | None = None,
        num_output_tokens: int | None = None,
    ) -> None:
        """
        End a request well, wherever it is; `num_output_tokens` counts up to an end found outside
        the core.
        """
        self._leave(request)
        self.counters.finished += 1
        if self.recorder is not None:
            self.recorder.note(EventKind.FINISH, request, now, reason.name)
        known = len(request.outputs)
        first_s = request.first_token_s
        self.events.add(
            Ended(
                handle=request.new.handle,
                reason=reason,
                matched_token=matched_token,
                num_prompt_tokens=request.prompt_len,
                num_output_tokens=known if num_output_tokens is None else num_output_tokens,
                num_cached_tokens=0,
                queue_s=(now if request.scheduled_s is None else request.scheduled_s)
                - request.new.arrival_s,
                first_token_s=None if first_s is None else first_s - request.new.arrival_s,
                total_s=now - request.new.arrival_s,
                num_preemptions=request.num_preemptions,
            )
        )

    def fail(self, request: Request, error: TandemError) -> None:
        """End a request by an error, wherever it is."""
        self._leave(request)
        self.counters.failed += 1
        if self.recorder is not None:
            self.recorder.note(EventKind.FAIL, request, self.now_s, error.reason)
        self.events.add(Failed(handle=request.new.handle, error=error))

    def forget_executor(self, limits: Limits) -> None:
        """
        Start over with an empty executor: who ran or drained waits again, in arrival order, outputs
        kept.
        """
        ran = [request for request in self.slots.requests if request is not None]
        for request in ran:
            assert request.slot is not None
            self.slots.vacate(request.slot)
            if self.recorder is not None:
                self.recorder.note(EventKind.RETRACT, request, self.now_s, "executor lost")
        for request in [*ran, *self.draining.values()]:
            self.wait_again(request)
        self.in_flight.clear()
        self.limits = limits
        self.pool = BlockPool(limits.num_blocks)
        self.slots = SlotTable(limits)

    def note_first_tokens(self, requests: list[Request], now: float) -> None:
        """Remember when each of these requests produced its first token."""
        waits: NDArray[np.float64] = np.array([now - r.new.arrival_s for r in requests])
        self.ttft_s.observe(waits)
        for request in requests:
            request.first_token_s = now

    def _leave(self, request: Request) -> None:
        if request.slot is not None:
            self.slots.vacate(request.slot)
        elif request.state is RequestState.DRAINING:
            del self.draining[request.slot_key]
        else:
            self.queue.discard(request)
        request.move(RequestState.ENDED)
        self.deadlines.discard(request.number)
        del self.by_id[request.new.request_id]
        del self.by_handle[request.new.handle]
