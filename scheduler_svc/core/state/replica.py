"""State that belongs to one executor, and the moves of requests into and out of it."""

from __future__ import annotations

from collections import Counter, deque

from scheduler_svc.core.invariants import require
from scheduler_svc.core.kv_cache.kv_cache import KvCache
from scheduler_svc.core.observe.request_events import EventKind
from scheduler_svc.core.queue.keyed_heap import KeyedHeap
from scheduler_svc.core.request.geometry import Limits
from scheduler_svc.core.request.request import Request, RequestState
from scheduler_svc.core.slots.planned_rows import PlannedRows
from scheduler_svc.core.slots.slots import SlotTable
from scheduler_svc.core.state.cell import Cell
from scheduler_svc.core.state.new_token_ratio import NewTokenRatio
from scheduler_svc.core.state.pace import Pace
from scheduler_svc.core.state.step_room import StepRoom
from scheduler_svc.core.state.suspension import Suspension
from scheduler_svc.core.state.vacancy import Vacancy

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
        in_flight: Batches and commands sent, without an applied result, oldest first.
        most_in_flight: Most of them that there may ever be; `lookahead` says how many now.
        draining: Preempted requests with results in flight, by the slot and generation that these
            results carry.
        paused: Slots that hold their blocks and are in no step until there is one more block for
            each, in the order in which they were paused.
        ratio: Share of the output still allowed that is expected to be produced.
        num_decode_steps: Number of steps planned with decodes so far.
        num_steps: Number of steps with results so far.
        pace: Speed at which it computes prompts, measured while there are others.
        room: Size of steps for which the executor turned out to have memory.
        is_away: True from the loss of the executor until a step is planned for the one in its
            place: it has nothing, and no request is left to it meanwhile.
        is_closing: True once no request is admitted any more, as the executor is to be given back.
        is_full: True when a request did not fit beside the running ones, so that none is admitted
            until a running or waiting request is gone.
        suspension: Suspension of steps that was asked for, and the one the executor was told of.
        may_give_way: Running requests that may lose their slot to a better priority, worst first.
    """

    __slots__ = (
        "cell",
        "draining",
        "in_flight",
        "is_away",
        "is_closing",
        "is_full",
        "kv",
        "limits",
        "may_give_way",
        "most_in_flight",
        "num_decode_steps",
        "num_steps",
        "pace",
        "paused",
        "ratio",
        "room",
        "slots",
        "suspension",
    )

    def __init__(self, cell: Cell, limits: Limits, number: int = 0) -> None:
        self.cell = cell
        self.limits = limits
        self.slots = SlotTable(limits, 1 + (number << VERSION_SHIFT), replica=number)
        self.kv = KvCache(limits, cell.options, self.slots, number << VERSION_SHIFT)
        self.in_flight: deque[PlannedRows] = deque()
        window, run_ahead = cell.options.window, cell.options.run_ahead
        self.most_in_flight = max(window * limits.num_stages, run_ahead)
        self.draining: dict[tuple[int, int], Request] = {}
        self.paused: dict[int, None] = {}
        self.ratio = NewTokenRatio(cell.options.schedule_conservativeness, limits.num_stages)
        self.num_decode_steps = self.num_steps = 0
        self.pace = Pace()
        self.room = StepRoom()
        self.is_away = self.is_closing = False
        self.is_full = False
        self.suspension = Suspension()
        self.may_give_way: KeyedHeap[float, Request] = KeyedHeap()
        cell.join(number, self)

    def under_pressure(self) -> bool:
        """Return True while KV use is so high that no prompt may be admitted."""
        return self.kv.pool.usage >= self.limits.memory_threshold

    def note_away(self) -> None:
        """Note that the executor is lost; what it had is given up by `start_over`."""
        self.cell.router.note_change()
        self.is_away = True

    def note_back(self) -> None:
        """Note that there is an executor again, which has nothing yet."""
        self.cell.router.note_change()
        self.is_away = self.is_closing = False

    def close(self) -> None:
        """Admit no request any more; those that run go on."""
        self.cell.router.note_change()
        self.is_closing = True

    def note_full(self) -> None:
        """
        Note that a waiting request does not fit, so that none is admitted until a request is gone:
        nothing else makes room, since running requests only take more blocks.
        """
        self.cell.router.note_change()
        self.is_full = self.slots.num_running > 0

    def reopen(self) -> None:
        """Let requests be admitted again, as one came that may fit or make others give way."""
        self.is_full = False

    def can_ever_take(self, request: Request) -> bool:
        """Return True when a request could run to its end here, alone."""
        limits, longest = self.limits, request.terms.longest
        min_blocks = request.setbacks.min_blocks
        if limits.num_blocks < min_blocks and self.cell.has_blocks(min_blocks):
            return False
        return longest <= limits.max_model_len and limits.blocks_for(longest) <= limits.num_blocks

    @property
    def takes_new(self) -> bool:
        """True while its executor is there and plans steps, so that requests may prefer it."""
        return not (self.is_away or self.is_closing or self.suspension.is_in_force)

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
        if self.is_full or self.draining or self.paused or not self.takes_new:
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
        return self.ratio.at(self.num_decode_steps)

    def start_afresh(self) -> None:
        """Expect of new requests what was expected at the start, as none is left."""
        self.ratio.reset(self.num_decode_steps)

    def note_sent(self, rows: PlannedRows) -> None:
        """Note a batch or command as in flight, behind all others."""
        self.in_flight.append(rows)

    def note_decodes(self) -> None:
        """Note that a step is planned with decodes."""
        self.num_decode_steps += 1
        self.cell.counters.decode_steps += 1

    def note_result(self) -> None:
        """Note that the oldest batch or command is in flight no longer: its result is applied."""
        self.in_flight.popleft()
        self.cell.counters.compute.steps += 1
        self.num_steps += 1

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

    def preempt(self, slot: int, detail: str = "out of memory") -> None:
        """
        Preempt a running request: it loses its slot, and waits again once all its results in flight
        were seen.
        """
        cell, request = self.cell, self.slots.request_of(slot)
        kind = EventKind.EVICT if slot in self.paused else EventKind.RETRACT
        self.vacate(slot)
        if not self.kv.try_plan_swap(slot, request):
            cell.counters.preemption.swap_fallbacks += 1
        self._note_preempted(request, kind, detail)
        if request.place.num_in_flight:
            request.move(RequestState.DRAINING)
            self.draining[request.place.key] = request
        else:
            self.wait_again(request)

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
        self.is_full = False
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
            self.is_full = False

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
        cell.counters.faults.recomputed_tokens += sum(lost)
        for request in ran:
            assert request.place.slot is not None
            self.vacate(request.place.slot)
            cell.note(EventKind.RETRACT, request, "executor lost")
        for request in [*ran, *self.draining.values()]:
            self.wait_again(request)
        self.in_flight.clear()
        for request in cell.requests:
            if request.place.replica == self.slots.replica:
                request.prefix.forget_writers()
            if limits.block_size != self.limits.block_size:
                request.forget_digests()
        self.limits = limits
        self.slots = SlotTable(limits, self.slots.next_version(), replica=self.slots.replica)
        self.kv = KvCache(limits, cell.options, self.slots, self.kv.prefix_cache.version + 1)
        self.suspension.note_resumed()

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
        self.ratio.check_integrity(self.num_decode_steps)
        self.room.check_integrity(self.num_steps)
        self.pace.check_integrity()
        self.suspension.check_integrity(len(slots.live) - slots.num_free())
        require(slots.num_running <= self.limits.max_running, "more slots run than max_batch_size")
        require(slots.num_running > 0 or not self.is_full, "none runs and none may be admitted")
        is_empty = slots.num_running == 0 and not self.draining
        require(is_empty or not self.is_away, "an executor that is lost runs a request")
        running = slots.running_requests()
        for request in running:
            slot, name = request.place.slot, request.new.request_id
            state = RequestState.DECODE if slots.decoding[slot] else RequestState.PREFILL
            if slot in self.paused:
                state = RequestState.PAUSED
            wrong = f"{name} is {request.state.value}, expected {state.value}"
            require(request.state is state, wrong)
        for slot in self.paused:
            require(bool(slots.running[slot]), f"slot {slot} is paused without running")
            require(not slots.decoding[slot], f"slot {slot} is paused and decodes")
        in_flight = Counter[tuple[int, int]]()
        for rows in self.in_flight:
            for key, num_tokens in rows.tokens_by_key():
                in_flight[key] += num_tokens
        for slot in slots.live.nonzero()[0].tolist():
            num_sent = int(slots.planned[slot] - slots.tokens.applied[slot])
            is_sent = in_flight[slot, int(slots.generation[slot])] == num_sent
            require(is_sent, f"slot {slot} has planned tokens that are not in flight")
        for key, request in self.draining.items():
            place = request.place
            require(request.state is RequestState.DRAINING, "a request drains in another state")
            require(place.key == key, "a draining request is under another's key")
            require(place.num_in_flight > 0, "a request drains with nothing in flight")
            is_sent = in_flight[key] == place.num_in_flight
            require(is_sent, "a draining request waits for what is not in flight")
        self._check_bound()
        self.may_give_way.check_integrity()
        may_give_way = {request.number for request in self.may_give_way}
        is_running = may_give_way <= {request.number for request in running}
        require(is_running, "a request that does not run may give way")

    def _check_bound(self) -> None:
        """Check that what this executor has is of requests that were admitted here last."""
        for request in self.cell.requests:
            has_copy = self.kv.host.copy_of(request.number) is not None
            is_bound = request.place.replica == self.slots.replica
            require(is_bound or not has_copy, "an executor has a copy of another one's request")
        found = [*self.slots.running_requests(), *self.draining.values()]
        is_here = all(request.place.replica == self.slots.replica for request in found)
        require(is_here, "an executor runs a request that was admitted to another")

    def _note_preempted(self, request: Request, kind: EventKind, detail: str) -> None:
        request.setbacks.note_preemption()
        self.cell.counters.preemption.preemptions += 1
        self.cell.note(kind, request, detail)
