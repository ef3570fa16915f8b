"""Consistency checks of the slot table."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from scheduler_svc.core.invariants import require
from scheduler_svc.core.request.request import Request

if TYPE_CHECKING:
    from scheduler_svc.core.slots.slots import SlotTable


def check_slots(slots: SlotTable) -> None:
    """
    Compare the columns with one another, with the requests in the slots and with the state hash.

    Raises:
        InternalError: The first invariant that does not hold.
    """
    live = np.flatnonzero(slots.live)
    running = np.flatnonzero(slots.running).tolist()
    ended = [slot for slot in live.tolist() if slots.holder(slot) is None]
    held = [slot for slot in range(len(slots.live)) if slots.holder(slot) is not None]
    is_left = sorted(slots.vacated()) == ended
    require(is_left, "the slots to release are not those without a request")
    require(held == running, "a slot runs without a request")
    require(len(running) == slots.num_running, "the count of running slots is wrong")
    require(len(live) + slots.num_free() == len(slots.live), "a slot is neither live nor free")
    require(not (slots.decoding & ~slots.running).any(), "a slot decodes without running")
    num_decoding = int(np.count_nonzero(slots.decoding))
    require(num_decoding == slots.num_decoding, "the count of decoding slots is wrong")
    capacity = slots.blocks.num_blocks[live] * slots.blocks.block_size
    require(not (slots.planned[live] > capacity).any(), "a slot computes past its blocks")
    is_ahead = slots.tokens.applied[live] > slots.planned[live]
    require(not is_ahead.any(), "a slot has more applied than planned")
    for slot in running:
        _check_holder(slots, slot, slots.request_of(slot))
    is_hashed = slots.recomputed_hash() == slots.state_hash()
    require(is_hashed, "the state hash differs from the one recomputed from the slot columns")


def _check_holder(slots: SlotTable, slot: int, request: Request) -> None:
    name, stop_len = request.new.request_id, int(slots.admitted.stop_len[slot])
    key, known = (slot, int(slots.generation[slot])), int(slots.tokens.known[slot])
    num_outputs = len(request.outputs) + slots.tokens.tail_len(slot)
    require(request.place.slot == slot, f"{name} does not know its slot")
    require(request.place.key == key, f"{name} has a wrong slot key")
    require(num_outputs == slots.num_outputs(slot), f"{name} has outputs that were not counted")
    require(known < stop_len, f"{name} runs past its end")
    require(int(slots.planned[slot]) < stop_len, f"{name} computes past its end")
    num_admitted, applied = int(slots.admitted.known_len[slot]), int(slots.tokens.applied[slot])
    known_len = applied + 1 if applied >= num_admitted else num_admitted
    require(known == known_len, f"{name} lost or gained a token")
