"""Operations of a layer that may compute a row's last bits differently beside other rows."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from executor_svc.parallel.sharding import sum_chunks
from kernels.linear import linear
from kernels.packed_linear import PackedWeight, packed_linear
from kernels.rope_kv_write import rope_kv_write
from kernels.silu_mul import silu_mul

_ELEMENTS_OF_ONE_THREAD = 32768
"""
Number of elements from which PyTorch divides an elementwise operation among threads, even inside a
row.
"""


_ELEMENTS_OF_VECTORS = 64
"""Most elements that PyTorch computes in vectors at a time: two vectors of 64 bytes of 2 each."""


class RowOperations(Protocol):
    """Operations on T rows at a time; arguments are as in `kernels`."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply ``[T, K]`` by a weight ``[N, K]``."""

    def add_linear(self, hidden: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        """Add a product to `hidden` in place."""

    def partial_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """Multiply by a part of a weight's columns: a part of each sum, in float32."""

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Multiply SiLU of the first half by the second half."""

    def rope_kv_write(
        self,
        qkv: Tensor,
        rotation: Tensor,
        kv_position: Tensor,
        kv_cache: Tensor,
        *,
        qk_norm: Tensor | None,
        norm_eps: float,
    ) -> Tensor:
        """Rotate queries and keys, and write keys and values."""


class FastOperations:
    """The fastest operations for the number of rows at hand."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """As in `RowOperations`."""
        if isinstance(weight, PackedWeight):
            return packed_linear(x, weight, bias)
        return functional.linear(x, weight, bias)

    def add_linear(self, hidden: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        """
        As in `RowOperations`; the residual connection costs no pass of its own.
        """
        if isinstance(weight, PackedWeight):
            packed_linear(x, weight, bias, residual=hidden)
            return
        hidden.addmm_(x, weight.t())
        if bias is not None:
            hidden.add_(bias)

    def partial_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """
        As in `RowOperations`. On a CPU a weight that is not packed is widened for each product,
        because the framework would round the result to the weight's type.
        """
        if isinstance(weight, PackedWeight):
            return packed_linear(x.float(), weight)
        if x.device.type == "cuda" and x.dtype != torch.float32:
            return torch.mm(x, weight.t(), out_dtype=torch.float32)
        return functional.linear(x.float(), weight.float())

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """As in `RowOperations`."""
        return silu_mul(gate_up)

    def rope_kv_write(
        self,
        qkv: Tensor,
        rotation: Tensor,
        kv_position: Tensor,
        kv_cache: Tensor,
        *,
        qk_norm: Tensor | None,
        norm_eps: float,
    ) -> Tensor:
        """As in `RowOperations`."""
        return rope_kv_write(
            qkv, rotation, kv_position, kv_cache, qk_norm=qk_norm, norm_eps=norm_eps
        )


class InvariantOperations:
    """
    Operations that give a row the same bits alone and beside any other rows, and on 1, 2 and 4
    ranks: a sum over a dimension that ranks divide is a tree of chunks of the whole one.

    On a CPU elementwise operations take so few rows at a time that PyTorch does not divide them
    among threads: a thread's last elements go through other code, and may be in the middle of a
    row. So do the last elements of a row; where a rank has a part of it, it is filled up.
    """

    def __init__(self, num_ranks: int = 1) -> None:
        """
        Args:
            num_ranks: Ranks among which heads and MLP are divided.
        """
        self._num_ranks = num_ranks
        # This makes products always get so many threads; otherwise the library chooses by the load.
        torch.set_num_threads(torch.get_num_threads())

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """As in `RowOperations`; products with packed weights are invariant by themselves."""
        if isinstance(weight, PackedWeight):
            return packed_linear(x, weight, bias)
        return linear(x, weight, bias)

    def add_linear(self, hidden: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        """As in `RowOperations`."""
        num_chunks = sum_chunks(x.shape[1], self._num_ranks)
        if isinstance(weight, PackedWeight):
            packed_linear(x, weight, bias, residual=hidden, num_chunks=num_chunks)
        else:
            linear(x, weight, bias, residual=hidden, num_chunks=num_chunks)

    def partial_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """As in `RowOperations`: a subtree of the chunks' sums."""
        num_chunks = sum_chunks(x.shape[1], self._num_ranks)
        if isinstance(weight, PackedWeight):
            return packed_linear(x, weight, num_chunks=num_chunks, dtype=torch.float32)
        return linear(x, weight, num_chunks=num_chunks, dtype=torch.float32)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """As in `RowOperations`."""
        inner = gate_up.shape[1] // 2
        num_added = -inner % _ELEMENTS_OF_VECTORS if gate_up.device.type == "cpu" else 0
        if num_added:
            filled = functional.pad(gate_up.reshape(-1, 2, inner), (0, num_added))
            return self.silu_mul(filled.flatten(1))[:, :inner].contiguous()
        return _joined([silu_mul(part) for part in torch.split(gate_up, _rows_at_once(gate_up))])

    def rope_kv_write(
        self,
        qkv: Tensor,
        rotation: Tensor,
        kv_position: Tensor,
        kv_cache: Tensor,
        *,
        qk_norm: Tensor | None,
        norm_eps: float,
    ) -> Tensor:
        """As in `RowOperations`."""
        num_rows = _rows_at_once(qkv)
        columns = (torch.split(column, num_rows) for column in (qkv, rotation, kv_position))
        parts = [
            rope_kv_write(values, turn, place, kv_cache, qk_norm=qk_norm, norm_eps=norm_eps)
            for values, turn, place in zip(*columns, strict=True)
        ]
        return _joined(parts)


def _rows_at_once(rows: Tensor) -> int:
    if rows.device.type != "cpu":
        return max(1, len(rows))
    return max(1, (_ELEMENTS_OF_ONE_THREAD - 1) // rows.shape[1])


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
