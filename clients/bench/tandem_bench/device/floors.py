"""
Least time that a decode step can take on a device, by what it must read and multiply.

Source: the roofline model (Williams, Waterman and Patterson, 2009), for one step:
``max(W / bandwidth, 2 * P * B / rate) + KV / bandwidth``. Weights are read once for the whole
batch, the KV cache once for each row. Activations, logits, sampling and gaps between kernels are
left out, so no step reaches the floor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from executor_svc.model.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """
    Highest rates of a device.

    Attributes:
        bytes_per_s: Bytes per second that its memory moves.
        flop_per_s: Operations per second in matrix products of the measured number type; an
            addition and a multiplication count as two.
    """

    bytes_per_s: float
    flop_per_s: float

    def floor_s(self, num_bytes: float, num_flop: float) -> float:
        """Return the least seconds for work that may overlap its reading and its computing."""
        return max(num_bytes / self.bytes_per_s, num_flop / self.flop_per_s)

    def is_memory_bound(self, num_bytes: float, num_flop: float) -> bool:
        """Return True where reading takes at least as long as computing."""
        return num_bytes / self.bytes_per_s >= num_flop / self.flop_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFloor:
    """
    Least time of the two parts of a decode step, in seconds.

    Attributes:
        weights_s: Time to read the matrices, or to multiply by them if that takes longer.
        kv_s: Time to read the rows' keys and values.
    """

    weights_s: float
    kv_s: float

    @property
    def total_s(self) -> float:
        """Time of the step: layers come one after another, so one part does not hide the other."""
        return self.weights_s + self.kv_s


def matmul_parameters(config: ModelConfig) -> int:
    """Count the numbers in the matrices of a step, the output projection included."""
    hidden, inner = config.hidden_size, config.intermediate_size
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    per_layer = hidden * (2 * query + 2 * key + 3 * inner)
    return config.num_layers * per_layer + config.vocab_size * hidden


def kv_bytes_read(config: ModelConfig, itemsize: int, lengths: Sequence[int]) -> int:
    """
    Return the bytes of the KV cache that a decode step reads.

    Args:
        config: Geometry; a layer with a sliding window reads no more positions than its window.
        itemsize: Bytes per number.
        lengths: Positions of each row, the new one included.
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
    Return the floor of one decode step.

    Args:
        config: Model that the step computes.
        itemsize: Bytes per number of weights and cache.
        ceilings: Ceilings of the device.
        lengths: Positions of each row, the new one included; one entry per row.
    """
    parameters = matmul_parameters(config)
    return StepFloor(
        weights_s=ceilings.floor_s(parameters * itemsize, 2.0 * parameters * len(lengths)),
        kv_s=kv_bytes_read(config, itemsize, lengths) / ceilings.bytes_per_s,
    )
