"""
Preemption by copying a request's KV to host memory, instead of computing it again.

Whether that is cheaper is the operator's choice (`preemption_mode`): copying and recomputing both
cost time proportional to the tokens, so which one wins is decided by the machine's bus and compute,
not by the request, and the core knows neither.

Going out everything the request has computed is copied, cached prefix included: what the prefix
cache holds while memory is short may be evicted before the request is back. Coming back only what
the prefix cache does not hold is copied. Where host blocks run out the request is recomputed.
"""

from __future__ import annotations

import numpy as np

from scheduler_svc.core.request.request import Request
from scheduler_svc.core.state.state import CoreState
from tandem.link.batch import Int32Column


class Swaps:
    """
    The copies between device and host blocks that one batch makes.

    Attributes:
        num_tokens_in: Positions it brings back.
    """

    __slots__ = (
        "_in_block",
        "_in_host",
        "_out_block",
        "_out_host",
        "_out_numbers",
        "_state",
        "num_tokens_in",
    )

    def __init__(self, state: CoreState) -> None:
        self._state = state
        self._out_block: list[int] = []
        self._out_host: list[int] = []
        self._in_host: list[int] = []
        self._in_block: list[int] = []
        self._out_numbers: set[int] = set()
        self.num_tokens_in = 0

    def copy_out(self, slot: int) -> None:
        """
        Save the blocks of a slot about to be released, if that was planned when it was vacated and
        the request has not ended since.
        """
        number = self._state.swapping.pop(slot, None)
        copy = None if number is None else self._state.host.copy_of(number)
        if number is None or copy is None:
            return
        count = len(copy.blocks)
        self._out_block += self._state.slots.block_table[slot, :count].tolist()
        self._out_host += copy.blocks.tolist()
        self._out_numbers.add(number)
        self._state.counters.swapped_out_blocks += count

    def is_leaving(self, request: Request) -> bool:
        """True while this very batch writes the request's host blocks, so that none may read."""
        return request.number in self._out_numbers

    def copy_in(self, request: Request, blocks: Int32Column, num_cached: int) -> int:
        """
        Bring a request's KV back; its host blocks are free from the next batch on.

        Args:
            request: One that is being admitted and has a copy in host memory.
            blocks: Its block table, shape ``[B]``.
            num_cached: Leading positions, in whole blocks, that the prefix cache already holds.

        Returns:
            Leading positions of `blocks` that hold KV when the batch computes.
        """
        host = self._state.host
        copy = host.copy_of(request.number)
        assert copy is not None
        host.take_out(request.number)
        if copy.num_tokens <= num_cached:
            return num_cached
        first = num_cached // self._state.limits.block_size
        self._in_host += copy.blocks[first:].tolist()
        self._in_block += blocks[first : len(copy.blocks)].tolist()
        self._state.counters.swapped_in_blocks += len(copy.blocks) - first
        self.num_tokens_in += copy.num_tokens - num_cached
        return copy.num_tokens

    def columns(self) -> dict[str, Int32Column]:
        """The batch's columns; the batch is planned and its copies are final."""
        self._state.host.settle()
        return {
            "swap_out_block": np.array(self._out_block, np.int32),
            "swap_out_host": np.array(self._out_host, np.int32),
            "swap_in_host": np.array(self._in_host, np.int32),
            "swap_in_block": np.array(self._in_block, np.int32),
        }
