"""
The least time that a decode step can take on a device, by what it must read and multiply.

Source: the roofline model (Williams, Waterman and Patterson, 2009), for one step:
``max(W / bandwidth, 2 * P * B / rate) + KV / bandwidth``. Weights are read once for the whole
batch, the cache once for each row. Activations, logits, sampling and gaps between kernels are left
out, so nothing reaches it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from executor_svc.model.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """
    What a device does at best.

    Attributes:
        bytes_per_s: Moved by its memory.
        flop_per_s: Of matrix products in the number type that is measured; an addition and a
            multiplication are two.
    """

    bytes_per_s: float
    flop_per_s: float

    def floor_s(self, num_bytes: float, num_flop: float) -> float:
        """The least seconds for work that may overlap its reading and its computing."""
        return max(num_bytes / self.bytes_per_s, num_flop / self.flop_per_s)

    def is_memory_bound(self, num_bytes: float, num_flop: float) -> bool:
        """Whether reading takes longer than computing."""
        return num_bytes / self.bytes_per_s >= num_flop / self.flop_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFloor:
    """
    A decode step's parts, in seconds.

    Attributes:
        weights_s: To read the matrices, or to multiply by them if that takes longer.
        kv_s: To read the rows' keys and values.
    """

    weights_s: float
    kv_s: float

    @property
    def total_s(self) -> float:
        """The step: one part does not hide the other, as layers come one after another."""
        return self.weights_s + self.kv_s


def matmul_parameters(config: ModelConfig) -> int:
    """Numbers in the matrices that every step multiplies by, the output projection included."""
    hidden, inner = config.hidden_size, config.intermediate_size
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    per_layer = hidden * (2 * query + 2 * key + 3 * inner)
    return config.num_layers * per_layer + config.vocab_size * hidden


def kv_bytes_per_token(config: ModelConfig, itemsize: int) -> int:
    """Bytes of keys and values of one position in all layers, `itemsize` bytes per number."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * itemsize


def kv_bytes_read(config: ModelConfig, itemsize: int, lengths: Sequence[int]) -> int:
    """
    Bytes of the cache that a decode step reads.

    Args:
        config: Geometry; layers with a sliding window read no more than it.
        itemsize: Bytes per number.
        lengths: Positions of each row, its own included.
    """
    per_layer = 2 * config.num_kv_heads * config.head_dim * itemsize
    return sum(
        per_layer * sum(length if window is None else min(length, window) for length in lengths)
        for window in config.windows
    )


def step_floor(
    config: ModelConfig, itemsize: int, ceilings: Ceilings, lengths: Sequence[int]
) -> StepFloor:
    """
    The floor of one decode step.

    Args:
        config: The model.
        itemsize: Bytes per number of weights and cache.
        ceilings: Of the device.
        lengths: Positions of each row, its own included; one entry per row.
    """
    parameters = matmul_parameters(config)
    return StepFloor(
        weights_s=ceilings.floor_s(parameters * itemsize, 2.0 * parameters * len(lengths)),
        kv_s=kv_bytes_read(config, itemsize, lengths) / ceilings.bytes_per_s,
    )
