"""Distances of 16-bit results from exact ones, beside those of plain torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MOST = 2.0
"""Multiple of plain torch's error that ours may have."""


@dataclass(frozen=True, slots=True)
class Error:
    """Distances from the definition in float32 of the same rounded inputs."""

    worst: float
    root_mean_square: float

    @classmethod
    def of(cls, found: Tensor, exact: Tensor) -> Error:
        """Measure results that are all finite, in any type."""
        assert exact.dtype == torch.float32
        assert found.isfinite().all()
        distance = (found.float() - exact).double()
        return cls(float(distance.abs().max()), float(distance.square().mean().sqrt()))

    def is_within(self, plain: Error) -> bool:
        """Return whether neither error is larger than `MOST` times that of plain torch."""
        return (
            self.worst <= MOST * plain.worst
            and self.root_mean_square <= MOST * plain.root_mean_square
        )


def numbers(
    *shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0, spread: float = 1.0
) -> Tensor:
    """Return normal numbers, rounded to a type; the same on every device."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * spread
    return drawn.to(dtype).to(device)
