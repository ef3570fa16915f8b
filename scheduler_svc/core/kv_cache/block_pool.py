"""Block pool: the number of holders of each KV block, and the free blocks."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.kv_cache.free_blocks import FreeBlocks
from scheduler_svc.core.kv_cache.prefix_index import NO_BLOCK, PrefixIndex
from scheduler_svc.core.request.geometry import BlockIds
from tandem.errors import InternalError
from tandem.link.batch import Int32Column


class BlockPool:
    """
    Pool of the KV blocks 1 to `num_blocks`; the executor keeps block 0 for padding.

    A block is free, cached (it has no holder, but its prefix can still be matched) or used (it has
    one holder or more). Cached blocks can be taken like free ones: they are evicted when there are
    too few free ones, so only used blocks count as memory in use.

    Attributes:
        num_blocks: Number of blocks in the pool.
        index: Prefix index of the full blocks; None where prefix caching is off.
    """

    __slots__ = ("_free", "_num_holders", "index", "num_blocks")

    def __init__(self, num_blocks: int, index: PrefixIndex | None = None) -> None:
        self.num_blocks = num_blocks
        self.index = index
        self._free = FreeBlocks(num_blocks)
        self._num_holders: NDArray[np.int32] = np.zeros(num_blocks + 1, np.int32)

    @property
    def num_free(self) -> int:
        """Number of blocks that have no holder and cannot be matched."""
        return self._free.num_free

    @property
    def num_cached(self) -> int:
        """Number of blocks that have no holder and can be matched or evicted."""
        return 0 if self.index is None else self.index.num_unheld

    @property
    def num_available(self) -> int:
        """Number of blocks that can be taken: free or cached."""
        return self.num_free + self.num_cached

    @property
    def num_used(self) -> int:
        """Number of blocks that have a holder."""
        return self.num_blocks - self.num_free - self.num_cached

    @property
    def usage(self) -> float:
        """Share of blocks in use, 0 to 1."""
        return self.num_used / self.num_blocks

    def try_take(self, count: int, after: int = NO_BLOCK) -> Int32Column | None:
        """
        Take `count` blocks for one sequence, all or none, free ones before cached ones.

        Args:
            count: Number of blocks.
            after: The block they follow in the sequence, or NO_BLOCK.

        Returns:
            Their ids, shape ``[count]``, adjacent where possible; None when fewer can be taken, and
            then nothing changed.
        """
        if not self._try_free(count):
            return None
        taken = self._free.take(count, after)
        self._num_holders[taken] = 1
        return taken.astype(np.int32)

    def try_take_next(self, wanted: BlockIds) -> BlockIds | None:
        """
        Take one block for each of N sequences, all or none, as `try_take` does.

        `wanted`, shape ``[N]``, none twice, has the block behind the last one of each sequence; the
        sequence gets this block if it is free.
        """
        if len(wanted) > self._free.num_free and not self._try_free(len(wanted)):
            return None
        taken = self._free.take_next(wanted)
        self._num_holders[taken] = 1
        return taken

    def num_unheld(self, blocks: Int32Column) -> int:
        """Return the number of these blocks, none twice, that have no holder."""
        return len(blocks) - int(np.count_nonzero(self._num_holders[blocks]))

    def num_holders(self, block: int) -> int:
        """Return the number of holders of a block."""
        return int(self._num_holders[block])

    def share(self, blocks: Int32Column) -> None:
        """
        Add one holder to each of these used or cached blocks, none twice.

        Raises:
            InternalError: One of them is free; nothing changed then.
        """
        before = self._num_holders[blocks]
        if not before.all():
            unheld = blocks[before == 0]
            if self.index is None or not self.index.is_indexed[unheld].all():
                raise InternalError(f"blocks {unheld.tolist()} cannot be shared: some are free")
            self.index.hold(unheld.tolist())
        self._num_holders[blocks] = before + 1

    def give_back(self, blocks: Int32Column) -> None:
        """
        Remove one holder from each of these blocks; a sequence's blocks come in its order.

        A block without a holder is cached if it is indexed and the index keeps it, else free.

        Raises:
            InternalError: A block has fewer holders than it is listed times, or is not of this
                pool; nothing changed then.
        """
        if not len(blocks):
            return
        if blocks.view(np.uint32).max() > self.num_blocks:  # negative ones too
            raise InternalError(f"blocks {blocks.tolist()} are not all of this pool")
        index = blocks.astype(np.intp)
        before = self._num_holders[index]
        np.subtract.at(self._num_holders, index, 1)
        after = self._num_holders[index]
        if after.min() < 0:
            np.add.at(self._num_holders, index, 1)
            raise InternalError(
                f"blocks {blocks.tolist()} cannot all be given back: not all are in use"
            )
        unheld = index[after == 0]
        if (before - after).max() > 1:  # some are listed more than once
            _, first = np.unique(unheld, return_index=True)
            unheld = unheld[np.sort(first)]
        if self.index is not None and len(self.index):
            is_indexed = self.index.is_indexed[unheld]
            if is_indexed.any():
                no_longer = self.index.let_go(unheld[is_indexed].tolist())
                self._free.add(np.array(no_longer, np.intp))
                unheld = unheld[~is_indexed]
        self._free.add(unheld)

    def flush(self) -> int:
        """Clear the prefix index; returns how many blocks without a holder became free."""
        return 0 if self.index is None else self._free_unindexed(self.index.clear())

    def distrust(self, writers: AbstractSet[int]) -> None:
        """Remove from the prefix index what `writers` computed, and what continues it."""
        if self.index is not None:
            self._free_unindexed(self.index.remove_written_by(writers))

    def check_integrity(self, owned: Int32Column) -> None:
        """
        Compare the counts with `owned`, shape ``[H]``: one entry per holder and block, any order.

        Raises:
            InternalError: A block is lost, both free and held, or not held as often as counted.
        """
        if len(owned) and not 1 <= owned.min() <= owned.max() <= self.num_blocks:
            raise InternalError("a block is held that is not of the block pool")
        counted = np.bincount(owned, minlength=self.num_blocks + 1)
        if not np.array_equal(counted, self._num_holders):
            wrong = np.flatnonzero(counted != self._num_holders)[0]
            raise InternalError(
                f"block {wrong} is held {counted[wrong]} times, the block pool counts "
                f"{self._num_holders[wrong]}"
            )
        is_cached = np.zeros(self.num_blocks + 1, np.bool_)
        if self.index is not None:
            self.index.check_integrity(self._num_holders)
            is_cached = self.index.is_indexed & (self._num_holders == 0)
        self._free.check_integrity(np.flatnonzero((self._num_holders == 0) & ~is_cached)[1:])

    def _try_free(self, count: int) -> bool:
        """Evict until `count` blocks are free; returns False, and evicts none, if it cannot."""
        missing = count - self._free.num_free
        if missing > 0:
            if self.index is None or count > self.num_available:
                return False
            self._free.add(np.array(self.index.evict(missing), np.intp))
        return True

    def _free_unindexed(self, blocks: Sequence[int]) -> int:
        self._free.add(np.array(blocks, np.intp))
        return len(blocks)
