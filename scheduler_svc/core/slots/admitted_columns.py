"""Columns that a slot gets when a request is admitted to it, and keeps until it is released."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from scheduler_svc.core.invariants import require
from scheduler_svc.core.request.request import Request
from scheduler_svc.core.slots.end_ids import EndIds


class AdmittedColumns:
    """
    Columns of shape ``[slots]`` with facts of each slot's request; owned by the slot table.

    Attributes:
        known_len: Tokens known at admission; computing these is prefill.
        prompt_len: Tokens of the prompt.
        submitted_len: Tokens the request came with, prompt and prior outputs.
        stop_len: Tokens of prompt plus output at which the request ends; the last is never
            computed.
        max_blocks: Most blocks the request can need.
        handle: The request's handle.
        number: The request's place in arrival order.
        turn: Number of the request's admission, counted over all slots.
        end_ids: Token ids that end any running request.
    """

    __slots__ = (
        "_num_turns",
        "end_ids",
        "handle",
        "known_len",
        "max_blocks",
        "number",
        "prompt_len",
        "stop_len",
        "submitted_len",
        "turn",
    )

    def __init__(self, num_slots: int) -> None:
        self.known_len = np.zeros(num_slots, np.int32)
        self.prompt_len = np.zeros(num_slots, np.int32)
        self.submitted_len = np.zeros(num_slots, np.int32)
        self.stop_len = np.zeros(num_slots, np.int32)
        self.max_blocks = np.zeros(num_slots, np.int32)
        self.handle = np.zeros(num_slots, np.int64)
        self.number = np.zeros(num_slots, np.int64)
        self.turn = np.zeros(num_slots, np.int64)
        self.end_ids = EndIds()
        self._num_turns = 0

    def begin(self, slot: int, request: Request, max_blocks: int) -> None:
        """Write the row of a request that gets a slot."""
        self.known_len[slot] = request.num_known
        self.prompt_len[slot] = request.prompt_len
        self.submitted_len[slot] = request.prompt_len + request.terms.num_prior
        self.stop_len[slot] = request.terms.stop_len
        self.max_blocks[slot] = max_blocks
        self.handle[slot] = request.new.handle
        self.number[slot] = request.number
        self.turn[slot] = self._num_turns = self._num_turns + 1
        self.end_ids.add(request.new.end_ids)

    def check_integrity(self, running: Mapping[int, Request]) -> None:
        """
        Compare the columns, and the end ids, with the running requests, by slot.

        Raises:
            InternalError: The first invariant that does not hold.
        """
        for slot, one in running.items():
            submitted_len = one.prompt_len + one.terms.num_prior
            facts = (one.new.handle, one.number, one.prompt_len, submitted_len, one.terms.stop_len)
            columns = (self.handle, self.number, self.prompt_len, self.submitted_len, self.stop_len)
            told = tuple(int(column[slot]) for column in columns)
            name = one.new.request_id
            require(told == facts, f"the row of {name} has facts of another request")
            require(int(self.max_blocks[slot]) > 0, f"the row of {name} allows no block")
        turns = [int(self.turn[slot]) for slot in running]
        is_counted = len(set(turns)) == len(turns) and max(turns, default=0) <= self._num_turns
        require(is_counted, "two slots have one turn, or one that was not counted")
        self.end_ids.check_integrity(request.new.end_ids for request in running.values())

    def end(self, request: Request) -> None:
        """Note that a request lost its slot; its row stays readable."""
        self.end_ids.remove(request.new.end_ids)
