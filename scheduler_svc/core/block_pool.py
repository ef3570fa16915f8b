"""Which KV blocks are free: a stack of ids, constant time per block."""

from __future__ import annotations

import numpy as np

from tandem.errors import InternalError
from tandem.link.batch import Int32Column


class BlockPool:
    """
    Block ids 1 to `num_blocks`; the executor keeps block 0 for padding.

    The pool knows what is free, block tables know who owns the rest.
    """

    __slots__ = ("_free", "_is_free", "num_blocks", "num_free")

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self._free = np.arange(num_blocks, 0, -1, dtype=np.int32)
        self._is_free = np.ones(num_blocks + 1, np.bool_)
        self._is_free[0] = False

    @property
    def num_used(self) -> int:
        """Blocks somebody owns."""
        return self.num_blocks - self.num_free

    @property
    def usage(self) -> float:
        """Share of blocks in use, 0 to 1."""
        return self.num_used / self.num_blocks

    def try_take(self, count: int) -> Int32Column | None:
        """Take `count` blocks, all or none; None when fewer are free, and then nothing changed."""
        if count > self.num_free:
            return None
        start = self.num_free - count
        taken = self._free[start : self.num_free][::-1].copy()
        self._is_free[taken] = False
        self.num_free = start
        return taken

    def give_back(self, blocks: Int32Column) -> None:
        """
        Return blocks to the pool.

        Raises:
            InternalError: A block is free already, listed twice or no block of this pool; nothing
                changed then.
        """
        count = len(blocks)
        known = count == 0 or (blocks.min() >= 1 and blocks.max() <= self.num_blocks)
        if not known or self._is_free[blocks].any() or len(np.unique(blocks)) != count:
            raise InternalError(
                f"blocks {blocks.tolist()} cannot all be given back: not all are in use"
            )
        self._free[self.num_free : self.num_free + count] = blocks
        self._is_free[blocks] = True
        self.num_free += count

    def check_integrity(self, owned: Int32Column) -> None:
        """
        Compare with the blocks all block tables name, shape ``[num_used]``, any order.

        Raises:
            InternalError: A block is lost, free and owned, or owned twice.
        """
        free = self._free[: self.num_free]
        together = np.sort(np.concatenate([free, owned]))
        if not np.array_equal(together, np.arange(1, self.num_blocks + 1)):
            raise InternalError(
                f"{self.num_free} free and {len(owned)} owned blocks are not each of "
                f"{self.num_blocks} blocks once"
            )
        if int(self._is_free.sum()) != self.num_free or not self._is_free[free].all():
            raise InternalError("the free list and the free marks of the block pool differ")
