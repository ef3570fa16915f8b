"""Block tables of sequences, on the scheduler core's block pool."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from scheduler_svc.core.kv_cache.block_pool import BlockPool
from scheduler_svc.core.kv_cache.prefix_index import NO_BLOCK
from tandem.engine_config import EngineConfig
from tandem_embedded.errors import EngineMemoryError, engine_errors
from tandem_embedded.results import MemoryStats


class KVCacheManagerTrait(Protocol):
    """Interface of a manager of the KV blocks of sequences."""

    @property
    def block_size(self) -> int:
        """Tokens per block."""

    def allocate_sequence(self, seq_id: int, num_tokens: int) -> None:
        """Allocate the blocks of so many tokens to a new sequence, all or none."""

    def allocate_block(self, seq_id: int) -> int:
        """Allocate one more block to a sequence, and return it."""

    def free_sequence(self, seq_id: int) -> None:
        """Free the blocks of a sequence."""

    def get_block_table(self, seq_id: int) -> list[int] | None:
        """Return the blocks of a sequence in order; None for an unknown sequence."""

    def get_memory_stats(self) -> MemoryStats:
        """Return the numbers of blocks in use and free."""

    def can_allocate(self, num_blocks: int) -> bool:
        """Return True if so many blocks are free."""


class KVCacheManager:
    """
    Block tables by sequence. Blocks are numbered from 1; those of a sequence are contiguous if
    possible.

    Raises:
        ConfigError: A limit is out of range.
    """

    def __init__(self, config: EngineConfig) -> None:
        with engine_errors():
            config.validate()
        self._block_size = config.block_size
        self._pool = BlockPool(config.max_num_blocks)
        self._tables: dict[int, list[int]] = {}

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._block_size

    def allocate_sequence(self, seq_id: int, num_tokens: int) -> None:
        """
        Allocate the blocks of so many tokens to a sequence; a known sequence keeps its blocks.

        Raises:
            EngineMemoryError: Too few blocks are free; nothing changed.
        """
        if seq_id not in self._tables:
            num_blocks = -(-num_tokens // self._block_size)
            self._tables[seq_id] = self._take(num_blocks, NO_BLOCK)

    def allocate_block(self, seq_id: int) -> int:
        """
        Allocate one more block to a sequence, and return it.

        Raises:
            EngineMemoryError: No block is free, or the sequence is unknown; nothing changed.
        """
        table = self._tables.get(seq_id)
        if table is None:
            message = f"sequence {seq_id} has no blocks: call allocate_sequence first"
            raise EngineMemoryError(message, reason="REQUEST_NOT_FOUND")
        (block,) = self._take(1, table[-1] if table else NO_BLOCK)
        table.append(block)
        return block

    def free_sequence(self, seq_id: int) -> None:
        """Free the blocks of a sequence; an unknown sequence is ignored."""
        self._pool.give_back(np.array(self._tables.pop(seq_id, []), np.int32))

    def get_block_table(self, seq_id: int) -> list[int] | None:
        """Return the blocks of a sequence in order; None for an unknown sequence."""
        table = self._tables.get(seq_id)
        return None if table is None else list(table)

    def get_memory_stats(self) -> MemoryStats:
        """Return the numbers of blocks in use and free."""
        return MemoryStats(
            total_blocks=self._pool.num_blocks,
            used_blocks=self._pool.num_used,
            free_blocks=self._pool.num_available,
            num_sequences=len(self._tables),
        )

    def can_allocate(self, num_blocks: int) -> bool:
        """Return True if so many blocks are free."""
        return num_blocks <= self._pool.num_available

    def check_integrity(self) -> None:
        """
        Compare the tables with the pool.

        Raises:
            ExecutionError: A block is lost or held twice, which is a bug of ours.
        """
        held = [block for table in self._tables.values() for block in table]
        with engine_errors():
            self._pool.check_integrity(np.array(held, np.int32))

    def _take(self, num_blocks: int, after: int) -> list[int]:
        taken = self._pool.try_take(num_blocks, after)
        if taken is None:
            message = (
                f"{num_blocks} KV blocks are needed and {self._pool.num_available} of "
                f"{self._pool.num_blocks} are free: free a sequence, or raise max_num_blocks"
            )
            raise EngineMemoryError(message, reason="OUT_OF_MEMORY")
        return [int(block) for block in taken]
