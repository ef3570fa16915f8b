"""The slots of one executor as columns, one entry per slot, and the block table."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.request.geometry import BlockIds, Limits
from scheduler_svc.core.request.request import Request
from scheduler_svc.core.slots.decode_rows import DecodeRows, RowConstants
from scheduler_svc.core.slots.end_ids import EndIds
from scheduler_svc.core.slots.slot_blocks import SlotBlocks
from scheduler_svc.core.slots.slot_tokens import SlotTokens
from tandem.link.batch import Int32Column
from tandem.link.slots.state_hash import StateHash, block_terms, length_key, slot_term

SlotColumn: TypeAlias = NDArray[np.intp] | Int32Column
"""Slot numbers, as an index of numpy or as a column of a batch."""


class SlotTable:
    """
    Columns over all slots; a row is meaningful while `live`.

    Attributes:
        live: True while the executor holds this slot.
        running: True while its request goes on; a live slot that is not running is released in the
            next batch.
        decoding: True while it is running, all its admitted tokens were sent for computing, and its
            request is not paused.
        generation: Number of admissions to this slot.
        admitted: Tokens known at admission; computing these is prefill.
        prompt_len: Tokens of the prompt.
        submitted_len: Tokens the request came with, prompt and prior outputs.
        stop_len: Tokens of prompt plus output at which the request ends; the last is never
            computed.
        max_blocks: Most blocks the request can need.
        handle: The request's handle.
        number: The request's place in arrival order.
        turn: Number of the request's admission, counted over all slots.
        served: Rank of its latest decode in a step without room for every decode: the lowest ranks
            are next.
        requests: The request of each slot; None without one.
        num_departures: Number of times that a request lost or left its slot.
    """

    def __init__(self, limits: Limits) -> None:
        n = limits.num_slots
        self.block_size = limits.block_size
        self.live = np.zeros(n, np.bool_)
        self.running = np.zeros(n, np.bool_)
        self.decoding = np.zeros(n, np.bool_)
        self.generation = np.zeros(n, np.uint32)
        self.admitted = np.zeros(n, np.int32)
        self.prompt_len = np.zeros(n, np.int32)
        self.submitted_len = np.zeros(n, np.int32)
        self.stop_len = np.zeros(n, np.int32)
        self.max_blocks = np.zeros(n, np.int32)
        self.handle = np.zeros(n, np.int64)
        self.number = np.zeros(n, np.int64)
        self.turn = np.zeros(n, np.int64)
        self.served = np.zeros(n, np.int64)
        self.requests: list[Request | None] = [None] * n
        self._tokens = SlotTokens(self.requests)
        self._planned = np.zeros(n, np.int32)
        self.ended: list[int] = []
        """Live slots that are vacated, as their request ended or was preempted."""
        self.end_ids = EndIds()
        self.num_running = 0
        self.num_decoding = 0
        self.num_departures = 0
        self._num_turns = 0
        self._free = list(range(n - 1, -1, -1))
        self._hash = StateHash()
        self._blocks = SlotBlocks(limits)
        self._length_key = np.zeros(n, np.uint64)
        self._constants = RowConstants(n)
        self._decode_rows: DecodeRows | None = None

    @property
    def state_hash(self) -> int:
        """Hash of everything sent so far."""
        return self._hash.value

    @property
    def planned(self) -> Int32Column:
        """Tokens sent for computing, by slot."""
        if self._decode_rows is not None:
            self._decode_rows.write_start(self._planned)
        return self._planned

    @property
    def num_blocks(self) -> NDArray[np.intp]:
        """Blocks in the table of each slot."""
        return self._blocks.num_blocks

    @property
    def block_table(self) -> Int32Column:
        """Block ids, shape ``[slots, max_blocks_per_seq]``, meaningful up to `num_blocks`."""
        return self._blocks.table

    @property
    def applied(self) -> Int32Column:
        """Tokens computed, as far as results were seen, by slot."""
        return self._tokens.applied

    @property
    def known(self) -> Int32Column:
        """Tokens that the core knows, prompt and outputs, by slot."""
        return self._tokens.known

    @property
    def last_token_s(self) -> NDArray[np.float64]:
        """Time at which the latest token of each slot was seen."""
        return self._tokens.last_token_s

    @property
    def num_free(self) -> int:
        """Number of slots that are not live."""
        return len(self._free)

    def request_of(self, slot: int) -> Request:
        """Return the request of a running slot."""
        request = self.requests[slot]
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
        self.planned[slot] = num_cached
        self.admitted[slot] = request.num_known
        self._tokens.begin(slot, request, num_cached)
        self.prompt_len[slot] = request.prompt_len
        self.submitted_len[slot] = request.prompt_len + request.num_prior
        self.stop_len[slot] = request.stop_len
        self.max_blocks[slot] = max_blocks
        self.handle[slot] = request.new.handle
        self.number[slot] = request.number
        self.turn[slot] = self._num_turns = self._num_turns + 1
        self.served[slot] = 0
        self.end_ids.add(request.end_ids)
        self.requests[slot] = request
        self.num_running += 1
        request.slot = slot
        request.slot_key = slot, int(self.generation[slot])
        generation = int(self.generation[slot])
        self._length_key[slot] = length_key(slot, generation)
        self._hash.add(slot_term(slot, generation, int(self.planned[slot])))
        self._hash.add(self._blocks.begin(slot, blocks))
        return slot

    def vacate(self, slot: int) -> None:
        """
        Take a running slot away from its request, which takes along its tokens and counters; the
        slot stays live until `forget`.
        """
        request = self.request_of(slot)
        self.flush_tail(slot)
        request.slot = None
        request.planned, request.applied = int(self.planned[slot]), int(self.applied[slot])
        if len(request.outputs) > request.num_prior:
            request.last_token_s = float(self.last_token_s[slot])
        self.requests[slot] = None
        self.end_ids.remove(request.end_ids)
        self.set_decoding(slot, is_decoding=False)
        self.running[slot] = False
        self.num_running -= 1
        self.num_departures += 1
        self.ended.append(slot)

    def forget(self, slot: int) -> Int32Column:
        """Free a vacated slot; returns the blocks it held."""
        blocks, block_terms_sum = self._blocks.end(slot)
        self._hash.remove(slot_term(slot, int(self.generation[slot]), int(self.planned[slot])))
        self._hash.remove(block_terms_sum)
        self.live[slot] = False
        self._free.append(slot)
        return blocks

    def next_blocks(self, slots: NDArray[np.intp]) -> BlockIds:
        """
        Return the ids behind the last block of each of these slots, all of which have a block,
        shape ``[N]``; to be read only.

        No two decoding slots share a last block: each has computed its last position itself.
        """
        growing = None if self._decode_rows is None else self._decode_rows.growing
        if growing is not None and growing.slot is slots and growing.next is not None:
            return growing.next
        return self._blocks.last_of(slots).astype(np.intp) + 1

    def append_blocks(self, slots: NDArray[np.intp], blocks: BlockIds) -> Int32Column:
        """
        Give each of these slots, none twice, one more block; both shape ``[N]``. Returns the slots
        as a column of a batch.
        """
        growing = None if self._decode_rows is None else self._decode_rows.growing
        if growing is not None and growing.slot is slots:
            self._hash.add(self._blocks.append_due(growing, blocks))
            return growing.row_slot
        if self._decode_rows is not None:
            self._decode_rows.forget_turns()
        self._hash.add(self._blocks.append(slots, blocks))
        return slots.astype(np.int32)

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
        self.num_decoding += is_decoding - int(self.decoding[slot])
        self.decoding[slot] = is_decoding

    def decode_rows(self) -> DecodeRows:
        """Return the rows of all decoding slots with tokens left to compute, ordered by slot."""
        if self._decode_rows is None:
            is_ready = self.decoding & (self.planned < self.stop_len - 1)
            self._decode_rows = self.rows_of(is_ready.nonzero()[0])
        return self._decode_rows

    def rows_of(self, slots: NDArray[np.intp]) -> DecodeRows:
        """Return the rows of these decoding slots, shape ``[N]``."""
        return DecodeRows(
            slots,
            constants=self._constants,
            generation=self.generation[slots],
            handle=self.handle[slots],
            prompt_len=self.prompt_len[slots],
            start=self.planned[slots],
            capacity=self.num_blocks[slots] * self.block_size,
            stop_len=self.stop_len[slots],
            key_sum=int(self._length_key[slots].sum()),
            block_size=self.block_size,
        )

    def full_slots(self, ready: NDArray[np.intp]) -> NDArray[np.intp]:
        """Return those of these decoding slots that need a block, shape ``[F]``, in their order."""
        rows = self._decode_rows
        if rows is not None and rows.slot is ready:
            ready = rows.full()
            if rows.is_regular:
                return ready
        is_full = self.planned[ready] == self.num_blocks[ready] * self.block_size
        full: NDArray[np.intp] = ready[is_full]
        return full

    def advance_rows(self, rows: DecodeRows) -> Int32Column:
        """Note that one token of each row is sent for computing; returns the positions after."""
        end = rows.advance()
        self._hash.add(rows.key_sum)
        if rows is not self._decode_rows:
            self._forget_rows()
            self._planned[rows.slot] = end
        elif not rows.num_left:
            self._forget_rows()
        return end

    def _forget_rows(self) -> None:
        """Drop the rows of decode steps, since they change; `decode_rows` makes new ones."""
        if self._decode_rows is not None:
            self._decode_rows.write_start(self._planned)
            self._decode_rows = None

    def push_tokens(
        self, slots: NDArray[np.intp], position: Int32Column, token: Int32Column
    ) -> None:
        """Append one output token to each of these slots, none twice; all three ``[N]``."""
        self._tokens.push(slots, position, token)

    def push_decodes(
        self, rows: DecodeRows, position: Int32Column, token: Int32Column, now: float
    ) -> None:
        """Note the result of a step for rows that all run; see `SlotTokens.push_decodes`."""
        self._tokens.push_decodes(rows, position, token, now)

    def flush_tail(self, slot: int) -> None:
        """Move a slot's tail of latest tokens to its request."""
        self._tokens.flush(slot)

    def tail_len(self, slot: int) -> int:
        """Return the number of output tokens that are not in the request yet."""
        return self._tokens.tail_len(slot)

    def num_outputs(self, slot: int) -> int:
        """Return the number of output tokens known of a slot's request."""
        return int(self.known[slot] - self.prompt_len[slot])

    def num_may_grow(self) -> int:
        """Return the number of running slots that may need another block."""
        return int(np.count_nonzero(self.running & (self.num_blocks < self.max_blocks)))

    def owned_blocks(self) -> Int32Column:
        """Return every block in every table, once per table that has it, shape ``[H]``."""
        width = self.block_table.shape[1]
        held: NDArray[np.bool_] = np.arange(width) < self.num_blocks[:, None]
        return self.block_table[held & self.live[:, None]]

    def recomputed_hash(self) -> int:
        """Compute the state hash from scratch, to compare with `state_hash`."""
        fresh = StateHash()
        for slot in np.flatnonzero(self.live).tolist():
            blocks = self.block_table[slot, : self.num_blocks[slot]]
            fresh.add(slot_term(slot, int(self.generation[slot]), int(self.planned[slot])))
            fresh.add(int(block_terms(slot, np.arange(len(blocks)), blocks).sum()))
        return fresh.value
