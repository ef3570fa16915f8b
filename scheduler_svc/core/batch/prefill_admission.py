"""Admission from the waiting queue into slots, reusing the part of a request's KV that is there."""

from __future__ import annotations

import numpy as np

from scheduler_svc.core.batch import parallel_sampling
from scheduler_svc.core.batch.batch_builder import BatchBuilder
from scheduler_svc.core.batch.prefills import add_chunk, may_cut, next_chunk
from scheduler_svc.core.batch.priority_preemption import note_admitted
from scheduler_svc.core.batch.routing import welcome
from scheduler_svc.core.faults.trials import waiting_for_trial
from scheduler_svc.core.kv_cache.prefix_cache import NOTHING_CACHED, Prefix
from scheduler_svc.core.kv_cache.prefix_index import NO_BLOCK
from scheduler_svc.core.observe.request_events import EventKind
from scheduler_svc.core.request.events import Progress, ProgressKind
from scheduler_svc.core.request.request import Request, RequestState
from tandem.link.batch import Admission, Int32Column

MAX_PASSED = 32
"""
Most requests that one plan passes over because they wait for a prefix that is being computed or for
a step with more tokens for long prompts.
"""
MAX_SENT_TOKENS = 1 << 22
"""
Most tokens of all requests that one plan admits, unless the first alone has more. Their cached
tokens are not computed but sent all the same, and a step is one message: these are 16 MiB of the 64
it may have.
"""


def admit(builder: BatchBuilder, now: float) -> None:
    """
    Admit from the queue, in its order, while slots, budget, threshold and blocks allow; during a
    trial only requests that are tried.

    Without chunked prefill, a request with a prompt over the step's budget ends admission too: if
    others passed it, there might never be a step with room for it.

    If a request's next block is being computed for another request, it keeps its place and waits
    for that block instead of computing it again; those behind it may pass meanwhile. A request that
    lacks blocks ends admission: requests that passed it would use up the blocks it waits for.
    """
    replica = builder.replica
    cell = replica.cell
    if not _has_room(builder):
        return
    num_passed = num_sent = 0
    candidates = welcome(replica, now, is_unchanged=builder.is_empty)
    if cell.suspects.is_trial_on(replica.slots.replica):
        candidates = iter(waiting_for_trial(replica))
    for request in candidates:
        if num_sent and num_sent + request.num_known > MAX_SENT_TOKENS:
            return
        found = _find_prefix(builder, request)
        if found is None or not _has_chunk(builder, request, found[0]):
            if found is not None and not may_cut(builder):
                return
            num_passed += 1
            if num_passed == MAX_PASSED:
                return
            continue
        if not _try_admit(builder, request, *found, now):
            return
        num_sent += request.num_known
        if not _has_room(builder):
            return


def _has_room(builder: BatchBuilder) -> bool:
    """Return True while any request may be admitted."""
    replica, slots = builder.replica, builder.replica.slots
    max_running = replica.room.rows(replica.limits.max_running)
    has_slot = slots.num_running < max_running and slots.num_free() > 0
    is_shut = replica.gate.is_closing or replica.under_pressure()
    return builder.budget > 0 and has_slot and not is_shut


def _has_chunk(builder: BatchBuilder, request: Request, prefix: Prefix) -> bool:
    """Return True when the step has tokens for this prompt; many long ones share a part of it."""
    copy = builder.replica.kv.host.copy_of(request.number)
    num_cached = prefix.num_tokens if copy is None else max(prefix.num_tokens, copy.num_tokens)
    if not may_cut(builder):
        # A block that is cached in part may turn out to have no room for its copy.
        block_size = builder.replica.limits.block_size
        return request.num_known - num_cached // block_size * block_size <= builder.budget
    return next_chunk(builder, request.num_known - num_cached) > 0


def _find_prefix(builder: BatchBuilder, request: Request) -> tuple[Prefix, int | None] | None:
    """
    Return the part of a request's KV that is on the device, and the slot of the sibling it is
    shared with, if any; None when the request must wait for KV that is being computed or copied.
    """
    replica, slots = builder.replica, builder.replica.slots
    is_leaving = builder.swaps is not None and builder.swaps.is_leaving(request)
    # During a trial the choice that has the prompt scored may have to stay out.
    in_trial = bool(replica.cell.suspects.num_suspects)
    if is_leaving or (not in_trial and parallel_sampling.is_sibling_to_score(request)):
        return None
    if request.prefix.is_alone or request.needs_scores:
        return NOTHING_CACHED, None
    sibling = parallel_sampling.find_sibling(slots, request)
    if sibling is None and parallel_sampling.is_sibling_computing(slots, request):
        return None
    if any(admission.slot == sibling for admission in builder.admits):
        # Blocks that this batch copies or swaps in for the sibling cannot be copied yet.
        return None
    cached = replica.kv.prefix_cache.find(request)
    if sibling is not None:
        shared = parallel_sampling.prefix_of_sibling(slots, request, sibling)
        if cached is None or shared.num_tokens > cached.num_tokens:
            return shared, sibling
    return None if cached is None else (cached, None)


