"""
Batches that repeat an earlier one: the same rows, each one token further.

Most batches are of this kind, and they fit the slot state because the earlier one did: the slots
are live and distinct, each row's token is known by then, and it writes into the same block as
before. The batches of pipeline stages' lanes take turns, so the earlier one need not be the last:
the owner forgets rows as soon as another batch computes, releases or extends one of their slots.
Two checks are left: each row with a full block gets a new block that no slot holds, and no other
row gets one. Any other batch is checked in full (`batch_check`).
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from tandem.link.batch import ROW_SAMPLES, Batch, Int32Column
from tandem.link.slots.slot_columns import SlotColumns


class SteadyRows:
    """
    Decode rows of a batch that was applied, which a later one may repeat until another touches
    one of their slots.

    Attributes:
        slot: Slots of the rows, shape ``[R]``.
        end: Positions planned for each row, at which the next step starts.
        key_sum: Sum that a step of all rows adds to the state hash.
        is_regular: True if no slot has a whole block to spare; else the rows must not be used.
    """

    __slots__ = (
        "_block_size",
        "_flags",
        "_full",
        "_num_steps",
        "_ones",
        "_row_slot",
        "end",
        "is_regular",
        "key_sum",
        "slot",
    )

    def __init__(self, slots: SlotColumns, batch: Batch, key_sum: int) -> None:
        """
        Args:
            slots: State after the batch.
            batch: Batch of decode rows that sample.
            key_sum: Initial value of the attribute: that after the batch.
        """
        self.slot = batch.row_slot.astype(np.intp)
        self.end: Int32Column = batch.row_start + batch.row_num_tokens
        self.key_sum = key_sum
        self._block_size = slots.block_size
        self._row_slot = batch.row_slot.tobytes()
        self._ones = batch.row_num_tokens.tobytes()
        self._flags = batch.row_flags.tobytes()
        self._num_steps = 0
        spare = slots.num_blocks_held[self.slot] * np.int32(slots.block_size) - self.end
        self.is_regular = bool(spare.max() < slots.block_size)
        self._full = self._by_step(spare)

    @staticmethod
    def is_decode(batch: Batch) -> bool:
        """Return True for a batch that has only decode rows, which all sample, and appends."""
        others = (
            batch.release_slot,
            batch.copy_source,
            batch.copy_destination,
            batch.swap_out_block,
            batch.swap_out_host,
            batch.swap_in_host,
            batch.swap_in_block,
        )
        return (
            len(batch.row_slot) > 0
            and not batch.admits
            and not any(map(len, others))
            and bool((batch.row_num_tokens == 1).all() and (batch.row_flags == ROW_SAMPLES).all())
        )

    def is_repeated(self, slots: SlotColumns, batch: Batch) -> bool:
        """Return True if a batch is the next step of these rows and fits the slot state."""
        if (
            batch.admits
            or len(batch.release_slot)
            or len(batch.copy_source)
            or len(batch.copy_destination)
            or len(batch.swap_out_block)
            or len(batch.swap_out_host)
            or len(batch.swap_in_host)
            or len(batch.swap_in_block)
            or batch.row_slot.tobytes() != self._row_slot
            or batch.row_start.tobytes() != self.end.tobytes()
            or batch.row_num_tokens.tobytes() != self._ones
            or batch.row_flags.tobytes() != self._flags
        ):
            return False
        growing, blocks = self.growing(), batch.append_block
        return (
            len(blocks) == len(growing)
            and batch.append_slot.tobytes() == growing.tobytes()
            and (not len(blocks) or self._may_be_given(slots, growing, blocks))
        )

    def growing(self) -> Int32Column:
        """Return the slots that need a block for the next step, shape ``[G]``, in row order."""
        return self._full[self._num_steps % self._block_size]

    def advance(self, batch: Batch) -> None:
        """Note that a batch repeated these rows."""
        self.end = batch.row_start + batch.row_num_tokens
        self._num_steps += 1

    @staticmethod
    def _may_be_given(slots: SlotColumns, growing: Int32Column, blocks: Int32Column) -> bool:
        # These columns are short, so lists are faster than numpy.
        distinct = set(blocks.tolist())
        if len(distinct) < len(blocks) or min(distinct) < 1 or max(distinct) > slots.num_blocks:
            return False
        num_holders = slots.num_holders[blocks.astype(np.intp)].tolist()
        num_held = slots.num_blocks_held[growing.astype(np.intp)].tolist()
        return not any(num_holders) and max(num_held) < slots.max_blocks_per_slot

    def _by_step(self, spare: Int32Column) -> list[Int32Column]:
        """Return the slots that need a new block for step i of every `block_size`, for i from 0."""
        order = spare.argsort(kind="stable")
        bounds = spare[order].searchsorted(np.arange(self._block_size + 1)).tolist()
        ordered = self.slot[order].astype(np.int32)
        return [ordered[start:stop] for start, stop in pairwise(bounds)]
