"""Columns of the slot state that both ends of the step link hold, one array per attribute."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tandem.link.batch import Int32Column, UInt32Column


class SlotColumns:
    """
    Geometry and columns; only `SlotState` writes them, any code may read them.

    Attributes:
        num_slots: S; slots are 0 to S - 1.
        max_blocks_per_slot: M, the width of the block table.
        block_size: Tokens per block.
        num_blocks: Usable blocks, ids 1 to num_blocks.
        live: bool ``[S]``, True if the slot is in use.
        generation: uint32 ``[S]``, generation of the slot's last user, kept after a release.
        planned: int32 ``[S]``, positions computed or sent to be computed; 0 if not live.
        num_tokens_known: int32 ``[S]``, tokens admitted plus tokens sampled in the slot.
        num_blocks_held: int32 ``[S]``, valid entries of the slot's row in the block table.
        block_table: int32 ``[S, M]``, entries at and past `num_blocks_held` have no meaning.
        num_holders: int32 ``[num_blocks + 1]``, number of table entries that have the block.
        num_host_blocks: Host blocks, ids 1 to num_host_blocks; 0 if no block can be swapped.
        is_host_written: bool ``[num_host_blocks + 1]``, True if a swap out wrote the host block.
    """

    __slots__ = (
        "block_size",
        "block_table",
        "generation",
        "is_host_written",
        "live",
        "max_blocks_per_slot",
        "num_blocks",
        "num_blocks_held",
        "num_holders",
        "num_host_blocks",
        "num_slots",
        "num_tokens_known",
        "planned",
    )

    def __init__(
        self,
        num_slots: int,
        max_blocks_per_slot: int,
        block_size: int,
        num_blocks: int,
        num_host_blocks: int = 0,
    ) -> None:
        self.num_slots = num_slots
        self.max_blocks_per_slot = max_blocks_per_slot
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.num_host_blocks = num_host_blocks
        self.live: NDArray[np.bool_] = np.zeros(num_slots, np.bool_)
        self.generation: UInt32Column = np.zeros(num_slots, np.uint32)
        self.planned: Int32Column = np.zeros(num_slots, np.int32)
        self.num_tokens_known: Int32Column = np.zeros(num_slots, np.int32)
        self.num_blocks_held: Int32Column = np.zeros(num_slots, np.int32)
        self.block_table: Int32Column = np.zeros((num_slots, max_blocks_per_slot), np.int32)
        self.num_holders: Int32Column = np.zeros(num_blocks + 1, np.int32)
        self.is_host_written: NDArray[np.bool_] = np.zeros(num_host_blocks + 1, np.bool_)

    def blocks_of(self, slot: int) -> Int32Column:
        """Return a view of the blocks a slot holds, in order, shape ``[num_blocks_held]``."""
        row: Int32Column = self.block_table[slot, : self.num_blocks_held[slot]]
        return row
