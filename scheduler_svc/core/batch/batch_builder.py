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
    """The batch being planned; the replica is changed as rows are added."""

    __slots__ = (
        "_headroom",
        "admits",
        "append_block",
        "append_slot",
        "budget",
        "copies",
        "decodes",
        "long_room",
        "num_preempted",
        "prefills",
        "released",
        "replica",
        "swaps",
    )

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self._headroom: Headroom | None = None
        self.budget = replica.room.tokens(replica.limits.max_total_tokens)
        self.long_room = 0
        """Tokens that prompts over long_prefill_threshold may still take before all others."""
        self.released: list[int] = []
        self.decodes: DecodeRows | None = None
        self.append_slot: Int32Column = NO_INT32
        self.append_block: Int32Column = NO_INT32
        self.prefills: list[tuple[int, int, int]] = []
        """(slot, tokens, flags) per prefill row."""
        self.admits: list[Admission] = []
        self.copies: list[tuple[int, int]] = []
        """(source, destination) per block to copy; the sources are held until the batch is made."""
        self.num_preempted = 0
        self.swaps: Swaps | None = None
        """Copies to and from host memory; None without any."""

    def release_ended(self) -> None:
        """Release each vacated slot, with its copy to host memory if one is planned."""
        for slot in list(self.replica.slots.ended):
            if self.replica.kv.has_planned_swaps:
                self.swapping().copy_out(slot)
            self.replica.release(slot)
            self.released.append(slot)

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
        if len(self.append_slot):
            row_slot = np.concatenate([self.append_slot, row_slot])
            row_block = np.concatenate([self.append_block, row_block])
        self.append_slot, self.append_block = row_slot, row_block

    def copy(self, source: int, destination: int) -> None:
        """
        Copy one block to another before the batch computes.

        The caller holds the source. No request may take it before the batch is planned, or it could
        become the destination of another copy.
        """
        self.copies.append((source, destination))

    def batch(self) -> Batch | None:
        """Return the finished batch, noted as in flight; None when there is nothing to send."""
        rows, slots = self.decodes, self.replica.slots
        if self.prefills or self.released or rows is None:
            return self._any_batch()
        start = rows.start
        end = slots.advance_rows(rows)
        planned = PlannedRows.of_decodes(rows, end, slots.num_departures)
        self.replica.in_flight.append(planned)
        return Batch(
            row_slot=rows.row_slot,
            row_num_tokens=rows.num_tokens,
            row_start=start,
            row_flags=rows.flags,
            rows_version=rows.version,
            append_slot=self.append_slot,
            append_block=self.append_block,
        )

    def _any_batch(self) -> Batch | None:
        rows, slots = self.decodes, self.replica.slots
        if rows is None and not self.prefills and not self.released:
            return None
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
        generation, samples = slots.generation[slot], flags == ROW_SAMPLES
        self.replica.in_flight.append(
            PlannedRows(
                slot=slot,
                generation=generation,
                num_tokens=num_tokens,
                sampling_slot=slot[samples],
                sampling_generation=generation[samples],
                sampling_end=end[samples],
                num_decodes=0 if rows is None else len(rows),
                decodes=rows,
                num_departures=slots.num_departures,
                has_last_decode=rows is not None and not rows.num_left,
            )
        )
        if self.prefills:
            self._settle_prompts()
        copies = np.array(self.copies, np.int32).reshape(-1, 2)
        batch = Batch(
            admits=tuple(self.admits),
            row_slot=slot,
            row_num_tokens=num_tokens,
            row_start=start,
            row_flags=flags,
            append_slot=self.append_slot,
            append_block=self.append_block,
            release_slot=np.array(self.released, np.int32) if self.released else NO_INT32,
            copy_source=copies[:, 0],
            copy_destination=copies[:, 1],
        )
        if self.swaps is not None:
            self.swaps.write_to(batch)
        return batch

    def _settle_prompts(self) -> None:
        """Let the next batch match the KV this one computes, and give back the copies' sources."""
        for slot, _, _ in self.prefills:
            self.replica.kv.prefix_cache.index_sent(slot)
        if self.copies:
            self.replica.kv.pool.give_back(
                np.array([source for source, _ in self.copies], np.int32)
            )
