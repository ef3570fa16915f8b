"""
Free KV blocks, handed out so that a sequence's blocks lie one behind the other where they can.

Attention on a CPU reads a run of adjacent blocks in place, without gathering it first. So a
sequence grows into the block behind its last one while that is free, and whoever starts anew starts
where most room is: at the first block of an extent, adjacent blocks that are all free.

Everything is found by lists of what was free when it was listed. Whatever was taken meanwhile is
passed over when its turn comes, and listed again when it is free again: every entry is looked at
once, so each block costs constant time, however large the pool.

There must be something to choose from. Once all that is not in use is cached prefixes, every block
taken is one just evicted, oldest first, and sequences are scattered as by chance: 15 runs for 16
blocks. To evict up to a quarter of the pool ahead gained little (11 runs) for what it forgets.

Source: the idea of extents is that of file systems, and of buddy allocation (Knowlton, CACM 1965)
the aligned sizes. Nothing is merged here: an extent is looked at when it is to be taken.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.kv_cache.prefix_index import NO_BLOCK
from scheduler_svc.core.request.geometry import BlockIds
from tandem.errors import InternalError

EXTENT_SIZES = (64, 16, 4)
"""
Blocks per extent, most room first. In random histories that use up to 80 % of a pool sequences of
25 to 45 blocks then lie in one to three runs, and at 93 % in 11; without the extents of 4 it were
47, as many as by chance.
"""

MAX_PENDING = 256
"""Most givings back before the extents they complete are looked for, wanted or not."""


class FreeBlocks:
    """
    Some of the blocks 1 to `num_blocks`, at first all of them.

    Attributes:
        num_free: How many.
        is_free: bool ``[num_blocks + 2]``; the first and last entry stand for no block.
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
        """Given back since the extents were brought up to date."""
        self._is_listed = self.is_free.copy()
        self._listed: BlockIds = _far_apart(num_blocks)[::-1] + 1
        """A stack of blocks, none twice, among them all that are free."""
        self._num_listed = num_blocks

    def add(self, blocks: BlockIds) -> None:
        """These blocks, none twice and none of them free, are free."""
        self.is_free[blocks] = True
        self.num_free += len(blocks)
        self._list(blocks[~self._is_listed[blocks]])
        if len(blocks):
            self._pending.append(blocks)
            if len(self._pending) == MAX_PENDING:
                self._settle()

    def take(self, count: int, after: int = NO_BLOCK) -> BlockIds:
        """
        Take `count` blocks, which there must be, in the order a sequence is to use them: first
        those behind block `after`, then whole extents, then what is left.
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
        Take one block, which there must be, for each sequence that would like one of these, shape
        ``[N]``, none twice, which lie behind its last ones: that, or if it is taken one with room
        behind it.
        """
        is_free = self.is_free[wanted]
        if _FALSE not in is_free.tobytes():  # far faster than to ask numpy
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
        Compare with the blocks that ought to be free, in order.

        Raises:
            InternalError: Others are, or one could not be found.
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
        """Take the free blocks from `first` on, at most so many; returns how many."""
        run = self.is_free[first : first + most]
        length = most if run.all() else int(run.argmin())
        if length:
            run[:length] = False
            self.num_free -= length
            parts.append(np.arange(first, first + length, dtype=np.intp))
        return length

    def _take_apart(self, count: int) -> BlockIds:
        """Take blocks for as many sequences, each with room behind it where there is."""
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
        """The first block of a free extent of one size; those listed before come first."""
        first = extents.pop(self.is_free)
        if first is None and self._pending:
            self._settle()
            first = extents.pop(self.is_free)
        return first

    def _settle(self) -> None:
        """List the extents that what was given back has completed."""
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
        """A stack of extents, none twice, among them all that are free."""
        self._is_listed = np.ones(self._num_extents, np.bool_)

    def pop(self, is_free: NDArray[np.bool_]) -> int | None:
        """The first block of the free extent on top, which is about to be taken; None without."""
        while self._listed:
            extent = self._listed.pop()
            self._is_listed[extent] = False
            first = 1 + extent * self._size
            if is_free[first : first + self._size].all():
                return first
        return None

    def list_completed(self, blocks: BlockIds, is_free: NDArray[np.bool_]) -> None:
        """List the extents of these blocks that are free, but for those listed already."""
        extents = self._extents_of(blocks)
        extents = extents[~self._is_listed[extents]]
        extents = extents[self._by_extent(is_free)[extents].all(axis=1)]
        self._listed += extents[::-1].tolist()
        self._is_listed[extents] = True

    def check_integrity(self, is_free: NDArray[np.bool_], pending: BlockIds) -> None:
        """
        Compare the list with its marks and with what is free, and change nothing: which blocks come
        next must not depend on when somebody looked.

        Args:
            is_free: As in `FreeBlocks`.
            pending: Blocks whose extents are yet to be listed.

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
        """The extents that these blocks belong to, each once and in order."""
        extents = np.unique((blocks - 1) // self._size)
        return extents[extents < self._num_extents]

    def _by_extent(self, is_free: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """What of `is_free` lies in extents, ``[extents, size]``."""
        return is_free[1 : 1 + self._num_extents * self._size].reshape(-1, self._size)


_NONE: BlockIds = np.empty(0, np.intp)
_FALSE = b"\x00"


def _far_apart(count: int) -> NDArray[np.intp]:
    """
    0 to `count` - 1 in an order whose first members are far apart, however many they are: that of
    their bits read backwards (van der Corput 1935).
    """
    order: NDArray[np.intp] = np.zeros(1, np.intp)
    while len(order) < count:
        order = np.concatenate([2 * order, 2 * order + 1])
    return order[order < count]
