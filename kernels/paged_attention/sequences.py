"""Arguments of paged attention, independent of their implementation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """
    Properties that are the same in every step: heads, cache geometry, number type and device.

    With `batch_invariant`, a query's bits depend only on its own sequence and position, not on the
    batch or the chunk that it is computed in.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    device: torch.device
    batch_invariant: bool = False

    @property
    def group_size(self) -> int:
        """Number of query heads per key head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedSequences:
    """
    The rows of one batch, on the host.

    Attributes:
        query_len: int32 ``[R]``, number of new positions of each row, at least 1; the queries of
            rows follow one another.
        seq_len: int32 ``[R]``, number of positions including the new ones.
        block_table: int32 ``[R, M]``, blocks in order; entries past ``ceil(seq_len / block_size)``
            are ignored.
    """

    query_len: NDArray[np.int32]
    seq_len: NDArray[np.int32]
    block_table: NDArray[np.int32]


def queries_alone(sequences: PagedSequences) -> PagedSequences:
    """Return the same queries in the same order, each as a row of its own."""
    query_len = sequences.query_len
    start = np.repeat(sequences.seq_len - query_len, query_len)
    first_query = np.repeat(np.cumsum(query_len) - query_len, query_len)
    in_row = np.arange(len(start)) - first_query
    return PagedSequences(
        query_len=np.ones(len(start), np.int32),
        seq_len=(start + in_row + 1).astype(np.int32),
        block_table=np.repeat(sequences.block_table, query_len, axis=0),
    )


class AttentionPlan(Protocol):
    """One step's attention, ready to run once per layer."""

    @property
    def shape(self) -> AttentionShape:
        """Shape that it was planned for."""

    @property
    def num_queries(self) -> int:
        """Number of queries of all rows, T."""

    def attend(self, query: Tensor, kv_cache: Tensor, scale: float) -> Tensor:
        """Compute attention; arguments and result are as in `paged_attention`, unchecked."""
