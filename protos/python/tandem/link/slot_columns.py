"""The columns of slot state: what both ends know of every slot, one array per fact."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tandem.link.batch import Int32Column, UInt32Column


class SlotColumns:
    """
    Geometry and columns; `SlotState` alone writes them, anybody may read.

    Attributes:
        num_slots: S; slots are 0 to S - 1.
        max_blocks_per_slot: M, the width of the block table.
        block_size: Tokens per block.
        num_blocks: Usable blocks, ids 1 to num_blocks.
        live: bool ``[S]``, slot is in use.
        generation: uint32 ``[S]``, generation of the slot's last user, kept after a release.
        planned: int32 ``[S]``, positions computed or sent to be computed; 0 where not live.
        num_tokens_known: int32 ``[S]``, tokens admitted plus tokens sampled in the slot.
        num_blocks_held: int32 ``[S]``, valid entries of the slot's row in the block table.
        block_table: int32 ``[S, M]``, entries at and past `num_blocks_held` mean nothing.
        num_holders: int32 ``[num_blocks + 1]``, in how many table entries a block stands.
        num_host_blocks: Host blocks, ids 1 to num_host_blocks; 0 where nothing can be swapped.
        is_host_written: bool ``[num_host_blocks + 1]``, the host block was a destination of a swap.
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
        """Blocks a slot holds, in order, as a view of its row, shape ``[num_blocks_held]``."""
        row: Int32Column = self.block_table[slot, : self.num_blocks_held[slot]]
        return row
