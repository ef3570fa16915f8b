"""Integers that sort as values do, with ids: the best value first, the lower id first on ties."""

from __future__ import annotations

import torch
from torch import Tensor

_LOW_WORD = 0xFFFFFFFF
_ALL_BUT_SIGN = 0x7FFFFFFF

LEAST = torch.iinfo(torch.int64).min
"""An integer below that of any value."""


def order(values: Tensor) -> Tensor:
    """Return integers in the order of float32 values without NaN: int64; -0.0 counts as 0.0."""
    bits = (values + 0.0).view(torch.int32)
    return torch.where(bits < 0, bits ^ _ALL_BUT_SIGN, bits).long()


def value_of(ordered: Tensor) -> Tensor:
    """Return the float32 values that `order` gives these integers; arbitrary for `LEAST`."""
    bits = ordered.to(torch.int32)
    return torch.where(bits < 0, bits ^ _ALL_BUT_SIGN, bits).view(torch.float32)


def pack(values: Tensor, ids: Tensor) -> Tensor:
    """Return integers in the order of (value, -id): int64; ids are below 2**32."""
    return (order(values) << 32) + (_LOW_WORD - ids)


def unpack(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values, float32, and ids, int64, of packed integers."""
    return value_of(packed >> 32), _LOW_WORD - (packed & _LOW_WORD)
