"""A checksum of what ranks of a model must have in common on their devices."""

from __future__ import annotations

import zlib

import numpy as np

from executor_svc.slots.tokens import SlotTokens
from tandem.link.slots.slot_state import SlotState


def token_checksum(slots: SlotState, tokens: SlotTokens) -> int:
    """
    Return a checksum of the two newest tokens of every live slot, as the device has them, with
    their slots and positions; it waits for the device.
    """
    slot = slots.live.nonzero()[0].astype(np.int32)
    end = slots.planned[slot].astype(np.int64)
    checksum = zlib.crc32(end.tobytes(), zlib.crc32(slot.tobytes()))
    for position in (np.maximum(end - 1, 0), end):
        newest = tokens.gather(slot, position).cpu().numpy()
        checksum = zlib.crc32(newest.tobytes(), checksum)
    return checksum
