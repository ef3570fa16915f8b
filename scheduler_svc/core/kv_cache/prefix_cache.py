"""
Prefix cache: lookup of cached KV at admission, and indexing of blocks for later requests.

A prompt block is indexed when the batch that computes its last position was planned: the next batch
may read it, since the executor runs batches in order. Output blocks are indexed when their slot is
released: only then are all their tokens known, and no request waits for the hashing any more.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import numpy as np

from scheduler_svc.core.kv_cache.block_pool import BlockPool
from scheduler_svc.core.kv_cache.prefix_index import NO_BLOCK, PrefixIndex
from scheduler_svc.core.request.block_hashes import DIGEST_BYTES, block_digests, split_digests
from scheduler_svc.core.request.request import Request
from scheduler_svc.core.slots.slots import SlotTable
from tandem.errors import InternalError
from tandem.link.batch import Int32Column

_REPLICA_SHIFT = 52
"""An executor has fewer than 2^20 slots, and a cell far fewer than 2^11 executors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """
    KV of a request's first tokens that was computed before.

    Attributes:
        num_tokens: Tokens that need not be computed; at least one of the request's is left.
        num_shared: Number of blocks that the request shares: it never writes into them.
        blocks: Shared blocks, in order, and behind them the block to be copied in part, if
            `num_tokens` ends inside a block; shape ``[num_shared]`` or one more.
    """

    num_tokens: int
    num_shared: int
    blocks: Int32Column

    @classmethod
    def of(cls, table: Int32Column, num_valid: int, num_known: int, block_size: int) -> Prefix:
        """
        Return what a request with `num_known` tokens can use of `table`, given that the first
        `num_valid` positions of the table hold their KV.
        """
        num_tokens = min(num_valid, num_known - 1)
        num_shared, rest = divmod(num_tokens, block_size)
        blocks = table[: num_shared + 1 if rest else num_shared]
        return cls(num_tokens=num_tokens, num_shared=num_shared, blocks=blocks)

    @property
    def has_copy(self) -> bool:
        """True when the last of `blocks` is to be copied."""
        return len(self.blocks) > self.num_shared

    def without_copy(self, block_size: int) -> Prefix:
        """Return it without the block that would be copied: its tokens are computed again."""
        return Prefix(
            num_tokens=self.num_shared * block_size,
            num_shared=self.num_shared,
            blocks=self.blocks[: self.num_shared],
        )


NOTHING_CACHED = Prefix(num_tokens=0, num_shared=0, blocks=np.empty(0, np.int32))
"""Prefix of a request that has to compute everything."""


