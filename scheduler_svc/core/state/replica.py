"""State that belongs to one executor, and the moves of requests into and out of it."""

from __future__ import annotations

from scheduler_svc.core.kv_cache.kv_cache import KvCache
from scheduler_svc.core.observe.request_events import EventKind
from scheduler_svc.core.queue.keyed_heap import KeyedHeap
from scheduler_svc.core.request.geometry import Limits
from scheduler_svc.core.request.options import PreemptionMode
from scheduler_svc.core.request.request import Request, RequestState
from scheduler_svc.core.slots.slots import SlotTable
from scheduler_svc.core.state.cell import Cell
from scheduler_svc.core.state.gate import AdmissionGate, Vacancy
from scheduler_svc.core.state.new_token_ratio import NewTokenRatio
from scheduler_svc.core.state.pace import Pace
from scheduler_svc.core.state.replica_checks import check_replica
from scheduler_svc.core.state.sent_steps import SentSteps
from scheduler_svc.core.state.step_room import StepRoom

VERSION_SHIFT = 48
"""Versions of different executors never meet: what is kept for a version is for one executor."""


class Replica:
    """
    One executor as the core knows it. A live request of its cell is in the queue, or in exactly one
    place here: in a slot, or in `draining`.

    Attributes:
        cell: The requests, shared by all replicas.
        limits: Limits in force: what is configured and what this executor can do.
        slots: Running requests, and slots that are yet to be released.
        kv: KV memory.
        gate: Whether it admits requests.
        steps: What it was sent.
        draining: Preempted requests with results in flight, by the slot and generation that these
            results carry.
        paused: Slots that hold their blocks and are in no step until there is one more block for
            each, in the order in which they were paused.
        ratio: Share of the output still allowed that is expected to be produced.
        pace: Speed at which it computes prompts, measured while there are others.
        room: Size of steps for which the executor turned out to have memory.
        may_give_way: Running requests that may lose their slot to a better priority, worst first.
    """

    __slots__ = (
        "cell",
        "draining",
        "gate",
        "kv",
        "limits",
        "may_give_way",
        "pace",
        "paused",
        "ratio",
        "room",
        "slots",
        "steps",
    )

    def __init__(self, cell: Cell, limits: Limits, number: int = 0) -> None:
        self.cell = cell
        self.limits = limits
        self.slots = SlotTable(limits, 1 + (number << VERSION_SHIFT), replica=number)
        self.kv = KvCache(limits, cell.options, self.slots, number << VERSION_SHIFT)
        self.gate = AdmissionGate(cell.router)
        window, run_ahead = cell.options.window, cell.options.run_ahead
        self.steps = SentSteps(cell.telemetry.counters, max(window * limits.num_stages, run_ahead))
        self.draining: dict[tuple[int, int], Request] = {}
        self.paused: dict[int, None] = {}
        self.ratio = NewTokenRatio(cell.options.schedule_conservativeness, limits.num_stages)
        self.pace = Pace()
        self.room = StepRoom()
        self.may_give_way: KeyedHeap[float, Request] = KeyedHeap()
        cell.join(number, self)

    def under_pressure(self) -> bool:
        """Return True while KV use is so high that no prompt may be admitted."""
        return self.kv.pool.usage >= self.limits.memory_threshold

    def can_ever_take(self, request: Request) -> bool:
        """Return True when a request could run to its end here, alone."""
        limits, longest = self.limits, request.terms.longest
        min_blocks = request.setbacks.min_blocks
        if limits.num_blocks < min_blocks and self.cell.has_blocks(min_blocks):
            return False
        return longest <= limits.max_model_len and limits.blocks_for(longest) <= limits.num_blocks

    def ready_len(self, request: Request) -> int:
        """
        Return how many tokens of a waiting request need not be computed for it here: they are
        cached, being computed, held by another of its choices or copied to host memory.
        """
        if request.prefix.is_alone or request.needs_scores:
            return 0
        cache, copy = self.kv.prefixes, self.kv.host.copy_of(request.number)
        ready = 0 if cache is None else cache.expected_len(request)
        if copy is not None:
            ready = max(ready, copy.num_tokens)
        if any(one.place.slot is not None and self.slots.holds(one) for one in request.siblings):
            ready = max(ready, request.prompt_len)
        return min(ready, request.num_known - 1)

    def vacancy(self) -> Vacancy | None:
        """Return the room for requests that wait; None where none could be admitted now."""
        limits, slots = self.limits, self.slots
        if self.gate.is_full or self.draining or self.paused or not self.gate.takes_new:
            return None
        num_running = slots.num_running
        num_free = min(self.room.rows(limits.max_running) - num_running, slots.num_free())
        if num_free <= 0 or self.under_pressure():
            return None
        pool, tokens_each = self.kv.pool, limits.max_total_tokens / limits.max_running
        return Vacancy(
            num_requests=num_free,
            num_blocks=pool.num_available,
            num_tokens=slots.num_unsent()
            + num_running * tokens_each
            + pool.usage * limits.max_total_tokens,
            tokens_each=tokens_each,
            prefill_s=self.pace.prefill_s,
        )

    def fits(
        self, request: Request, vacancy: Vacancy, *, num_more: int = 0, more_tokens: int = 0
    ) -> bool:
        """
        Return True where a waiting request could be admitted into the room that is left.

        Args:
            request: The request.
            vacancy: The room.
            num_more: Requests that are about to be admitted before it.
            more_tokens: Their tokens.
        """
        if num_more >= vacancy.num_requests or not self.can_ever_take(request):
            return False
        return self.limits.blocks_for(request.num_known + more_tokens) <= vacancy.num_blocks

    def has_room_for(self, request: Request) -> bool:
        """Return True where a waiting request could be admitted now."""
        vacancy = self.vacancy()
        return vacancy is not None and self.fits(request, vacancy)

    @property
    def new_token_ratio(self) -> float:
        """Share of the output still allowed that is expected to be produced, as of now."""
        return self.ratio.at(self.steps.num_decode)

    def start_afresh(self) -> None:
        """Expect of new requests what was expected at the start, as none is left."""
        self.ratio.reset(self.steps.num_decode)

    def let_give_way(self, request: Request) -> None:
        """Let a request that gets a slot lose it to one of better priority."""
        self.may_give_way.push(-request.new.priority, -request.number, request)

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

    def preempt(self, slot: int, detail: str = "out of memory") -> PreemptionMode:
        """
        Preempt a running request: it loses its slot, and waits again once all its results in flight
        were seen. Returns how it gets its KV back.
        """
        cell, request = self.cell, self.slots.request_of(slot)
        kind = EventKind.EVICT if slot in self.paused else EventKind.RETRACT
        self.vacate(slot)
        mode = cell.options.preemption_mode
        if not self.kv.try_plan_swap(slot, request):
            mode = PreemptionMode.RECOMPUTE
            cell.telemetry.counters.preemption.swap_fallbacks += 1
        self._note_preempted(request, kind, detail)
        if request.place.num_in_flight:
            request.move(RequestState.DRAINING)
            self.draining[request.place.key] = request
        else:
            self.wait_again(request)
        return mode

    def restart(self, request: Request, detail: str) -> None:
        """
        Let a running or draining request wait again at once; unlike at a preemption, its results in
        flight are dropped.
        """
        if request.place.slot is not None:
            self.vacate(request.place.slot)
            self._note_preempted(request, EventKind.RETRACT, detail)
        self.wait_again(request)

    def wait_again(self, request: Request) -> None:
        """Put a preempted request back in the waiting queue."""
        self.draining.pop(request.place.key, None)
        request.move(RequestState.WAITING)
        self.cell.queue.put_back(request, self.cell.now_s)

    def vacate(self, slot: int) -> None:
        """Take a slot away from its request; the slot is released in the next batch."""
        self.cell.router.note_change()
        self.gate.reopen()
        self.paused.pop(slot, None)
        self.may_give_way.discard(-self.slots.request_of(slot).number)
        self.kv.prefix_cache.note_vacated(slot)
        self.slots.vacate(slot)

    def release(self, slot: int) -> None:
        """Free a vacated slot and its blocks; the cached ones can be matched from now on."""
        request, blocks = self.slots.forget(slot)
        self.kv.prefix_cache.release(slot, request, blocks)

    def drop(self, request: Request) -> None:
        """Forget all that this executor has of a request, which ends or goes elsewhere."""
        self.kv.host.discard(request.number)
        if request.place.slot is not None:
            self.vacate(request.place.slot)
        elif request.state is RequestState.DRAINING:
            del self.draining[request.place.key]
            self.gate.reopen()

    def request_at(self, slot: int, generation: int) -> Request | None:
        """Return the live request that has results with this slot and generation, if any."""
        key = slot, generation
        if (draining := self.draining.get(key)) is not None:
            return draining
        holder = self.slots.holder(slot)
        return holder if holder is not None and holder.place.key == key else None

    def num_computed(self, request: Request) -> int:
        """Return of how many tokens of a request that runs or drains here results were applied."""
        slot = request.place.slot
        return request.place.applied if slot is None else int(self.slots.tokens.applied[slot])

    def start_over(self, limits: Limits) -> None:
        """
        Start over with an empty executor: requests that ran or drained wait again, in arrival
        order, and keep their outputs.
        """
        cell, ran = self.cell, self.slots.running_requests()
        lost = [*self.slots.planned[self.slots.running].tolist()]
        lost += [request.place.planned for request in self.draining.values()]
        cell.telemetry.counters.faults.recomputed_tokens += sum(lost)
        for request in ran:
            assert request.place.slot is not None
            self.vacate(request.place.slot)
            cell.note(EventKind.RETRACT, request, "executor lost")
        for request in [*ran, *self.draining.values()]:
            self.wait_again(request)
        self.steps.note_lost()
        for request in cell.requests:
            if request.place.replica == self.slots.replica:
                request.prefix.forget_writers()
            if limits.block_size != self.limits.block_size:
                request.forget_digests()
        self.limits = limits
        self.slots = SlotTable(limits, self.slots.next_version(), replica=self.slots.replica)
        self.kv = KvCache(limits, cell.options, self.slots, self.kv.prefix_cache.version + 1)
        self.gate.note_resumed()

    def check_integrity(self) -> None:
        """
        Check each part of this executor, and compare the parts with one another.

        Raises:
            InternalError: The first invariant that does not hold.
        """
        slots = self.slots
        without_slot = {one.number for one in self.cell.requests if one.place.slot is None}
        self.kv.check_integrity(slots, without_slot)
        slots.check_integrity()
        self.ratio.check_integrity(self.steps.num_decode)
        self.room.check_integrity(self.steps.num_done)
        self.pace.check_integrity()
        self.gate.check_integrity(
            num_running=slots.num_running,
            num_draining=len(self.draining),
            num_live=len(slots.live) - slots.num_free(),
        )
        self.may_give_way.check_integrity()
        check_replica(self)

    def _note_preempted(self, request: Request, kind: EventKind, detail: str) -> None:
        request.setbacks.note_preemption()
        self.cell.telemetry.counters.preemption.preemptions += 1
        self.cell.note(kind, request, detail)