def _try_admit(
    builder: BatchBuilder, request: Request, prefix: Prefix, sibling: int | None, now: float
) -> bool:
    """Give a request a slot, blocks and its first chunk; return False when blocks are too few."""
    replica, slots, limits = builder.replica, builder.replica.slots, builder.replica.limits
    cell = replica.cell
    copy = replica.kv.host.copy_of(request.number)
    fitting = _fitting(builder, request, prefix, can_copy=copy is None)
    if fitting is None:
        replica.gate.note_full(slots.num_running)
        return False
    prefix = fitting
    writers = _writers(builder, prefix, sibling)
    blocks = _take_blocks(builder, request, prefix)
    num_cached = prefix.num_tokens
    if copy is not None:
        num_cached = builder.swapping().copy_in(request, blocks, num_cached)
        writers |= request.prefix.writers
    request.prefix.share(writers)
    builder.headroom().charge(request)
    cell.queue.take(request, now)
    cell.bind(request, slots.replica)
    note_admitted(replica, request)
    request.move(RequestState.PREFILL)
    _note_first_admission(builder, request, prefix, now)
    slot = slots.occupy(request, blocks, limits.blocks_for(request.terms.stop_len - 1), num_cached)
    replica.kv.prefix_cache.note_admitted(slot, request, prefix, sibling)
    if copy is not None and not copy.may_index:
        replica.kv.prefix_cache.distrust(slot)
    builder.add_admission(
        Admission(
            slot=slot,
            generation=int(slots.generation[slot]),
            token_ids=request.known_tokens(),
            num_prompt_tokens=request.prompt_len,
            num_cached_tokens=num_cached,
            block_ids=blocks,
            sampling=request.row_sampling,
        )
    )
    cached_prompt = min(num_cached, request.prompt_len)
    event = Progress(handle=request.new.handle, kind=ProgressKind.SCHEDULED, value=cached_prompt)
    cell.events.add(event)
    add_chunk(builder, slot)
    return True


def _fitting(
    builder: BatchBuilder, request: Request, prefix: Prefix, *, can_copy: bool
) -> Prefix | None:
    """Return the part of `prefix` usable with the available blocks; None when these are too few."""
    replica = builder.replica
    if prefix.has_copy and can_copy and _has_blocks(builder, request, prefix):
        return prefix
    # The block to be copied counts in addition to its copy, so the request may fit without it.
    prefix = prefix.without_copy(replica.limits.block_size)
    return prefix if _has_blocks(builder, request, prefix) else None


def _has_blocks(builder: BatchBuilder, request: Request, prefix: Prefix) -> bool:
    replica = builder.replica
    num_fresh = replica.limits.blocks_for(request.num_known) - prefix.num_shared
    # Blocks that the request is about to hold cannot be evicted for it.
    num_available = replica.kv.pool.num_available - replica.kv.pool.num_unheld(prefix.blocks)
    extend_len = request.num_known - prefix.num_tokens
    return builder.headroom().fits(request, num_fresh, extend_len, num_available)


def _take_blocks(builder: BatchBuilder, request: Request, prefix: Prefix) -> Int32Column:
    """
    Return the request's block table; its shared blocks are held before others are evicted for the
    rest.
    """
    replica = builder.replica
    replica.kv.pool.share(prefix.blocks)
    num_fresh = replica.limits.blocks_for(request.num_known) - prefix.num_shared
    last_shared = int(prefix.blocks[prefix.num_shared - 1]) if prefix.num_shared else NO_BLOCK
    fresh = replica.kv.pool.try_take(num_fresh, after=last_shared)
    assert fresh is not None
    if prefix.has_copy:
        builder.copy(int(prefix.blocks[-1]), int(fresh[0]))
    return np.concatenate([prefix.blocks[: prefix.num_shared], fresh])


def _writers(builder: BatchBuilder, prefix: Prefix, sibling: int | None) -> frozenset[int]:
    if sibling is not None:
        return parallel_sampling.writers_of_sibling(builder.replica.slots, sibling)
    return builder.replica.kv.prefix_cache.writers_of(prefix)


def _note_first_admission(
    builder: BatchBuilder, request: Request, prefix: Prefix, now: float
) -> None:
    replica = builder.replica
    cell = replica.cell
    if cell.options.prefix_caching:
        cell.telemetry.counters.compute.prefix_cache_lookup_tokens += request.num_known
        cell.telemetry.counters.compute.prefix_cache_hit_tokens += prefix.num_tokens
    request.note_scheduled(now, prefix.num_tokens)
    cell.telemetry.note(EventKind.SCHEDULED, request, now)