class PrefixCache:
    """
    Prefix cache over slots, block pool and prefix index; it lives as long as the executor that has
    these blocks.

    Without an index (prefix caching is off) lookups find nothing and no block is indexed.
    """

    __slots__ = (
        "_awaited",
        "_being_written",
        "_index",
        "_may_index",
        "_num_indexed",
        "_pool",
        "_slots",
    )

    def __init__(self, slots: SlotTable, pool: BlockPool) -> None:
        num_slots = len(slots.live)
        self._slots = slots
        self._pool = pool
        self._index: PrefixIndex | None = pool.index
        self._may_index = [False] * num_slots
        self._num_indexed = [0] * num_slots
        """Number of leading blocks of each slot's table that are indexed."""
        self._being_written: dict[bytes, int] = {}
        """
        Slots that compute a prompt, by the digest of their first block that is not indexed yet.
        Later blocks need no entry: where two prompts share a block they share all before it, so a
        request always waits for the first one.
        """
        self._awaited: dict[int, bytes] = {}
        """Digests of the same blocks, by slot."""

    @property
    def version(self) -> int:
        """Number that changes whenever an answer of `match_len` or `is_cached` may change."""
        return 0 if self._index is None else self._index.version

    def match_len(self, request: Request) -> int:
        """Return the number of leading tokens of a waiting request that have cached KV."""
        if self._index is None:
            return 0
        return self._index.match_len(self._chain(request)) * self._slots.blocks.block_size

    def expected_len(self, request: Request) -> int:
        """
        Return the number of leading tokens of a waiting request that are cached, or that a running
        request with the same prompt up to there is about to compute.
        """
        if self._index is None:
            return 0
        chain = self._chain(request)
        low = self._index.match_len(chain)
        writer = self._being_written.get(chain[low]) if low < len(chain) else None
        if writer is not None:
            other = self._slots.request_of(writer).prefix.digests
            high = min(len(chain), len(other))
            while low < high:
                middle = (low + high + 1) // 2
                if chain[middle - 1] == other[middle - 1]:
                    low = middle
                else:
                    high = middle - 1
        return low * self._slots.blocks.block_size

    def digests_of(self, request: Request) -> bytes:
        """Return the digests of the full blocks of a request's known tokens, concatenated."""
        return b"" if self._index is None else b"".join(self._chain(request))

    def is_cached(self, digest: bytes) -> bool:
        """Return True when a block with this digest can be matched."""
        return self._index is not None and self._index.block_of(digest) is not None

    def find(self, request: Request) -> Prefix | None:
        """
        Return the KV that a waiting request can use; None when a running request is computing its
        next block. Waiting for that is worthwhile: the running request completes the block, or
        loses its slot and is no longer waited for.
        """
        matched: list[int] = []
        if self._index is not None:
            chain = self._chain(request)
            matched = self._index.match(chain)
            if len(matched) < len(chain) and chain[len(matched)] in self._being_written:
                return None
        table = np.array(matched, np.int32)
        bs = self._slots.blocks.block_size
        return Prefix.of(table, len(table) * bs, request.num_known, bs)

    def writers_of(self, prefix: Prefix) -> frozenset[int]:
        """Return the keys of the requests that computed a prefix found in the index."""
        if self._index is None or not len(prefix.blocks):
            return frozenset()
        return frozenset(self._index.writer[prefix.blocks].tolist())

    def note_admitted(
        self, slot: int, request: Request, prefix: Prefix, shared_with: int | None
    ) -> None:
        """
        Note that a request got a slot. Its table begins with the shared blocks of `prefix`, found
        in the index or, under parallel sampling, in the table of slot `shared_with`.
        """
        if self._index is None:
            return
        self._may_index[slot] = shared_with is None or self._may_index[shared_with]
        num_indexed = prefix.num_shared
        if shared_with is not None:
            num_indexed = min(num_indexed, self._num_indexed[shared_with])
        self._num_indexed[slot] = num_indexed
        if self._may_index[slot] and num_indexed == prefix.num_shared:
            self._let_wait_for(slot, self._chain(request))

    def index_sent(self, slot: int) -> None:
        """Index the prompt blocks that a slot has sent for computing to their last position."""
        if self._index is None or not self._may_index[slot]:
            return
        slots = self._slots
        chain, start = slots.request_of(slot).prefix.digests, self._num_indexed[slot]
        end = min(int(slots.planned[slot]) // slots.blocks.block_size, len(chain))
        if end <= start:
            return
        if self.is_cached(chain[start]):
            # Another slot's block got the digest first: what follows is indexed at release.
            self._let_none_wait_for(slot)
            return
        parent = int(slots.blocks.table[slot, start - 1]) if start else NO_BLOCK
        self._let_none_wait_for(slot)
        self._add(slot, slots.blocks.table[slot, :end], chain, start, parent)
        self._let_wait_for(slot, chain)

    def note_vacated(self, slot: int) -> None:
        """Note that a request lost its slot: its blocks are no longer waited for."""
        self._let_none_wait_for(slot)

    def may_index(self, slot: int) -> bool:
        """Return False where nothing that a slot holds is to be indexed."""
        return self._may_index[slot]

    def distrust(self, slot: int) -> None:
        """Index nothing that a slot holds from now on."""
        self._may_index[slot] = False
        self._let_none_wait_for(slot)

    def forget_written_by(self, writers: AbstractSet[int]) -> None:
        """
        Remove from the index what any of `writers` computed, and what continues it. Slots that hold
        some of it keep it, but what such a slot computes is not indexed.
        """
        if self._index is None:
            return
        self._pool.distrust(writers)
        for slot in self._slots.live.nonzero()[0].tolist():
            table = self._slots.blocks.table[slot, : self._num_indexed[slot]]
            if self._may_index[slot] and not self._index.is_indexed[table].all():
                self.distrust(slot)

    def release(self, slot: int, request: Request, blocks: Int32Column) -> None:
        """
        Give back the blocks of a slot that `request` has lost. Under lru the full blocks with
        computed and known tokens are indexed first; ref_zero would unindex them at once.
        """
        canonical: list[int] = []
        if self._index is not None and self._index.keeps_unheld and self._may_index[slot]:
            canonical = self._index_released(slot, request, blocks)
        self._pool.give_back(blocks)
        if canonical:
            assert self._index is not None
            self._index.touch(canonical)

    def flush(self) -> int:
        """
        Clear the index, and let running requests index nothing that they hold; returns how many
        blocks without a holder became free.
        """
        self._may_index = [False] * len(self._may_index)
        self._being_written.clear()
        self._awaited.clear()
        return self._pool.flush()

    def check_integrity(self) -> None:
        """
        Compare with slots and index.

        Raises:
            InternalError: A table holds an indexed block without the block before it, has fewer
                indexed blocks than noted, or a slot is waited for and does not compute the block.
        """
        if self._index is None:
            return
        slots = self._slots
        for slot in slots.live.nonzero()[0].tolist():
            table = slots.blocks.of_slot(slot).tolist()
            parents = [self._index.parent_of(block) for block in table]
            for before, block, parent in zip([NO_BLOCK, *table], table, parents, strict=False):
                if parent is not None and parent != before:
                    raise InternalError(f"slot {slot} holds block {block} but not block {parent}")
            num_indexed = self._num_indexed[slot]
            if self._may_index[slot] and None in parents[:num_indexed]:
                raise InternalError(f"slot {slot} has fewer than {num_indexed} blocks indexed")
        if self._being_written != {digest: slot for slot, digest in self._awaited.items()}:
            raise InternalError("the requests waited for and their waiters differ")
        for slot, digest in self._awaited.items():
            is_next = (
                slots.running[slot]
                and digest == (slots.request_of(slot).prefix.digests[self._num_indexed[slot]])
            )
            if not is_next:
                raise InternalError(f"slot {slot} is waited for and does not compute the block")

    def _index_released(self, slot: int, request: Request, blocks: Int32Column) -> list[int]:
        """
        Index what a released slot computed; returns the chain of blocks under its digests if some
        of these are blocks that another slot computed, else an empty list.
        """
        index, start = self._index, self._num_indexed[slot]
        assert index is not None
        end = min(request.place.planned, request.num_known) // self._slots.blocks.block_size
        if end <= start:
            return []
        chain, blocks = self._chain(request, end)[:end], blocks[:end]
        canonical = index.match(chain)
        matched = len(canonical)
        parent = canonical[-1] if matched else NO_BLOCK
        if matched <= start:
            self._add(slot, blocks, chain, start, parent)
            return []
        # Behind another slot's block, index only what this slot alone holds: other holders of it
        # would not hold the parent.
        rest = blocks[matched:].tolist()
        if rest and all(self._pool.num_holders(block) == 1 for block in rest):
            self._add(slot, blocks, chain, matched, parent)
            canonical += rest
        return canonical

    def _add(
        self, slot: int, blocks: Int32Column, chain: list[bytes], start: int, parent: int
    ) -> None:
        """Index a slot's blocks from `start` on under their digests."""
        assert self._index is not None
        end = len(blocks)
        writer = writer_key(self._slots.replica, slot, int(self._slots.generation[slot]))
        self._index.add_chain(blocks[start:end], chain[start:end], parent, writer)
        self._num_indexed[slot] = end

    def _let_wait_for(self, slot: int, chain: list[bytes]) -> None:
        """Note the block that a slot will index next, unless another slot is noted for it."""
        start = self._num_indexed[slot]
        if start < len(chain) and self._being_written.setdefault(chain[start], slot) == slot:
            self._awaited[slot] = chain[start]

    def _let_none_wait_for(self, slot: int) -> None:
        digest = self._awaited.pop(slot, None)
        if digest is not None:
            del self._being_written[digest]

    def _chain(self, request: Request, num_blocks: int | None = None) -> list[bytes]:
        """Return the digests of a request's first full blocks, hashing those not hashed yet."""
        chain, bs = request.prefix.digests, self._slots.blocks.block_size
        if num_blocks is None:
            num_blocks = request.num_known // bs
        if not chain and num_blocks:
            request.prefix.add_digests(_prompt_digests(request, bs))
        if len(chain) < num_blocks:
            tokens = request.known_tokens()[len(chain) * bs : num_blocks * bs]
            salt, parent = request.new.cache_salt, chain[-1] if chain else None
            request.prefix.add_digests(split_digests(block_digests(tokens, bs, salt, parent)))
        return chain


def writer_key(replica: int, slot: int, generation: int) -> int:
    """
    Return replica, slot and generation as one number: the key of the request that computes there.
    """
    return replica << _REPLICA_SHIFT | slot << 32 | generation


def _prompt_digests(request: Request, block_size: int) -> list[bytes]:
    given = request.new.block_digests
    if len(given) == request.prompt_len // block_size * DIGEST_BYTES:
        return split_digests(given)
    return split_digests(block_digests(request.new.prompt, block_size, request.new.cache_salt))
