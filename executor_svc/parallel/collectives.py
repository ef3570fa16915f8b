"""
Computation that the ranks of a model's stage do together, and what all its ranks exchange.

All ranks call the same functions in the same order with tensors of one shape; every function gives
all of them the same bits. That of a sum relies on its algorithm: each element is added up on one
rank, or in one order on all.
"""

from __future__ import annotations

from typing import TypeVar, cast

import torch
from torch import Tensor, distributed

from executor_svc.parallel.process_groups import ProcessGroups

_Value = TypeVar("_Value")


class TensorCollectives:
    """
    Collectives over the ranks of `ProcessGroups.tensor`; a rank that is alone waits for none and
    gets its own values back.
    """

    def __init__(self, groups: ProcessGroups, *, ordered: bool = False) -> None:
        """
        Args:
            groups: The ranks.
            ordered: Add the ranks' values in one fixed order, whatever the shape, so that a row's
                bits do not depend on the rows beside it. It sends more.
        """
        self._group = groups.tensor
        self._size = groups.tensor_size
        self._ordered = ordered

    def sum(self, partial: Tensor) -> Tensor:
        """Add up float32 tensors of all ranks; `partial` may be overwritten with the sum."""
        if self._group is None or partial.numel() == 0:
            return partial
        partial = partial.contiguous()
        if not self._ordered:
            distributed.all_reduce(partial, group=self._group)
            return partial
        return _tree_sum(self._gathered(partial))

    def all_of(self, number: int, device: torch.device) -> list[int]:
        """Return a number of every rank, an int64, in their order; it waits for their device."""
        if self._group is None:
            return [number]
        own = torch.tensor([number], dtype=torch.int64, device=device)
        return [int(part) for part in self._gathered(own)]

    def _gathered(self, own: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(own) for _ in range(self._size)]
        distributed.all_gather(parts, own, group=self._group)
        return parts


class AllRanks:
    """All ranks of a model, of all its stages, for what they tell each other at the start."""

    def __init__(self, groups: ProcessGroups) -> None:
        self._group = groups.world
        self._size = groups.size

    def all_of(self, value: _Value) -> list[_Value]:
        """
        Wait for all ranks and return their values, in the order of ranks; they are small, and
        pickled on the way.
        """
        if self._group is None:
            return [value]
        values: list[_Value | None] = [None] * self._size
        distributed.all_gather_object(values, value, group=self._group)
        return cast("list[_Value]", values)


def _tree_sum(parts: list[Tensor]) -> Tensor:
    """Add neighbours, then neighbouring sums, as a binary tree."""
    while len(parts) > 1:
        pairs = [left + right for left, right in zip(parts[::2], parts[1::2], strict=False)]
        parts = pairs + parts[len(pairs) * 2 :]
    return parts[0]
