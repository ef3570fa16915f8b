"""The definition of paged attention: row by row, in float32."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.paged_attention.sequences import AttentionShape, PagedSequences, queries_alone


@dataclass(frozen=True, slots=True)
class ReferencePlan:
    """A plan that keeps its arguments as they are."""

    sequences: PagedSequences
    shape: AttentionShape
    window: int | None

    @property
    def num_queries(self) -> int:
        """Number of queries of all rows, T."""
        return int(self.sequences.query_len.sum())

    def attend(self, query: Tensor, kv_cache: Tensor, scale: float) -> Tensor:
        """Compute attention; arguments and result are as in `paged_attention`, unchecked."""
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        first = 0
        rows = zip(
            self.sequences.query_len.tolist(),
            self.sequences.seq_len.tolist(),
            torch.from_numpy(self.sequences.block_table).to(query.device, torch.int64),
            strict=True,
        )
        for query_len, seq_len, block_table in rows:
            num_blocks = -(-seq_len // self.shape.block_size)
            pages = kv_cache[block_table[:num_blocks]]
            key, value = pages.flatten(0, 1)[:seq_len].unbind(1)
            own = slice(first, first + query_len)
            out[own] = self._attend_row(query[own], key, value, scale)
            first += query_len
        return out

    def _attend_row(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Attend one row: queries ``[Q, H, D]`` of the last positions to keys ``[L, K, D]``."""
        query_len, seq_len = len(query), len(key)
        key = key.float().repeat_interleave(self.shape.group_size, dim=1)
        value = value.float().repeat_interleave(self.shape.group_size, dim=1)
        scores = torch.einsum("qhd,khd->hqk", query.float(), key) * scale
        key_at = torch.arange(seq_len, device=query.device)
        query_at = key_at[seq_len - query_len :, None]
        seen = key_at <= query_at
        if self.window is not None:
            seen &= key_at > query_at - self.window
        weights = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1)
        return torch.einsum("hqk,khd->qhd", weights, value).to(query.dtype)


def plan(sequences: PagedSequences, shape: AttentionShape, window: int | None) -> ReferencePlan:
    """Prepare a step; arguments are as in `plan_paged_attention`, unchecked."""
    if shape.batch_invariant:
        sequences = queries_alone(sequences)
    return ReferencePlan(sequences, shape, window)
