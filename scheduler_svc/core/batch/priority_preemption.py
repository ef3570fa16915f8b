"""
Priority preemption: a running request gives way to a waiting one of better priority.

Source: vLLM's and SGLang's priority scheduling. Unlike there, a request gives way at most once, and
never when it was admitted for having waited long (see `queue.WaitingQueue`). So two requests cannot
take one slot from each other in turn, there are at most as many preemptions of this kind as
requests, and the bound on waiting holds.
"""

from __future__ import annotations

from itertools import islice

from scheduler_svc.core.batch.batch_builder import BatchBuilder
from scheduler_svc.core.batch.headroom import Headroom
from scheduler_svc.core.batch.routing import taken_by
from scheduler_svc.core.request.request import Request
from scheduler_svc.core.state.replica import Replica

MAX_ADVANCED = 32
"""Waiting requests that one plan makes way for."""


def note_admitted(replica: Replica, request: Request) -> None:
    """Note an admitted request as a candidate for priority preemption, unless it is exempt."""
    if replica.cell.options.priority_preemption and not (
        request.setbacks.was_aged or request.setbacks.gave_way
    ):
        replica.let_give_way(request)


def make_way(builder: BatchBuilder, now: float) -> None:
    """
    Preempt requests of worse base priority, worst first and among equals latest first, until the
    better ones at the head of the queue have a slot and blocks.

    To be called before any row is planned. No slot is taken for a request that would lack blocks
    even if all requests that may give way to it did. A request that gets room is admitted once the
    results in flight of the preempted ones are back. Costs O(1) where no waiting request is better
    than any that may give way.
    """
    replica = builder.replica
    cell = replica.cell
    worst = replica.may_give_way.peek()
    if worst is None or replica.paused:
        return
    best = cell.queue.best_priority()
    if best is None or best >= worst[1].new.priority:
        return
    promised_blocks = 0
    ahead = islice(cell.queue.candidates(now, replica.kv.prefixes, taken_by(replica)), MAX_ADVANCED)
    for promised_slots, request in enumerate(ahead):
        while not _fits(replica, request, promised_slots, promised_blocks):
            victim = _victim_for(replica, request)
            if victim is None or not _can_fit(replica, request, promised_blocks):
                return
            assert victim.place.slot is not None
            victim.setbacks.give_way()
            replica.preempt(victim.place.slot, "gave way to a better priority")
            builder.release_ended()
        promised_blocks += replica.limits.blocks_for(request.num_known)


def _victim_for(replica: Replica, request: Request) -> Request | None:
    worst = replica.may_give_way.peek()
    if worst is None or worst[1].new.priority <= request.new.priority:
        return None
    return worst[1]


def _fits(replica: Replica, request: Request, promised_slots: int, promised_blocks: int) -> bool:
    """Return True when a request can be admitted beside those that were promised room before it."""
    slots, limits = replica.slots, replica.limits
    max_running = replica.room.rows(limits.max_running)
    if slots.num_running + promised_slots >= max_running or replica.under_pressure():
        return False
    if slots.num_free() <= promised_slots:
        return False
    available = replica.kv.pool.num_available - promised_blocks
    num_blocks = limits.blocks_for(request.num_known)
    return Headroom(replica).fits(request, num_blocks, request.num_known, available)


def _can_fit(replica: Replica, request: Request, promised_blocks: int) -> bool:
    """Return False when a request would lack blocks even if all that may give way to it did."""
    yielding = [one for one in replica.may_give_way if one.new.priority > request.new.priority]
    held = sum(int(replica.slots.blocks.num_blocks[one.place.slot]) for one in yielding)
    available = replica.kv.pool.num_available + held - promised_blocks
    usage = (replica.kv.pool.num_used - held) / replica.kv.pool.num_blocks
    has_blocks = replica.limits.blocks_for(request.num_known) <= available
    return has_blocks and usage < replica.limits.memory_threshold
