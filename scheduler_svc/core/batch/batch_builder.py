"""One batch while it is being planned."""

from __future__ import annotations

import numpy as np

from scheduler_svc.core.batch.headroom import Headroom
from scheduler_svc.core.batch.swapping import Swaps
from scheduler_svc.core.request.geometry import BlockIds
from scheduler_svc.core.slots.decode_rows import DecodeRows, GrowingRows
from scheduler_svc.core.slots.planned_rows import PlannedRows
from scheduler_svc.core.state.replica import Replica
from tandem.link.batch import NO_INT32, ROW_SAMPLES, Admission, Batch, Int32Column


class BatchBuilder:
    """
    The batch being planned; the replica is changed as rows are added.

    Attributes:
        replica: The executor that is to compute the batch.
        budget: Tokens that the batch may still have.
        long_room: Tokens that prompts over long_prefill_threshold may still take before all others.
        decodes: Decode rows; None without any.
        prefills: Slot, tokens and flags of each prefill row, in the order of the rows.
        admits: Requests that the batch gives a slot.
        swaps: Copies to and from host memory; None without any.
        num_preempted: Number of requests preempted for want of blocks by this plan.
    """

    __slots__ = (
        "_append_block",
        "_append_slot",
        "_copies",
        "_headroom",
        "_held_back",
        "_released",
        "admits",
        "budget",
        "decodes",
        "long_room",
        "num_preempted",
        "prefills",
        "replica",
        "swaps",
    )

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.budget = replica.room.tokens(replica.limits.max_total_tokens)
        self.long_room = 0
        self.decodes: DecodeRows | None = None
        self.prefills: list[tuple[int, int, int]] = []
        self.admits: list[Admission] = []
        self.swaps: Swaps | None = None
        self.num_preempted = 0
        self._held_back = 0
        self._headroom: Headroom | None = None
        self._released: list[int] = []
        self._append_slot: Int32Column = NO_INT32
        self._append_block: Int32Column = NO_INT32
        self._copies: list[tuple[int, int]] = []
        """(source, destination) per block to copy; the sources are held until the batch is made."""

    @property
    def is_empty(self) -> bool:
        """True while there is nothing to send, so that the plan has changed nothing yet."""
        is_changed = self.computes or self._released or self.swaps or len(self._append_slot)
        return not is_changed

    @property
    def computes(self) -> bool:
        """True when the batch has a row."""
        return bool(self.prefills) or self.decodes is not None

    def hold_back(self, num_tokens: int) -> None:
        """Keep so many tokens of the budget for rows that are added after `free_held_back`."""
        self.budget -= num_tokens
        self._held_back += num_tokens

    def free_held_back(self) -> None:
        """Put the tokens that were held back into the budget again."""
        self.budget += self._held_back
        self._held_back = 0

    def limit_long_prompts(self, num_tokens: int) -> None:
        """Let long prompts share so many tokens, at most half of the budget, before all others."""
        self.long_room = min(num_tokens, max(self.budget // 2, 1))

    def add_decodes(self, rows: DecodeRows) -> None:
        """Add one token for each of these rows, which are all the decodes of the batch."""
        self.decodes = rows
        self.budget -= rows.num_rows
        self.replica.steps.note_decodes()

    def add_prefill(self, slot: int, num_tokens: int, *, samples: bool, is_long: bool) -> None:
        """Add a row for so many tokens of a prompt."""
        self.budget -= num_tokens
        if is_long:
            self.long_room -= num_tokens
        self.prefills.append((slot, num_tokens, int(ROW_SAMPLES) if samples else 0))

    def lengthen_prefill(self, index: int, num_tokens: int, *, samples: bool) -> None:
        """Give the prefill row at `index` so many tokens, more than it has."""
        slot, before, _ = self.prefills[index]
        self.budget -= num_tokens - before
        self.prefills[index] = slot, num_tokens, int(ROW_SAMPLES) if samples else 0

    def add_admission(self, admission: Admission) -> None:
        """Admit a request, which has its slot and its blocks already."""
        self.admits.append(admission)

    def note_preemption(self) -> None:
        """Count one more preemption for want of blocks; none is admitted by a plan with any."""
        self.num_preempted += 1

    def release_ended(self) -> None:
        """Release each vacated slot, with its copy to host memory if one is planned."""
        for slot in self.replica.slots.vacated():
            if self.replica.kv.has_planned_swaps:
                self.swapping().copy_out(slot)
            self.replica.release(slot)
            self._released.append(slot)

    def swapping(self) -> Swaps:
        """Return the batch's copies to and from host memory, for adding more."""
        if self.swaps is None:
            self.swaps = Swaps(self.replica)
        return self.swaps

    def headroom(self) -> Headroom:
        """Return the blocks that this plan may give to new requests."""
        if self._headroom is None:
            self._headroom = Headroom(self.replica)
        return self._headroom

    def append_blocks(self, growing: GrowingRows, blocks: BlockIds) -> None:
        """Give each of these rows, none twice in one batch, one more block."""
        self.replica.slots.append_blocks(growing, blocks)
        row_slot = growing.row_slot
        row_block = blocks.astype(np.int32)
        if len(self._append_slot):
            row_slot = np.concatenate([self._append_slot, row_slot])
            row_block = np.concatenate([self._append_block, row_block])
        self._append_slot, self._append_block = row_slot, row_block

    def copy(self, source: int, destination: int) -> None:
        """
        Copy one block to another before the batch computes.

        The caller holds the source. No request may take it before the batch is planned, or it could
        become the destination of another copy.
        """
        self._copies.append((source, destination))

    def batch(self) -> Batch | None:
        """Return the finished batch, noted as in flight; None when there is nothing to send."""
        rows, slots = self.decodes, self.replica.slots
        if self.prefills or self._released:
            return self._any_batch()
        if rows is None:
            return None if self.is_empty else self._any_batch()
        start = rows.start
        end = slots.advance_rows(rows)
        self.replica.steps.note_sent(PlannedRows.of_decodes(rows, end, slots.num_departures))
        return Batch(
            row_slot=rows.row_slot,
            row_num_tokens=rows.num_tokens,
            row_start=start,
            row_flags=rows.flags,
            rows_version=rows.version,
            append_slot=self._append_slot,
            append_block=self._append_block,
            # Nearly every batch is made here, and each default would be a call more.
            release_slot=NO_INT32,
            copy_source=NO_INT32,
            copy_destination=NO_INT32,
            swap_out_block=NO_INT32,
            swap_out_host=NO_INT32,
            swap_in_host=NO_INT32,
            swap_in_block=NO_INT32,
        )

    def _any_batch(self) -> Batch:
        rows, slots = self.decodes, self.replica.slots
        columns = np.array(self.prefills, np.int32).reshape(-1, 3)
        slot, num_tokens = columns[:, 0], columns[:, 1]
        flags, start = columns[:, 2].astype(np.uint8), slots.planned[slot]
        end = start + num_tokens
        slots.advance(slot, end)
        if rows is not None:
            slot = np.concatenate([rows.row_slot, slot])
            num_tokens = np.concatenate([rows.num_tokens, num_tokens])
            flags = np.concatenate([rows.flags, flags])
            start = np.concatenate([rows.start, start])
            end = np.concatenate([slots.advance_rows(rows), end])
        planned = PlannedRows.of_rows(
            rows,
            slot=slot,
            generation=slots.generation[slot],
            num_tokens=num_tokens,
            end=end,
            samples=flags == ROW_SAMPLES,
            num_departures=slots.num_departures,
        )
        self.replica.steps.note_sent(planned)
        if self.prefills:
            self._settle_prompts()
        copies = np.array(self._copies, np.int32).reshape(-1, 2)
        batch = Batch(
            admits=tuple(self.admits),
            row_slot=slot,
            row_num_tokens=num_tokens,
            row_start=start,
            row_flags=flags,
            append_slot=self._append_slot,
            append_block=self._append_block,
            release_slot=np.array(self._released, np.int32) if self._released else NO_INT32,
            copy_source=copies[:, 0],
            copy_destination=copies[:, 1],
        )
        return batch if self.swaps is None else self.swaps.added_to(batch)

    def _settle_prompts(self) -> None:
        """Let the next batch match the KV this one computes, and give back the copies' sources."""
        for slot, _, _ in self.prefills:
            self.replica.kv.prefix_cache.index_sent(slot)
        if self._copies:
            sources = [source for source, _ in self._copies]
            self.replica.kv.pool.give_back(np.array(sources, np.int32))
