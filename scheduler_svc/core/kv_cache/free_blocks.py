"""
Free KV blocks, handed out so that the blocks of a sequence are adjacent where possible.

Attention on a CPU reads a run of adjacent blocks in place, without gathering it first. So a
sequence grows into the block behind its last one while that is free, and a new sequence starts
where most room is: at the first block of an extent, a group of adjacent blocks that are all free.

Free blocks and free extents are found by stacks of what was free when it was listed. An entry that
was taken in the meantime is skipped when it is popped, and is listed again when it is free again:
every entry is checked once, so each block costs constant time, however large the pool.

This needs free blocks to choose from. Once every block that is not in use holds a cached prefix,
each block taken is one just evicted, least recently used first, and a sequence's blocks are
scattered as if at random: 15 runs for 16 blocks. Evicting up to a quarter of the pool in advance
gained little (11 runs) for the prefixes it drops.

Source: extents come from file systems, their aligned sizes from buddy allocation (Knowlton, CACM
1965). Free extents are not merged here: an extent is checked when it is about to be taken.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.kv_cache.prefix_index import NO_BLOCK
from scheduler_svc.core.request.geometry import BlockIds
from tandem.errors import InternalError

EXTENT_SIZES = (64, 16, 4)
"""
Blocks per extent, largest first. In the random histories of `mean_runs` (tests/scheduler_svc/core/
kv_cache/test_free_blocks.py), sequences of up to 64 blocks lie in 2 runs where 24 of them use 60 %
of a pool. Where 36 fill it they lie in 5, without the extents of 4 in 9, and at random in 28.
"""

MAX_PENDING = 256
"""Number of calls of `add` after which the extents they complete are listed, needed or not."""


class FreeBlocks:
    """
    The free blocks among the blocks 1 to `num_blocks`, at first all of them.

    Attributes:
        num_free: Number of free blocks.
        is_free: bool ``[num_blocks + 2]``, True for a free block; the first and last entry stand
            for no block.
    """

    __slots__ = (
        "_extents",
        "_is_listed",
        "_listed",
        "_num_listed",
        "_pending",
        "is_free",
        "num_free",
    )

    def __init__(self, num_blocks: int) -> None:
        self.num_free = num_blocks
        self.is_free: NDArray[np.bool_] = np.ones(num_blocks + 2, np.bool_)
        self.is_free[[0, -1]] = False
        self._extents = [_Extents(num_blocks, size) for size in EXTENT_SIZES]
        self._pending: list[BlockIds] = []
        """Blocks given back since the extents were brought up to date."""
        self._is_listed = self.is_free.copy()
        self._listed: BlockIds = _far_apart(num_blocks)[::-1] + 1
        """Stack of blocks, none twice: all that are free, and some that were taken since."""
        self._num_listed = num_blocks

    def add(self, blocks: BlockIds) -> None:
        """Mark these blocks, none twice and none of them free, as free."""
        self.is_free[blocks] = True
        self.num_free += len(blocks)
        self._list(blocks[~self._is_listed[blocks]])
        if len(blocks):
            self._pending.append(blocks)
            if len(self._pending) == MAX_PENDING:
                self._settle()

    def take(self, count: int, after: int = NO_BLOCK) -> BlockIds:
        """
        Take `count` blocks, in the order in which a sequence is to use them: first those behind
        block `after`, then those from the start of free extents, then any. The caller makes sure
        that so many are free.
        """
        parts: list[BlockIds] = []
        left = count
        if after != NO_BLOCK:
            left -= self._take_run(after + 1, left, parts)
        for extents in self._extents:
            while left and self.num_free > left:
                first = self._first_of_extent(extents)
                if first is None:
                    break
                left -= self._take_run(first, left, parts)
        if left:
            parts.append(self._take_listed(left))
        return parts[0] if len(parts) == 1 else np.concatenate([_NONE, *parts])

    def take_next(self, wanted: BlockIds) -> BlockIds:
        """
        Take one block for each of N sequences; the caller makes sure that so many are free.

        `wanted`, shape ``[N]``, none twice, has the block behind the last one of each sequence. The
        sequence gets this block if it is free, else one with free blocks behind it if there is one.
        """
        is_free = self.is_free[wanted]
        if _FALSE not in is_free.tobytes():  # far faster than a call of numpy
            self.is_free[wanted] = False
            self.num_free -= len(wanted)
            return wanted
        next_ones = wanted[is_free]
        self.is_free[next_ones] = False
        self.num_free -= len(next_ones)
        blocks = wanted.copy()
        blocks[~is_free] = self._take_apart(len(wanted) - len(next_ones))
        return blocks

    def check_integrity(self, expected: NDArray[np.intp]) -> None:
        """
        Compare with `expected`, the blocks that must be free, in order.

        Raises:
            InternalError: Other blocks are free, or the lists differ from their marks or lack a
                free block or extent.
        """
        free = np.flatnonzero(self.is_free)
        if self.num_free != len(free) or not np.array_equal(free, expected):
            raise InternalError(
                f"{self.num_free} free blocks are not the {len(expected)} that are neither held "
                "nor cached"
            )
        listed = np.sort(self._listed[: self._num_listed])
        if not np.array_equal(listed, np.flatnonzero(self._is_listed)):
            raise InternalError("the list of free blocks is not what is marked as listed")
        if not self._is_listed[free].all():
            raise InternalError("a free block is not listed")
        pending = np.concatenate([_NONE, *self._pending])
        for extents in self._extents:
            extents.check_integrity(self.is_free, pending)

    def _take_run(self, first: int, most: int, parts: list[BlockIds]) -> int:
        """Take the run of free blocks from `first` on, at most `most`; returns its length."""
        run = self.is_free[first : first + most]
        length = most if run.all() else int(run.argmin())
        if length:
            run[:length] = False
            self.num_free -= length
            parts.append(np.arange(first, first + length, dtype=np.intp))
        return length

    def _take_apart(self, count: int) -> BlockIds:
        """Take one block for each of `count` sequences, with free blocks behind it if possible."""
        taken: list[int] = []
        for extents in self._extents:
            while len(taken) < count < self.num_free + len(taken):
                first = self._first_of_extent(extents)
                if first is None:
                    break
                self.is_free[first] = False
                self.num_free -= 1
                taken.append(first)
        rest = self._take_listed(count - len(taken))
        return np.concatenate([np.array(taken, np.intp), rest]) if taken else rest

    def _take_listed(self, count: int) -> BlockIds:
        """Take `count` free blocks from the top of the list, in order of their ids."""
        found: list[BlockIds] = []
        left, num_seen = count, count
        while left:
            start = max(self._num_listed - num_seen, 0)
            seen = self._listed[start : self._num_listed]
            self._num_listed = start
            self._is_listed[seen] = False
            free = seen[self.is_free[seen]]
            if len(free) > left:
                self._list(free[:-left])
                free = free[-left:]
            found.append(free)
            left -= len(free)
            num_seen *= 2
        blocks = np.sort(np.concatenate([_NONE, *found]))
        self.is_free[blocks] = False
        self.num_free -= count
        return blocks

    def _list(self, blocks: BlockIds) -> None:
        end = self._num_listed + len(blocks)
        self._listed[self._num_listed : end] = blocks
        self._is_listed[blocks] = True
        self._num_listed = end

    def _first_of_extent(self, extents: _Extents) -> int | None:
        """
        Return the first block of a free extent of one size, None without one; the pending blocks
        are looked at only when no listed extent is free.
        """
        first = extents.pop(self.is_free)
        if first is None and self._pending:
            self._settle()
            first = extents.pop(self.is_free)
        return first

    def _settle(self) -> None:
        """List the free extents that the pending blocks have completed."""
        if not self._pending:
            return
        blocks = np.concatenate(self._pending)
        self._pending.clear()
        for extents in self._extents:
            extents.list_completed(blocks, self.is_free)


class _Extents:
    """Extents of one size; extent i begins with block `1 + i * size`."""

    __slots__ = ("_is_listed", "_listed", "_num_extents", "_size")

    def __init__(self, num_blocks: int, size: int) -> None:
        self._size = size
        self._num_extents = num_blocks // size
        self._listed: list[int] = _far_apart(self._num_extents)[::-1].tolist()
        """Stack of extents, none twice: all free ones but those with pending blocks, and others."""
        self._is_listed = np.ones(self._num_extents, np.bool_)

    def pop(self, is_free: NDArray[np.bool_]) -> int | None:
        """Return the first block of the topmost free extent and unlist it; None without one."""
        while self._listed:
            extent = self._listed.pop()
            self._is_listed[extent] = False
            first = 1 + extent * self._size
            if is_free[first : first + self._size].all():
                return first
        return None

    def list_completed(self, blocks: BlockIds, is_free: NDArray[np.bool_]) -> None:
        """List the free extents among those of these blocks, except those listed already."""
        extents = self._extents_of(blocks)
        extents = extents[~self._is_listed[extents]]
        extents = extents[self._by_extent(is_free)[extents].all(axis=1)]
        self._listed += extents[::-1].tolist()
        self._is_listed[extents] = True

    def check_integrity(self, is_free: NDArray[np.bool_], pending: BlockIds) -> None:
        """
        Compare the list with its marks and with what is free, and change nothing: a check must not
        influence which blocks are taken next.

        Args:
            is_free: As in `FreeBlocks`.
            pending: Blocks given back since the last listing: their extents may be missing.

        Raises:
            InternalError: They differ, or a free extent is not listed.
        """
        if sorted(self._listed) != np.flatnonzero(self._is_listed).tolist():
            raise InternalError("the list of free extents is not what is marked as listed")
        is_missing = self._by_extent(is_free).all(axis=1) & ~self._is_listed
        is_missing[self._extents_of(pending)] = False
        if is_missing.any():
            raise InternalError(f"a free extent of {self._size} blocks is not listed")

    def _extents_of(self, blocks: BlockIds) -> BlockIds:
        """Return the extents that these blocks belong to, each once and in order."""
        extents = np.unique((blocks - 1) // self._size)
        return extents[extents < self._num_extents]

    def _by_extent(self, is_free: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return `is_free` of the blocks in extents, shape ``[extents, size]``."""
        return is_free[1 : 1 + self._num_extents * self._size].reshape(-1, self._size)


_NONE: BlockIds = np.empty(0, np.intp)
_FALSE = b"\x00"


def _far_apart(count: int) -> NDArray[np.intp]:
    """
    Return 0 to `count` - 1 in bit-reversed order (van der Corput 1935): the first members are far
    apart, however many of them are used.
    """
    order: NDArray[np.intp] = np.zeros(1, np.intp)
    while len(order) < count:
        order = np.concatenate([2 * order, 2 * order + 1])
    return order[order < count]
