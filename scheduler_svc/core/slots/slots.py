"""The slots of one executor as columns, one entry per slot, and the block table."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.invariants import require
from scheduler_svc.core.request.geometry import BlockIds, Limits
from scheduler_svc.core.request.request import Request
from scheduler_svc.core.slots.admitted_columns import AdmittedColumns
from scheduler_svc.core.slots.decode_rows import DecodeRows, GrowingRows, RowConstants
from scheduler_svc.core.slots.lanes import Lanes
from scheduler_svc.core.slots.planned_rows import SlotColumn
from scheduler_svc.core.slots.slot_blocks import SlotBlocks
from scheduler_svc.core.slots.slot_checks import check_slots
from scheduler_svc.core.slots.slot_tokens import SlotTokens
from tandem.link.batch import Int32Column
from tandem.link.slots.state_hash import StateHash, block_terms, length_key, slot_term


class SlotTable:
    """
    Columns over all slots, shape ``[slots]``; a row is meaningful while `live`.

    Attributes:
        live: True while the executor holds this slot.
        running: True while its request goes on; a live slot that is not running is released in the
            next batch.
        decoding: True while it is running, all its admitted tokens were sent for computing, and its
            request is not paused.
        generation: Number of admissions to this slot.
        admitted: What the request of each slot is.
        tokens: Results seen of each slot.
        blocks: Block table of each slot.
        num_running: Number of running slots.
        num_decoding: Number of decoding slots.
        replica: Number of the executor.
        num_departures: Number of times that a request lost or left its slot.
    """

    __slots__ = (
        "_constants",
        "_decode_rows",
        "_free",
        "_hash",
        "_kept_rows",
        "_lanes",
        "_length_key",
        "_next_version",
        "_planned",
        "_requests",
        "_served",
        "_vacated",
        "admitted",
        "blocks",
        "decoding",
        "generation",
        "live",
        "num_decoding",
        "num_departures",
        "num_running",
        "replica",
        "running",
        "tokens",
    )

    def __init__(self, limits: Limits, first_version: int = 1, *, replica: int = 0) -> None:
        """
        Args:
            limits: Numbers of slots and blocks.
            first_version: Version of the first decode rows, higher than any of the slot table that
                this one replaces.
            replica: Number of the executor.
        """
        n = limits.num_slots
        self.live = np.zeros(n, np.bool_)
        self.running = np.zeros(n, np.bool_)
        self.decoding = np.zeros(n, np.bool_)
        self.generation = np.zeros(n, np.uint32)
        self._planned = np.zeros(n, np.int32)
        self._requests: list[Request | None] = [None] * n
        self.admitted = AdmittedColumns(n)
        self.tokens = SlotTokens(n, self.request_of)
        self.blocks = SlotBlocks(limits)
        self._lanes = Lanes(limits.num_stages, n)
        """Lane of each decoding slot; one for all where the executor has no stages."""
        self._vacated: dict[int, Request] = {}
        """Live slots without a request, each with the one that it had, in the order of leaving."""
        self.num_running = 0
        self.num_decoding = 0
        self.num_departures = 0
        self._served = np.zeros(n, np.int64)
        self._free = list(range(n - 1, -1, -1))
        self._hash = StateHash()
        self._length_key = np.zeros(n, np.uint64)
        self._constants = RowConstants(n)
        self._decode_rows: DecodeRows | None = None
        self._kept_rows: dict[int, DecodeRows] = {}
        """Rows of the other lanes, by lane, which stay as they are until these have their turns."""
        self._next_version = first_version
        self.replica = replica

    @property
    def planned(self) -> Int32Column:
        """Tokens sent for computing, by slot."""
        self._write_planned()
        return self._planned

    def state_hash(self) -> int:
        """Return the hash of everything sent so far."""
        return self._hash.value

    def next_version(self) -> int:
        """Return the version that the next decode rows will have."""
        return self._next_version

    def num_free(self) -> int:
        """Return the number of slots that are not live."""
        return len(self._free)

    def num_lanes(self) -> int:
        """Return the number of lanes, 1 where the executor has no stages."""
        return self._lanes.num_lanes

    def num_busy_lanes(self) -> int:
        """Return the number of lanes with a decoding slot."""
        return self._lanes.num_busy

    def num_unsent(self) -> int:
        """Return the number of tokens of admitted requests that are yet to be sent."""
        if self.num_running == self.num_decoding:
            return 0
        slots = (self.running & ~self.decoding).nonzero()[0]
        unsent = self.admitted.submitted_len[slots] - self.planned[slots]
        return int(np.maximum(unsent, 0).sum())

    def holder(self, slot: int) -> Request | None:
        """Return the request that runs in a slot, if any."""
        return self._requests[slot]

    def holds(self, request: Request) -> bool:
        """Return True while a request has a slot here."""
        return request.place.slot is not None and request.place.replica == self.replica

    def running_requests(self) -> list[Request]:
        """Return the running requests, ordered by slot."""
        return [request for request in self._requests if request is not None]

    def request_of(self, slot: int) -> Request:
        """Return the request of a running slot."""
        request = self._requests[slot]
        assert request is not None
        return request

    def occupy(
        self, request: Request, blocks: Int32Column, max_blocks: int, num_cached: int = 0
    ) -> int:
        """
        Give a request a free slot under a new generation, with `num_cached` positions computed
        already; returns the slot.
        """
        slot = self._free.pop()
        self.live[slot] = self.running[slot] = True
        self.decoding[slot] = False
        self.generation[slot] += 1
        generation = int(self.generation[slot])
        self.planned[slot] = num_cached
        self.admitted.begin(slot, request, max_blocks)
        self.tokens.begin(slot, request, num_cached)
        self._served[slot] = 0
        self._requests[slot] = request
        self.num_running += 1
        request.place.enter(slot, generation)
        self._length_key[slot] = length_key(slot, generation)
        self._hash.add(slot_term(slot, generation, int(self.planned[slot])))
        self._hash.add(self.blocks.begin(slot, blocks))
        return slot

    def vacate(self, slot: int) -> None:
        """
        Take a running slot away from its request, which takes along its tokens and counters; the
        slot stays live until `forget`.
        """
        request = self.request_of(slot)
        self.tokens.flush(slot)
        request.place.leave(int(self.planned[slot]), int(self.tokens.applied[slot]))
        if len(request.outputs) > request.terms.num_prior:
            request.times.note_token(float(self.tokens.last_token_s[slot]))
        self._requests[slot] = None
        self.admitted.end(request)
        self.set_decoding(slot, is_decoding=False)
        self.running[slot] = False
        self.num_running -= 1
        self.num_departures += 1
        self._vacated[slot] = request

    def has_vacated(self) -> bool:
        """Return True while a vacated slot is not yet forgotten."""
        return bool(self._vacated)

    def vacated(self) -> list[int]:
        """Return the slots that are vacated and not yet forgotten, in the order of leaving."""
        return list(self._vacated)

    def left_by(self, slot: int) -> Request | None:
        """Return the request that had a vacated slot; None for any other slot."""
        return self._vacated.get(slot)

    def forget(self, slot: int) -> tuple[Request, Int32Column]:
        """Free a vacated slot; returns the request that lost it and the blocks it held."""
        blocks, block_terms_sum = self.blocks.end(slot)
        self._hash.remove(slot_term(slot, int(self.generation[slot]), int(self.planned[slot])))
        self._hash.remove(block_terms_sum)
        self.live[slot] = False
        self._free.append(slot)
        return self._vacated.pop(slot), blocks

    def next_blocks(self, growing: GrowingRows) -> BlockIds:
        """
        Return the ids behind the last block of each of these rows, all of which have a block,
        shape ``[G]``; to be read only.

        No two decoding slots share a last block: each has computed its last position itself.
        """
        if growing.next is not None:
            return growing.next
        return self.blocks.last_of(growing.slot).astype(np.intp) + 1

    def append_blocks(self, growing: GrowingRows, blocks: BlockIds) -> None:
        """Give each of these rows one more block, shape ``[G]``."""
        if growing.is_periodic:
            self._hash.add(self.blocks.append_due(growing, blocks))
            return
        if self._decode_rows is not None:
            self._decode_rows.forget_turns()
        self._hash.add(self.blocks.append(growing.slot, blocks))

    def advance(self, slots: SlotColumn, planned: Int32Column) -> None:
        """Set the planned length of these slots, none twice; both shape ``[N]``."""
        slots = slots.astype(np.intp, copy=False)
        num_tokens = (planned - self.planned[slots]).astype(np.uint64)
        self._hash.add(int(np.dot(self._length_key[slots], num_tokens)))
        self.planned[slots] = planned
        self._forget_rows()

    def set_decoding(self, slot: int, is_decoding: bool) -> None:
        """Let a running slot take part in decode steps from now on, or not."""
        self._forget_rows()
        if is_decoding == bool(self.decoding[slot]):
            return
        self.num_decoding += 1 if is_decoding else -1
        self.decoding[slot] = is_decoding
        if not is_decoding:
            self._lanes.leave(slot)
        elif self._planned[slot] < self.admitted.known_len[slot]:
            self._lanes.join(slot)
        else:
            self._lanes.rejoin(slot)

    def next_lane(self) -> None:
        """Let the next lane have its turn: `decode_rows` returns its rows from now on."""
        lanes = self._lanes
        if self._decode_rows is not None:
            self._kept_rows[lanes.turn] = self._decode_rows
        lanes.take_turn()
        self._decode_rows = self._kept_rows.pop(lanes.turn, None)
        if (lanes.held or lanes.is_uneven()) and lanes.settle(
            self.decoding, self.planned, self.tokens.applied, self.admitted.turn
        ):
            self._forget_rows()

    def decode_rows(self) -> DecodeRows:
        """
        Return the rows of this turn's decoding slots with tokens left to compute, ordered by slot.
        """
        if self._decode_rows is None:
            self._decode_rows = self.rows_of(self._ready(), self._next_version)
            self._next_version += 1
        return self._decode_rows

    def _ready(self, lane: int | None = None) -> NDArray[np.intp]:
        """
        Return the decoding slots of a lane, by default that of this turn, with tokens left to
        compute, in order.
        """
        ready = (self.decoding & (self.planned < self.admitted.stop_len - 1)).nonzero()[0]
        return ready if self._lanes.num_lanes == 1 else self._lanes.select(ready, lane)

    def rows_of(self, slots: NDArray[np.intp], version: int = 0) -> DecodeRows:
        """Return the rows of these decoding slots, shape ``[N]``, for one step unless numbered."""
        return DecodeRows(
            slots,
            version=version,
            constants=self._constants,
            generation=self.generation[slots],
            handle=self.admitted.handle[slots],
            prompt_len=self.admitted.prompt_len[slots],
            start=self.planned[slots],
            capacity=self.blocks.num_blocks[slots] * self.blocks.block_size,
            stop_len=self.admitted.stop_len[slots],
            key_sum=int(self._length_key[slots].sum()),
            block_size=self.blocks.block_size,
        )

    def with_turn(self, slots: NDArray[np.intp]) -> NDArray[np.intp]:
        """Return those of these decoding slots that the step being planned may compute."""
        return self._lanes.select(slots)

    def full_rows(self, rows: DecodeRows) -> GrowingRows:
        """Return those of these rows that need a block, in their order."""
        growing = rows.full()
        if growing is not None:
            return growing
        num_blocks = self.blocks.num_blocks[rows.slot]
        return GrowingRows(rows.slot[rows.start == num_blocks * self.blocks.block_size])

    def least_served(self, ready: NDArray[np.intp], count: int) -> NDArray[np.intp]:
        """
        Choose those of these decoding slots, more than `count`, that waited longest for a token,
        oldest requests first; shape ``[count]``. They count as served by the step being planned.
        """
        order = np.lexsort((self.admitted.number[ready], self._served[ready]))
        chosen: NDArray[np.intp] = ready[order[:count]]
        self._served[chosen] = self._served.max() + 1 + np.arange(len(chosen))
        return chosen

    def advance_rows(self, rows: DecodeRows) -> Int32Column:
        """Note that one token of each row is sent for computing; returns the positions after."""
        end = rows.advance()
        self._hash.add(rows.key_sum)
        if self._decode_rows is None or rows.version != self._decode_rows.version:
            self._forget_rows()
            self._planned[rows.slot] = end
        elif not rows.num_left:
            self._forget_rows()
        return end

    def _forget_rows(self) -> None:
        """Drop the rows of decode steps, since they change; `decode_rows` makes new ones."""
        self._write_planned()
        self._decode_rows = None
        if self._kept_rows:
            self._kept_rows.clear()

    def _write_planned(self) -> None:
        """Bring the column of planned tokens up to date with the rows of decode steps."""
        rows = self._decode_rows
        if rows is not None and (start := rows.take_start()) is not None:
            self._planned[rows.slot] = start
        if self._kept_rows:
            for rows in self._kept_rows.values():
                if (start := rows.take_start()) is not None:
                    self._planned[rows.slot] = start

    def num_outputs(self, slot: int) -> int:
        """Return the number of output tokens known of a slot's request."""
        return int(self.tokens.known[slot] - self.admitted.prompt_len[slot])

    def num_may_grow(self) -> int:
        """Return the number of running slots that may need another block."""
        return int(
            np.count_nonzero(self.running & (self.blocks.num_blocks < self.admitted.max_blocks))
        )

    def owned_blocks(self) -> Int32Column:
        """Return every block in every table, once per table that has it, shape ``[H]``."""
        width = self.blocks.table.shape[1]
        held: NDArray[np.bool_] = np.arange(width) < self.blocks.num_blocks[:, None]
        return self.blocks.table[held & self.live[:, None]]

    def check_integrity(self) -> None:
        """
        Check each part, and compare the columns, the requests in the slots and the state hash.

        Raises:
            InternalError: The first invariant that does not hold.
        """
        self.tokens.check_integrity()
        self.blocks.check_integrity(self.live)
        running = {slot: one for slot, one in enumerate(self._requests) if one is not None}
        self.admitted.check_integrity(running)
        is_free = sorted(self._free) == np.flatnonzero(~self.live).tolist()
        require(is_free, "the free slots are not those that are not live")
        check_slots(self)
        self._lanes.check_integrity(self.decoding)
        if self._decode_rows is not None:
            self._decode_rows.check_integrity(self.rows_of(self._ready()))
        for lane, rows in self._kept_rows.items():
            rows.check_integrity(self.rows_of(self._ready(lane)))

    def recomputed_hash(self) -> int:
        """Compute the state hash from scratch, to compare with `state_hash`."""
        fresh = StateHash()
        for slot in np.flatnonzero(self.live).tolist():
            blocks = self.blocks.of_slot(slot)
            fresh.add(slot_term(slot, int(self.generation[slot]), int(self.planned[slot])))
            fresh.add(int(block_terms(slot, np.arange(len(blocks)), blocks).sum()))
        return fresh.value
