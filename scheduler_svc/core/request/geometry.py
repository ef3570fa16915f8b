"""
Capacity of one executor, and the limits that follow from it together with the configuration.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from tandem.engine_config import EngineConfig
from tandem.errors import IncompatibleExecutor

BlockIds: TypeAlias = NDArray[np.intp]
"""Block ids in the type that numpy uses for an index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorGeometry:
    """
    Capacity of one executor as it describes itself.

    Attributes:
        num_blocks: Usable KV blocks, ids 1 to `num_blocks`.
        block_size: Tokens per block.
        num_slots: Slots, ids 0 to `num_slots` - 1.
        max_batch_size: Most rows in one batch.
        max_total_tokens: Most tokens in one batch.
        max_model_len: Most tokens in one slot.
        num_host_blocks: Host blocks, ids 1 to `num_host_blocks`; 0 where swapping is off.
        num_stages: Pipeline stages, at least 1; as many steps of different rows keep it busy.
    """

    num_blocks: int
    block_size: int
    num_slots: int
    max_batch_size: int
    max_total_tokens: int
    max_model_len: int
    num_host_blocks: int = 0
    num_stages: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits in force: the smaller of what is configured and what the executor can do."""

    block_size: int
    num_blocks: int
    num_slots: int
    max_running: int
    max_total_tokens: int
    max_model_len: int
    max_num_seqs: int
    memory_threshold: float
    num_host_blocks: int = 0
    num_stages: int = 1

    @classmethod
    def of(cls, config: EngineConfig, geometry: ExecutorGeometry) -> Limits:
        """
        Combine both sides.

        Raises:
            InvalidConfig: A value of `config` is out of range.
            IncompatibleExecutor: The block sizes differ: they must be equal.
        """
        config.validate()
        if config.block_size != geometry.block_size:
            message = (
                f"block_size is {config.block_size} in the configuration and {geometry.block_size} "
                "in the executor: remove the setting or start the executor with --block-size "
                f"{config.block_size}"
            )
            raise IncompatibleExecutor(message, field="block_size")
        return cls(
            block_size=geometry.block_size,
            num_blocks=min(config.max_num_blocks, geometry.num_blocks),
            num_slots=geometry.num_slots,
            max_running=min(config.max_batch_size, geometry.max_batch_size, geometry.num_slots),
            max_total_tokens=min(config.max_total_tokens, geometry.max_total_tokens),
            max_model_len=min(config.max_model_len, geometry.max_model_len),
            max_num_seqs=config.max_num_seqs,
            memory_threshold=config.memory_threshold,
            num_host_blocks=geometry.num_host_blocks,
            num_stages=geometry.num_stages,
        )

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    @property
    def longest(self) -> int:
        """Most tokens of prompt and output that one request may have."""
        return min(self.max_model_len, self.num_blocks * self.block_size)

    @property
    def max_blocks_per_seq(self) -> int:
        """Width of a block table: most blocks of one sequence."""
        return self.blocks_for(self.max_model_len)
