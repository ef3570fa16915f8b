"""
Preemption by swapping: a request's KV is copied to host memory instead of being recomputed.

The operator chooses between the two (`preemption_mode`): copying and recomputing both cost time
proportional to the tokens, so the cheaper one depends on the machine's bus and compute, not on the
request, and the core knows neither.

Swapping out copies all KV that the request has computed, its cached prefix included: while memory
is short, the prefix cache may evict that before the request is back. Swapping in copies only the
blocks that the prefix cache does not hold. Where host blocks run out, the request is recomputed.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from scheduler_svc.core.request.request import Request
from scheduler_svc.core.state.replica import Replica
from tandem.link.batch import Batch, Int32Column


class Swaps:
    """
    The copies between device and host blocks that one batch makes.

    Attributes:
        num_tokens_in: Token positions that it copies back to the device.
    """

    __slots__ = (
        "_in_block",
        "_in_host",
        "_out_block",
        "_out_host",
        "_out_numbers",
        "_replica",
        "num_tokens_in",
    )

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._out_block: list[int] = []
        self._out_host: list[int] = []
        self._in_host: list[int] = []
        self._in_block: list[int] = []
        self._out_numbers: set[int] = set()
        self.num_tokens_in = 0

    def copy_out(self, slot: int) -> None:
        """
        Copy the blocks of a slot that is about to be released to host memory, if host blocks were
        reserved when it was vacated and the request has not ended since.
        """
        swap = self._replica.kv.take_planned_swap(slot)
        if swap is None:
            return
        number, copy = swap
        count = len(copy.blocks)
        self._out_block += self._replica.slots.blocks.table[slot, :count].tolist()
        self._out_host += copy.blocks.tolist()
        self._out_numbers.add(number)
        self._replica.cell.telemetry.counters.preemption.swapped_out_blocks += count

    def is_leaving(self, request: Request) -> bool:
        """Return True while this batch writes the request's host blocks, so none may be read."""
        return request.number in self._out_numbers

    def copy_in(self, request: Request, blocks: Int32Column, num_cached: int) -> int:
        """
        Copy a request's KV back to the device; its host blocks are free from the next batch on.

        Args:
            request: The request being admitted, which has a copy in host memory.
            blocks: Its block table, shape ``[B]``.
            num_cached: Leading positions, in whole blocks, that the prefix cache already holds.

        Returns:
            Leading positions of `blocks` that hold KV when the batch computes.
        """
        host = self._replica.kv.host
        copy = host.copy_of(request.number)
        assert copy is not None
        host.take_out(request.number)
        if copy.num_tokens <= num_cached:
            return num_cached
        first = num_cached // self._replica.limits.block_size
        self._in_host += copy.blocks[first:].tolist()
        self._in_block += blocks[first : len(copy.blocks)].tolist()
        self._replica.cell.telemetry.counters.preemption.swapped_in_blocks += (
            len(copy.blocks) - first
        )
        self.num_tokens_in += copy.num_tokens - num_cached
        return copy.num_tokens

    def added_to(self, batch: Batch) -> Batch:
        """Return a batch that is fully planned with these copies."""
        self._replica.kv.host.settle()
        return replace(
            batch,
            swap_out_block=np.array(self._out_block, np.int32),
            swap_out_host=np.array(self._out_host, np.int32),
            swap_in_host=np.array(self._in_host, np.int32),
            swap_in_block=np.array(self._in_block, np.int32),
        )
