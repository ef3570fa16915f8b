"""The definition of silu_mul."""

from __future__ import annotations

import torch
from torch import Tensor


def silu_mul(gate_up: Tensor) -> Tensor:
    """Apply the gate; arguments are as in the package's `silu_mul`, unchecked."""
    gate, up = gate_up.chunk(2, dim=1)
    return gate * torch.sigmoid(gate.float()).to(gate.dtype) * up
