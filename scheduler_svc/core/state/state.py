"""All mutable state of the core, and the moves of a request between its states."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.kv_cache.block_pool import BlockPool
from scheduler_svc.core.kv_cache.host_blocks import HostBlocks
from scheduler_svc.core.kv_cache.prefix_cache import PrefixCache
from scheduler_svc.core.kv_cache.prefix_index import PrefixIndex
from scheduler_svc.core.observe.request_events import EventKind, EventRecorder
from scheduler_svc.core.observe.stats import (
    INTER_TOKEN_BOUNDS_S,
    TTFT_BOUNDS_S,
    Counters,
    Histogram,
)
from scheduler_svc.core.observe.step_log import StepLog
from scheduler_svc.core.queue.keyed_heap import KeyedHeap
from scheduler_svc.core.queue.policies import PrefixView
from scheduler_svc.core.queue.queue import WaitingQueue
from scheduler_svc.core.queue.retry_advice import RetryAdvice
from scheduler_svc.core.queue.tenants import TenantCounts
from scheduler_svc.core.request.events import Ended, EventLog, Failed
from scheduler_svc.core.request.geometry import Limits
from scheduler_svc.core.request.options import CoreOptions, Eviction, PreemptionMode
from scheduler_svc.core.request.request import FinishReason, Request, RequestState
from scheduler_svc.core.slots.planned_rows import PlannedRows
from scheduler_svc.core.slots.slots import SlotTable
from scheduler_svc.core.state.new_token_ratio import NewTokenRatio
from scheduler_svc.core.state.step_room import StepRoom
from scheduler_svc.core.state.suspects import Suspects, UnprovenDeath
from tandem.errors import TandemError
from tandem.link.batch import KvMode


@dataclass(slots=True)
class Suspension:
    """Mode in which steps are to be suspended, and the one sent to the executor; None for none."""

    mode: KvMode | None = None
    sent_mode: KvMode | None = None


class CoreState:
    """
    State of the core. Planning and output processing change it through the moves below.

    A request is in `by_id` and `by_handle` from acceptance to its end, and meanwhile in exactly one
    place: the queue, a slot, or `draining`, keyed by the slot and generation its results in flight
    carry.

    Attributes:
        paused: Slots that hold their blocks and are in no step until there is one more block for
            each, in the order in which they were paused.
        swapping: Slots to be released with a copy of their blocks to host memory, each with the
            number of the request that held it.
        ratio: Share of the output still allowed that is expected to be produced.
        is_full: True when a request did not fit beside the running ones, so that none is admitted
            until a running or waiting request is gone.
        suspension: Suspension of steps that was asked for, and the one the executor was told of.
        may_give_way: Running requests that may lose their slot to a better priority, worst first.
        now_s: Time of the call that is being handled, for moves that are not given it.
        recorder: Recorder of events per request; None where no such events are asked for.
        suspects: Requests that may be the cause of executor deaths.
        unproven_deaths: Steps that ran when executors which may still live fell silent, by boot id.
        room: Size of steps for which the executor turned out to have memory.
        leaving: Last request of each slot that is yet to be released.
        prefix_cache: Prefix cache over pool and slots.
    """

    def __init__(self, limits: Limits, options: CoreOptions) -> None:
        self.limits = limits
        self.options = options
        self.pool = _pool(limits, options)
        self.slots = SlotTable(limits)
        self.prefix_cache = PrefixCache(self.slots, self.pool)
        self.leaving: dict[int, Request] = {}
        self.queue = WaitingQueue(options)
        self.may_give_way: KeyedHeap[Request] = KeyedHeap()
        self.tenants = TenantCounts()
        self.retry_advice = RetryAdvice()
        self.deadlines: KeyedHeap[Request] = KeyedHeap()
        self.by_id: dict[str, list[Request]] = {}
        self.by_handle: dict[int, Request] = {}
        self.draining: dict[tuple[int, int], Request] = {}
        self.in_flight: deque[PlannedRows] = deque()
        self.paused: dict[int, None] = {}
        self.host = HostBlocks(limits.num_host_blocks)
        self.swapping: dict[int, int] = {}
        self.ratio = NewTokenRatio(options.schedule_conservativeness)
        self.is_full = False
        self.suspension = Suspension()
        self.step_log = StepLog()
        self.events = EventLog()
        self.now_s = 0.0
        self.recorder = EventRecorder.of(options)
        self.suspects = Suspects()
        self.unproven_deaths: dict[str, UnprovenDeath] = {}
        self.room = StepRoom()
        self.counters = Counters()
        self.ttft_s = Histogram(TTFT_BOUNDS_S)
        self.inter_token_s = Histogram(INTER_TOKEN_BOUNDS_S)

    @property
    def prefixes(self) -> PrefixView | None:
        """View of the prefix cache for the order of the queue; None where prefix caching is off."""
        return self.prefix_cache if self.options.prefix_caching else None

    def note_full(self) -> None:
        """
        Note that a waiting request does not fit, so that none is admitted until a request is gone:
        nothing else makes room, since running requests only take more blocks.
        """
        self.is_full = self.slots.num_running > 0

    def under_pressure(self) -> bool:
        """Return True while KV use is so high that no prompt may be admitted."""
        return self.pool.usage >= self.limits.memory_threshold

    def accept(self, request: Request) -> None:
        """Accept one choice of a checked request into the waiting queue."""
        if not self.by_id:
            self.step_log.wake(request.new.arrival_s, self.counters.output_tokens)
        request.siblings = self.by_id.setdefault(request.new.request_id, request.siblings)
        request.siblings.append(request)
        self.by_handle[request.new.handle] = request
        self.queue.add(request, self.now_s)
        if self.options.priority_preemption:
            self.is_full = False
        if request.new.deadline_s is not None:
            self.deadlines.push(request.new.deadline_s, request.number, request)
        self.counters.accepted += 1
        self.tenants.add(request.new.tenant)
        if self.recorder is not None:
            self.recorder.note(EventKind.ADD, request, request.new.arrival_s)

    def pause(self, slot: int) -> None:
        """Leave a decoding request out of every step until `unpause`."""
        self.slots.set_decoding(slot, False)
        self.paused[slot] = None
        self.slots.request_of(slot).move(RequestState.PAUSED)

    def unpause(self, slot: int) -> None:
        """Resume decoding of a paused request."""
        del self.paused[slot]
        self.slots.set_decoding(slot, True)
        self.slots.request_of(slot).move(RequestState.DECODE)

    def preempt(self, slot: int, detail: str = "out of memory") -> None:
        """
        Preempt a running request: it loses its slot, and waits again once all its results in flight
        were seen.
        """
        request = self.slots.request_of(slot)
        was_paused = slot in self.paused
        self.vacate(slot)
        self._plan_swap(slot, request)
        request.num_preemptions += 1
        self.counters.preemptions += 1
        if self.recorder is not None:
            kind = EventKind.EVICT if was_paused else EventKind.RETRACT
            self.recorder.note(kind, request, self.now_s, detail)
        if request.applied == request.planned:
            self.wait_again(request)
        else:
            request.move(RequestState.DRAINING)
            self.draining[request.slot_key] = request

    def wait_again(self, request: Request) -> None:
        """Put a preempted request back in the waiting queue."""
        self.draining.pop(request.slot_key, None)
        request.move(RequestState.WAITING)
        self.queue.put_back(request, self.now_s)

    def vacate(self, slot: int) -> None:
        """Take a slot away from its request; the slot is released in the next batch."""
        self.is_full = False
        self.paused.pop(slot, None)
        request = self.slots.request_of(slot)
        self.may_give_way.discard(-request.number)
        self.prefix_cache.note_vacated(slot)
        self.leaving[slot] = request
        self.slots.vacate(slot)

    def release(self, slot: int) -> None:
        """Free a vacated slot and its blocks; the cached ones can be matched from now on."""
        self.prefix_cache.release(slot, self.leaving.pop(slot), self.slots.forget(slot))

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
        End a request without an error, whatever its state; `num_output_tokens` counts its output
        up to an end that was found outside the core.
        """
        self._leave(request)
        got_on = reason not in {FinishReason.CANCELLED, FinishReason.DEADLINE}
        self.suspects.note_left(request.number, got_on=got_on)
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
                num_cached_tokens=request.num_cached_tokens,
                queue_s=(now if request.scheduled_s is None else request.scheduled_s)
                - request.new.arrival_s,
                first_token_s=None if first_s is None else first_s - request.new.arrival_s,
                total_s=now - request.new.arrival_s,
                num_preemptions=request.num_preemptions,
            )
        )

    def fail(self, request: Request, error: TandemError) -> None:
        """End a request by an error, whatever its state."""
        self._leave(request)
        self.suspects.note_left(request.number, got_on=False)
        self.counters.failed += 1
        if self.recorder is not None:
            self.recorder.note(EventKind.FAIL, request, self.now_s, error.reason)
        self.events.add(Failed(handle=request.new.handle, error=error))

    def forget_executor(self, limits: Limits) -> None:
        """
        Start over with an empty executor: requests that ran or drained wait again, in arrival
        order, and keep their outputs.
        """
        ran = [request for request in self.slots.requests if request is not None]
        lost = [*self.slots.planned[self.slots.running].tolist()]
        lost += [request.planned for request in self.draining.values()]
        self.counters.recomputed_tokens += sum(lost)
        for request in ran:
            assert request.slot is not None
            self.vacate(request.slot)
            if self.recorder is not None:
                self.recorder.note(EventKind.RETRACT, request, self.now_s, "executor lost")
        for request in [*ran, *self.draining.values()]:
            self.wait_again(request)
        self.in_flight.clear()
        self.leaving.clear()
        for request in self.by_handle.values():
            request.kv_writers = frozenset()
            if limits.block_size != self.limits.block_size:
                request.digests.clear()
                request.new = replace(request.new, block_digests=b"")
        self.limits = limits
        # Queue orders made for the old cache must not be taken for orders of the new one.
        self.pool = _pool(limits, self.options, self.prefix_cache.version + 1)
        self.slots = SlotTable(limits)
        self.prefix_cache = PrefixCache(self.slots, self.pool)
        self.host = HostBlocks(limits.num_host_blocks)
        self.suspension.sent_mode = None
        self.swapping.clear()

    def note_first_tokens(self, requests: list[Request], now: float) -> None:
        """Note `now` as the time at which each of these requests produced its first token."""
        waits: NDArray[np.float64] = np.array([now - r.new.arrival_s for r in requests])
        self.ttft_s.observe(waits)
        for request in requests:
            request.first_token_s = now

    def _leave(self, request: Request) -> None:
        self.is_full = False
        self.host.discard(request.number)
        if request.slot is not None:
            self.vacate(request.slot)
        elif request.state is RequestState.DRAINING:
            del self.draining[request.slot_key]
        else:
            self.queue.discard(request)
        request.move(RequestState.ENDED)
        self.deadlines.discard(request.number)
        self.tenants.remove(request.new.tenant)
        self.retry_advice.note_end(self.now_s)
        request.siblings.remove(request)
        if not request.siblings:
            del self.by_id[request.new.request_id]
        del self.by_handle[request.new.handle]
        if not self.by_id:
            self.ratio.reset(self.counters.decode_steps)

    def _plan_swap(self, slot: int, request: Request) -> None:
        """Reserve host blocks for a request that has lost its slot, where preemption swaps."""
        if self.options.preemption_mode is not PreemptionMode.SWAP or not request.planned:
            return
        may_index = self.prefix_cache.may_index(slot)
        block_size = self.limits.block_size
        if self.host.try_reserve(request.number, request.planned, block_size, may_index=may_index):
            self.swapping[slot] = request.number
        else:
            self.counters.swap_fallbacks += 1


def _pool(limits: Limits, options: CoreOptions, first_version: int = 0) -> BlockPool:
    if not options.prefix_caching:
        return BlockPool(limits.num_blocks)
    keeps_unheld = options.eviction is Eviction.LRU
    index = PrefixIndex(limits.num_blocks, keeps_unheld=keeps_unheld, first_version=first_version)
    return BlockPool(limits.num_blocks, index)
