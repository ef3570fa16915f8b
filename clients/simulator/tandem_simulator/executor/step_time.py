"""
Duration of a step on a modelled executor.

    step_s = overhead_s + max(weights_s, token_s * tokens)         matrix products
           + context_s * context + pair_s * pairs                   attention
           + copy_s * copied blocks + swap_s * swapped blocks       moves

`tokens` is the number of tokens that the step computes, `context` the number of KV positions that
its rows read (each row reads its whole sequence once), `pairs` the number of (query, key) pairs in
attention. The first line is the roofline of a matrix product: weights are read once however few
tokens there are, and from some number of tokens on arithmetic takes longer than reading. A
pipeline of N stages takes as long, each stage an N-th of it, and a hop between two of them. The
model leaves out launch gaps that depend on the batch's shape, graph padding, sampling, and swaps
that overlap with computing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from tandem.errors import InvalidConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """
    Parameters of the formula above, all in seconds.

    Attributes:
        overhead_s: Per step: launches, sampling, reading back.
        weights_s: Reading all weights once.
        token_s: Arithmetic per token computed, attention excluded.
        context_s: Reading the KV of one position.
        pair_s: Attention arithmetic per (query, key) pair.
        copy_s: Copying one KV block on the device.
        swap_s: Moving one KV block to or from host memory.
        link_s: One way between scheduler and executor; does not occupy the executor.
        hop_s: One way between two pipeline stages, for hidden states or tokens; occupies neither.
    """

    overhead_s: float
    weights_s: float
    token_s: float
    context_s: float
    pair_s: float
    copy_s: float
    swap_s: float
    link_s: float
    hop_s: float = 2e-5

    def __post_init__(self) -> None:
        """
        Check every parameter.

        Raises:
            InvalidConfig: One is negative or not finite, or a step would take no time.
        """
        for field in fields(self):
            value = getattr(self, field.name)
            if not (math.isfinite(value) and value >= 0):
                message = f"{field.name} is {value}: it must be 0 or more"
                raise InvalidConfig(message, field=field.name)
        if self.overhead_s + self.weights_s <= 0:
            raise InvalidConfig(
                "overhead_s and weights_s are both 0, so a step takes no time: set one of them",
                field="overhead_s",
            )

    def seconds(
        self, tokens: int, context: int, pairs: int, copied_blocks: int, swapped_blocks: int
    ) -> float:
        """Return the duration of a step; one without tokens (releases, moves) reads no weights."""
        products_s = max(self.weights_s, self.token_s * tokens) if tokens else 0.0
        return (
            self.overhead_s
            + products_s
            + self.context_s * context
            + self.pair_s * pairs
            + self.copy_s * copied_blocks
            + self.swap_s * swapped_blocks
        )


def from_hardware(
    *,
    parameters: float,
    layers: int,
    heads_dim: int,
    kv_heads_dim: int,
    value_bytes: int,
    block_size: int,
    flops_per_s: float,
    bytes_per_s: float,
    host_bytes_per_s: float,
    overhead_s: float,
    link_s: float,
) -> StepTime:
    """
    Derive the parameters of a dense decoder on one device from the rates that the device reaches.

    Args:
        parameters: Parameters of the model; 2 floating-point operations each per token.
        layers: Layers with attention.
        heads_dim: Query heads times head size.
        kv_heads_dim: KV heads times head size.
        value_bytes: Bytes per weight and per KV element.
        block_size: Tokens per KV block.
        flops_per_s: Operations per second that large matrix products reach.
        bytes_per_s: Bytes per second that the device's memory reaches.
        host_bytes_per_s: Bytes per second that copies between host and device reach, one way.
        overhead_s: See `StepTime`.
        link_s: See `StepTime`.
    """
    kv_bytes = 2 * layers * kv_heads_dim * value_bytes
    return StepTime(
        overhead_s=overhead_s,
        weights_s=parameters * value_bytes / bytes_per_s,
        token_s=2 * parameters / flops_per_s,
        context_s=kv_bytes / bytes_per_s,
        pair_s=4 * layers * heads_dim / flops_per_s,
        copy_s=2 * kv_bytes * block_size / bytes_per_s,
        swap_s=kv_bytes * block_size / host_bytes_per_s,
        link_s=link_s,
    )
