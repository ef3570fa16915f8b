"""silu_mul in two passes and one allocation."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def silu_mul(gate_up: Tensor) -> Tensor:
    """Apply the gate; arguments are as in the package's `silu_mul`, unchecked."""
    gate, up = gate_up.chunk(2, dim=1)
    return functional.silu(gate).mul_(up)
