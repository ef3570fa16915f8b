"""From the queue into slots."""

from __future__ import annotations

from scheduler_svc.core.draft import Draft
from scheduler_svc.core.events import Progress, ProgressKind
from scheduler_svc.core.prefills import add_chunk
from scheduler_svc.core.request import RequestState
from scheduler_svc.core.request_events import EventKind
from tandem.link.batch import Admission


def admit(draft: Draft, now: float) -> None:
    """Admit from the queue, head first, while slots, budget, threshold and blocks allow."""
    state, slots, limits = draft.state, draft.state.slots, draft.state.limits
    if not _has_room(draft):
        return
    for request in state.queue.candidates(now, state.prefixes):
        num_blocks = limits.blocks_for(request.num_known)
        # One block kept back for each row that may still grow: else the newcomer is the next
        # victim.
        if num_blocks + slots.num_may_grow() > state.pool.num_free:
            return
        blocks = state.pool.try_take(num_blocks)
        assert blocks is not None
        state.queue.take(request, now)
        request.move(RequestState.PREFILL)
        if request.scheduled_s is None:
            request.scheduled_s = now
        if state.recorder is not None:
            state.recorder.note(EventKind.SCHEDULED, request, now)
        slot = slots.occupy(request, blocks, limits.blocks_for(request.stop_len - 1))
        draft.admits.append(
            Admission(
                slot=slot,
                generation=int(slots.generation[slot]),
                token_ids=request.known_tokens(),
                num_prompt_tokens=request.prompt_len,
                num_cached_tokens=0,
                block_ids=blocks,
                sampling=request.new.sampling,
            )
        )
        event = Progress(handle=request.new.handle, kind=ProgressKind.SCHEDULED, value=0)
        state.events.add(event)
        add_chunk(draft, slot)
        if not _has_room(draft):
            return


def _has_room(draft: Draft) -> bool:
    """True while anyone at all may be admitted."""
    state, slots = draft.state, draft.state.slots
    has_slot = slots.num_running < state.limits.max_running and slots.num_free > 0
    return draft.budget > 0 and has_slot and not state.under_pressure()
