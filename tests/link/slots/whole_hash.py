"""The hash of slot state computed as a whole, which the one kept step by step must equal."""

from __future__ import annotations

import numpy as np

from tandem.link.slots.slot_state import SlotState
from tandem.link.slots.state_hash import StateHash, block_terms, slot_term


def hash_from_scratch(slots: SlotState) -> int:
    """Return the hash computed from the columns; it equals `state_hash`, if there is no bug."""
    fresh = StateHash()
    for slot in np.flatnonzero(slots.live).tolist():
        blocks = slots.blocks_of(slot)
        fresh.add(slot_term(slot, int(slots.generation[slot]), int(slots.planned[slot])))
        fresh.add(int(block_terms(slot, np.arange(len(blocks)), blocks).sum()))
    return fresh.value
