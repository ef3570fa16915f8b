"""Host memory for the KV of swapped-out requests: the host blocks of each of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tandem.errors import InternalError
from tandem.link.batch import Int32Column


@dataclass(frozen=True, slots=True)
class HostCopy:
    """
    Copy of a request's KV in host memory: its first `num_tokens` positions, in `blocks` (host block
    ids in the order of its block table). Where `may_index` is False the KV is for this request
    alone: it is not put into the prefix cache after it was swapped in.
    """

    blocks: Int32Column
    num_tokens: int
    may_index: bool = True


class HostBlocks:
    """
    Pool of the host blocks 1 to `num_blocks`; at most one copy per request, keyed by its number.

    A batch writes host blocks before it reads any, so blocks that a batch reads may be written only
    from the next batch on: `take_out` keeps them until `settle`.
    """

    __slots__ = ("_copies", "_free", "_leaving", "num_blocks")

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks, 0, -1))
        self._copies: dict[int, HostCopy] = {}
        self._leaving: list[int] = []

    @property
    def num_free(self) -> int:
        """Number of blocks that the batch being planned may write."""
        return len(self._free)

    @property
    def num_copies(self) -> int:
        """Number of requests that have a copy."""
        return len(self._copies)

    def try_reserve(
        self, number: int, num_tokens: int, block_size: int, *, may_index: bool = True
    ) -> bool:
        """Reserve blocks for a request's first `num_tokens` positions; False when too few."""
        count = -(-num_tokens // block_size)
        if count > len(self._free):
            return False
        taken = [self._free.pop() for _ in range(count)]
        self._copies[number] = HostCopy(np.array(taken, np.int32), num_tokens, may_index)
        return True

    def copy_of(self, number: int) -> HostCopy | None:
        """Return a request's copy; None without one."""
        return self._copies.get(number)

    def discard(self, number: int) -> None:
        """Free a request's blocks, if it has any, for the batch being planned."""
        copy = self._copies.pop(number, None)
        if copy is not None:
            self._free.extend(copy.blocks.tolist())

    def take_out(self, number: int) -> None:
        """Free a request's blocks for the batch after the one being planned, which reads them."""
        self._leaving.extend(self._copies.pop(number).blocks.tolist())

    def forbid_indexing(self) -> None:
        """Forbid indexing the KV of any copy here, after a flush of the prefix cache."""
        for number, copy in self._copies.items():
            self._copies[number] = replace(copy, may_index=False)

    def settle(self) -> None:
        """Free the blocks that were taken out, once the batch that reads them is planned."""
        self._free.extend(self._leaving)
        self._leaving.clear()

    def check_integrity(self, waiting: set[int]) -> None:
        """
        Compare with `waiting`, the numbers of the requests that own no slot.

        Raises:
            InternalError: A block is lost or has two holders, or a copy's request is not in
                `waiting`.
        """
        held = [block for copy in self._copies.values() for block in copy.blocks.tolist()]
        if sorted([*self._free, *self._leaving, *held]) != list(range(1, self.num_blocks + 1)):
            raise InternalError("free and held host blocks are not each host block once")
        if not waiting.issuperset(self._copies):
            raise InternalError("a request that runs or ended has a copy in host memory")
