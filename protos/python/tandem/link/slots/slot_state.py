"""
Slot state that both ends of the step link hold, changed only by batches, and its hash.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from tandem.link import MAX_STAGES
from tandem.link.batch import ROW_SAMPLES, Admission, Batch, Int32Column
from tandem.link.slots.batch_check import check_batch
from tandem.link.slots.slot_columns import SlotColumns
from tandem.link.slots.state_hash import (
    BlockKeys,
    StateHash,
    UInt64Column,
    length_key,
    slot_term,
)
from tandem.link.slots.steady_rows import SteadyRows

MAX_STEADY = MAX_STAGES
"""
Most sets of rows that may be repeated in turn: one for each lane of the scheduler's, so that none
pushes out another that is next. The next one is looked for first, so many cost no more than few.
"""


class SlotState(SlotColumns):
    """
    Mirror of slots and block tables; owned by the code that applies the batches, in step order.

    Every operation costs time proportional to the batch, not to what the slots hold, except that
    the blocks of a released slot are read once.
    """

    __slots__ = ("_block_keys", "_hash", "_is_steady", "_length_key", "_recent_rows", "_steady")

    def __init__(
        self,
        num_slots: int,
        max_blocks_per_slot: int,
        block_size: int,
        num_blocks: int,
        num_host_blocks: int = 0,
    ) -> None:
        super().__init__(num_slots, max_blocks_per_slot, block_size, num_blocks, num_host_blocks)
        self._hash = StateHash()
        self._block_keys = BlockKeys(num_slots, max_blocks_per_slot, num_blocks)
        self._length_key: UInt64Column = np.zeros(num_slots, np.uint64)
        self._recent_rows: deque[bytes] = deque(maxlen=MAX_STEADY)
        """Slots of the rows of the latest batches that were checked in full, as bytes."""
        self._steady: deque[SteadyRows] = deque()
        """Rows that the next batch may repeat, of disjoint slots; those of the last batch last."""
        self._is_steady: NDArray[np.bool_] = np.zeros(num_slots, np.bool_)
        """True for each slot of these rows."""

    @property
    def state_hash(self) -> int:
        """Hash of the state after the last batch, uint64; 0 when no slot is live."""
        return self._hash.value

    def apply(self, batch: Batch) -> None:
        """
        Check the whole batch, then apply it: release, swap, copy, admit, append, rows.

        Raises:
            SessionLost: The batch does not fit the state, which is unchanged then.
        """
        for steady in self._steady:
            if steady.is_repeated(self, batch):
                self._repeat(steady, batch)
                return
        check_batch(self, batch)
        self._forget_touched(batch)
        for slot in batch.release_slot.tolist():
            self._release(slot)
        if len(batch.swap_out_host):
            self.is_host_written[batch.swap_out_host] = True
        for admission in batch.admits:
            self._admit(admission)
        if len(batch.append_slot):
            self._append(batch.append_slot, batch.append_block)
        if len(batch.row_slot):
            self._advance(batch)
        self._expect_repetition(batch)

    def reset(self) -> None:
        """Reset all slots, with their generations, to the state at the start of a session."""
        for column in (
            self.live,
            self.generation,
            self.planned,
            self.num_tokens_known,
            self.num_blocks_held,
            self.num_holders,
            self.is_host_written,
        ):
            column.fill(0)
        self._hash = StateHash()
        self._forget_rows()

    def _release(self, slot: int) -> None:
        blocks = self.blocks_of(slot)
        self._hash.remove(slot_term(slot, int(self.generation[slot]), int(self.planned[slot])))
        self._hash.remove(self._block_keys.sum_of_table(slot, blocks))
        np.subtract.at(self.num_holders, blocks, 1)
        self.live[slot] = False
        self.planned[slot] = 0
        self.num_tokens_known[slot] = 0
        self.num_blocks_held[slot] = 0

    def _admit(self, admission: Admission) -> None:
        slot, blocks = admission.slot, admission.block_ids
        self.live[slot] = True
        self.generation[slot] = admission.generation
        self.planned[slot] = admission.num_cached_tokens
        self.num_tokens_known[slot] = len(admission.token_ids)
        self.num_blocks_held[slot] = len(blocks)
        self.block_table[slot, : len(blocks)] = blocks
        np.add.at(self.num_holders, blocks, 1)
        self._length_key[slot] = length_key(slot, admission.generation)
        self._hash.add(slot_term(slot, admission.generation, admission.num_cached_tokens))
        self._hash.add(self._block_keys.sum_of_table(slot, blocks))

    def _append(self, slot: Int32Column, block: Int32Column) -> None:
        slots = slot.astype(np.intp)
        index = self.num_blocks_held[slots].astype(np.intp)
        if len(set(slot.tolist())) == len(slot):
            self.num_blocks_held[slots] = index + 1
        else:
            index += _occurrence(slot)
            np.add.at(self.num_blocks_held, slots, 1)
        self.block_table[slots, index] = block
        np.add.at(self.num_holders, block.astype(np.intp), 1)
        self._hash.add(self._block_keys.sum_of_entries(slots, index, block))

    def _append_fresh(self, slot: Int32Column, block: Int32Column) -> None:
        """Append one block that no slot holds to each of some distinct slots."""
        slots, blocks = slot.astype(np.intp), block.astype(np.intp)
        index = self.num_blocks_held[slots].astype(np.intp)
        self.num_blocks_held[slots] = index + 1
        self.block_table[slots, index] = block
        self.num_holders[blocks] = 1
        self._hash.add(self._block_keys.sum_of_entries(slots, index, block))

    def _repeat(self, steady: SteadyRows, batch: Batch) -> None:
        if len(batch.append_slot):
            self._append_fresh(batch.append_slot, batch.append_block)
        steady.advance(batch)
        self._hash.add(steady.key_sum)
        self.planned[steady.slot] = steady.end
        self.num_tokens_known[steady.slot] = steady.end + batch.row_num_tokens
        if len(self._steady) > 1:
            self._steady.remove(steady)
            self._steady.append(steady)

    def _forget_touched(self, batch: Batch) -> None:
        """
        Drop the rows that may be repeated, but for those that a batch leaves as they are: it only
        decodes other slots, and gives these blocks that no slot holds.

        To be called for a batch that fits and is about to take effect.
        """
        if not self._steady and not self._recent_rows:
            return
        blocks = batch.append_block.astype(np.intp)
        if not SteadyRows.is_decode(batch) or self.num_holders[blocks].any():
            self._forget_rows()
            return
        touched = np.concatenate([batch.row_slot, batch.append_slot])
        if not self._is_steady[touched].any():
            return
        for steady in list(self._steady):
            if np.isin(steady.slot, touched).any():
                self._steady.remove(steady)
                self._is_steady[steady.slot] = False

    def _forget_rows(self) -> None:
        """Let no batch count as a repetition before one was checked in full twice."""
        self._steady.clear()
        self._recent_rows.clear()
        self._is_steady.fill(False)

    def _expect_repetition(self, batch: Batch) -> None:
        """Prepare for further repetitions after a second batch of the same decode rows."""
        row_slot = batch.row_slot.tobytes()
        if row_slot in self._recent_rows and SteadyRows.is_decode(batch):
            keys = self._length_key[batch.row_slot.astype(np.intp)]
            steady = SteadyRows(self, batch, int(keys.sum()))
            if steady.is_regular:
                if len(self._steady) == MAX_STEADY:
                    self._is_steady[self._steady.popleft().slot] = False
                self._steady.append(steady)
                self._is_steady[steady.slot] = True
                return
        self._recent_rows.append(row_slot)

    def _advance(self, batch: Batch) -> None:
        slots, end = batch.row_slot.astype(np.intp), batch.row_start + batch.row_num_tokens
        num_tokens = batch.row_num_tokens.astype(np.uint64)
        self._hash.add(int(self._length_key[slots].dot(num_tokens)))
        self.planned[slots] = end
        self.num_tokens_known[slots] += batch.row_flags == ROW_SAMPLES


def _occurrence(values: Int32Column) -> Int32Column:
    """Return the number of equal values before each entry: 5 7 5 5 -> 0 0 1 2."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    is_first = np.r_[True, ordered[1:] != ordered[:-1]]
    place = np.arange(len(values), dtype=np.int32)
    occurrence = np.empty(len(values), np.int32)
    occurrence[order] = place - np.maximum.accumulate(np.where(is_first, place, 0))
    return occurrence
