"""Prefix index: the block that holds the KV of each prefix, and the LRU order of unheld blocks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.invariants import require
from tandem.errors import InternalError
from tandem.link.batch import Int32Column

NO_BLOCK = 0
"""Parent of a chain's first block; block ids count from 1."""


class PrefixIndex:
    """
    Forest of full blocks, each under the digest of the prefix that ends with it.

    Two rules make lookup and eviction cheap:

    1. The parent of an indexed block is indexed, so the matched part of a chain of digests is a
       prefix of it, and binary search finds it.
    2. A request that holds an indexed block holds its parent too, so a block is never unheld while
       one that continues it is held. Released chains are added from their end, so among the unheld
       blocks, least recently used first, every block stands ahead of its parent: the first is
       always a leaf, and every unheld block can be evicted.

    Rule 1 is taken from Megatron Core, rule 2 replaces its heap of leaves. Evicting a parent before
    its child, as that system once did, would leave blocks that no lookup can find.

    Attributes:
        keeps_unheld: True when blocks stay indexed without a holder (lru), else False (ref_zero).
        version: Number that changes whenever what can be matched does.
        is_indexed: bool ``[num_blocks + 1]``, True for an indexed block.
        writer: int64 ``[num_blocks + 1]``, the key of the request that computed an indexed block,
            see `prefix_cache.writer_key`.
    """

    __slots__ = (
        "_block_of",
        "_digest_of",
        "_parent",
        "_unheld",
        "is_indexed",
        "keeps_unheld",
        "version",
        "writer",
    )

    def __init__(
        self, num_blocks: int, *, keeps_unheld: bool = True, first_version: int = 0
    ) -> None:
        """
        Args:
            num_blocks: Number of blocks in the pool.
            keeps_unheld: Initial value of the attribute.
            first_version: Initial version, higher than that of any index that this one replaces.
        """
        self.keeps_unheld = keeps_unheld
        self.version = first_version
        self.is_indexed: NDArray[np.bool_] = np.zeros(num_blocks + 1, np.bool_)
        self.writer: NDArray[np.int64] = np.zeros(num_blocks + 1, np.int64)
        self._block_of: dict[bytes, int] = {}
        self._digest_of = [b""] * (num_blocks + 1)
        self._parent: NDArray[np.int32] = np.full(num_blocks + 1, NO_BLOCK, np.int32)
        self._unheld: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of indexed blocks."""
        return len(self._block_of)

    @property
    def num_unheld(self) -> int:
        """Number of indexed blocks that have no holder."""
        return len(self._unheld)

    def match_len(self, digests: Sequence[bytes]) -> int:
        """Return how many leading blocks of a chain are indexed, in time logarithmic in it."""
        block_of = self._block_of
        if not digests or digests[0] not in block_of:
            return 0
        low, high = 1, len(digests)  # the first `low` are indexed, not more than `high`
        while low < high:
            middle = (low + high + 1) // 2
            if digests[middle - 1] in block_of:
                low = middle
            else:
                high = middle - 1
        return low

    def match(self, digests: Sequence[bytes]) -> list[int]:
        """Return the blocks of the leading digests that are indexed, in order."""
        block_of = self._block_of
        return [block_of[digest] for digest in digests[: self.match_len(digests)]]

    def block_of(self, digest: bytes) -> int | None:
        """Return the block under a digest; None without one."""
        return self._block_of.get(digest)

    def parent_of(self, block: int) -> int | None:
        """Return the block that an indexed one continues, or NO_BLOCK; None if not indexed."""
        return int(self._parent[block]) if self.is_indexed[block] else None

    def add_chain(
        self, blocks: Int32Column, digests: Sequence[bytes], parent: int, writer: int
    ) -> None:
        """
        Index held blocks, each of which continues the one before it, under new digests; `parent` is
        the block before the first or NO_BLOCK.

        Raises:
            InternalError: A block or digest is indexed already, or the parent is not.
        """
        if digests[0] in self._block_of or self.is_indexed[blocks].any():
            raise InternalError(f"blocks {blocks.tolist()} or their digests are indexed already")
        if parent != NO_BLOCK and not self.is_indexed[parent]:
            raise InternalError(f"blocks {blocks.tolist()} would continue {parent}: not indexed")
        ids = blocks.tolist()
        self._block_of.update(zip(digests, ids, strict=True))
        for block, digest in zip(ids, digests, strict=True):
            self._digest_of[block] = digest
        self._parent[blocks[1:]] = blocks[:-1]
        self._parent[blocks[0]] = parent
        self.is_indexed[blocks] = True
        self.writer[blocks] = writer
        self.version += 1

    def hold(self, blocks: Iterable[int]) -> None:
        """Note that these unheld blocks have a holder again."""
        for block in blocks:
            del self._unheld[block]

    def let_go(self, blocks: Sequence[int]) -> list[int]:
        """
        Note that these indexed blocks lost their last holder, each standing behind its parent if
        that is among them; returns those that are no longer indexed.
        """
        from_the_end = reversed(blocks)
        if self.keeps_unheld:
            self._unheld.update(dict.fromkeys(from_the_end))
            return []
        removed = list(from_the_end)
        for block in removed:
            self._remove(block)
        return removed

    def touch(self, chain: Sequence[int]) -> None:
        """Mark the unheld blocks of a chain, given from its first block, as most recently used."""
        for block in reversed(chain):
            if block in self._unheld:
                self._unheld.move_to_end(block)

    def evict(self, count: int) -> list[int]:
        """Remove the `count` least recently used unheld blocks, leaves first, and return them."""
        evicted = [self._unheld.popitem(last=False)[0] for _ in range(count)]
        for block in evicted:
            self._remove(block)
        return evicted

    def remove_written_by(self, writers: AbstractSet[int]) -> list[int]:
        """
        Remove what any of `writers` computed and all that continues it; returns the removed blocks
        that have no holder.

        This takes time proportional to the index, so it is for errors only.
        """
        is_wrong: dict[int, bool] = {NO_BLOCK: False}
        parents = self._parent.tolist()
        for last in self._block_of.values():
            chain, block = [], last
            while block not in is_wrong:
                chain.append(block)
                block = parents[block]
            wrong = is_wrong[block]
            for member in reversed(chain):
                wrong = wrong or int(self.writer[member]) in writers
                is_wrong[member] = wrong
        return self._remove_all([block for block, wrong in is_wrong.items() if wrong])

    def clear(self) -> list[int]:
        """Remove everything; returns the blocks that have no holder."""
        return self._remove_all(list(self._block_of.values()))

    def check_integrity(self, num_holders: NDArray[np.int32]) -> None:
        """
        Compare with the number of holders of each block, shape ``[num_blocks + 1]``.

        Raises:
            InternalError: A chain is broken, an unheld block is held or cannot be evicted, or the
                maps differ.
        """
        indexed = set(self._block_of.values())
        place = {block: i for i, block in enumerate(self._unheld)}
        digests = {self._digest_of[block]: block for block in indexed}
        require(digests == self._block_of, "digests and blocks of the prefix index differ")
        marked = set(np.flatnonzero(self.is_indexed).tolist())
        require(marked == indexed, "the marks of the prefix index differ from its blocks")
        expected = {block for block in indexed if num_holders[block] == 0}
        require(place.keys() == expected, "unheld blocks are not those without a holder")
        require(self.keeps_unheld or not place, "a block without a holder is still indexed")
        for block in indexed:
            parent = int(self._parent[block])
            require(parent == NO_BLOCK or parent in indexed, f"block {block} has lost its parent")
            if parent in place:
                in_order = block in place and place[block] < place[parent]
                require(in_order, f"block {parent} can be evicted before block {block}")

    def _remove_all(self, blocks: list[int]) -> list[int]:
        unheld = [block for block in blocks if block in self._unheld]
        for block in unheld:
            del self._unheld[block]
        for block in blocks:
            self._remove(block)
        return unheld

    def _remove(self, block: int) -> None:
        del self._block_of[self._digest_of[block]]
        self._digest_of[block] = b""
        self.is_indexed[block] = False
        self.version += 1
