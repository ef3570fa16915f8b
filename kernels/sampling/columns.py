"""Parameters and results of the sampler, one entry per row of logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.sampling.logprobs.reference import Logprobs
from kernels.transfer import to_device


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingColumns:
    """
    Sampling parameters of each row. All shapes are ``[R]``.

    The columns may stay on the host while the logits are on a device: then the choice of kernels
    costs no synchronisation.

    Attributes:
        temperature: float32; 0 = greedy, values in (0, 0.01) count as 0.01.
        top_k: int32; 0 or less = off, 1 = greedy.
        top_p: float32 in (0, 1]; 1 = off.
        seed: int64, the bits of a uint64; key of the noise.
        position: int64, index of the drawn token in its whole sequence, below 2**32.
        choice: int64, below 2**32; 0 unless a request draws several choices.
        min_p: float32 in [0, 1]; 0 = off. None is off for all rows.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    seed: Tensor
    position: Tensor
    choice: Tensor
    min_p: Tensor | None = None

    @property
    def is_greedy(self) -> Tensor:
        """bool[R]: rows without noise; `top_k` 1 is greedy at any temperature."""
        return (self.temperature <= 0) | (self.top_k == 1)

    def select(self, rows: Tensor | slice) -> SamplingColumns:
        """Return the columns of some rows, given by int64[N] on the columns' device or a slice."""
        return SamplingColumns(
            temperature=self.temperature[rows],
            top_k=self.top_k[rows],
            top_p=self.top_p[rows],
            seed=self.seed[rows],
            position=self.position[rows],
            choice=self.choice[rows],
            min_p=None if self.min_p is None else self.min_p[rows],
        )

    def to(self, device: torch.device) -> SamplingColumns:
        """Return the columns on another device, as they are if they are there already."""
        return SamplingColumns(
            temperature=to_device(self.temperature, device),
            top_k=to_device(self.top_k, device),
            top_p=to_device(self.top_p, device),
            seed=to_device(self.seed, device),
            position=to_device(self.position, device),
            choice=to_device(self.choice, device),
            min_p=None if self.min_p is None else to_device(self.min_p, device),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """
    The sampled tokens, one per row.

    Attributes:
        token: int64[R]; 0 where the row is not valid.
        valid: bool[R]; False where the logits held NaN or +infinity, or only -infinity.
        margin: float32[R] or None; see `reference.margins`.
        logprobs: Logprobs of the rows that asked for them; None if no row did.
    """

    token: Tensor
    valid: Tensor
    margin: Tensor | None = None
    logprobs: Logprobs | None = None
