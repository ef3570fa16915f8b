"""Rows with one query each over a cache in which everything that is not theirs is NaN."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.paged_attention import AttentionShape, PagedSequences, reference


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """Shape of a model's heads and of its cache."""

    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True, slots=True)
class DecodeScene:
    """Arguments of decode attention, on one device."""

    query: Tensor
    kv_cache: Tensor
    block_table: Tensor
    seq_len: Tensor

    def rows(self, which: list[int]) -> DecodeScene:
        """The same cache with some of the rows, in the order given."""
        return DecodeScene(
            self.query[which], self.kv_cache, self.block_table[which], self.seq_len[which]
        )

    @property
    def arguments(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.query, self.kv_cache, self.block_table, self.seq_len

    def expected(self, scale: float, window: int | None = None) -> Tensor:
        """
        Return the definition's result in float32, from the same rounded numbers; zeros for padding.
        """
        lengths = self.seq_len.cpu().numpy()
        live = np.flatnonzero(lengths)
        num_rows, num_heads, head_dim = self.query.shape
        of = AttentionShape(
            num_heads=num_heads,
            num_kv_heads=self.kv_cache.shape[3],
            head_dim=head_dim,
            block_size=self.kv_cache.shape[1],
            dtype=torch.float32,
            device=self.query.device,
        )
        sequences = PagedSequences(
            query_len=np.ones(len(live), np.int32),
            seq_len=lengths[live],
            block_table=self.block_table.cpu().numpy()[live],
        )
        out = torch.zeros((num_rows, num_heads, head_dim), device=self.query.device)
        plan = reference.plan(sequences, of, window)
        out[live] = plan.attend(self.query[live].float(), self.kv_cache.float(), scale)
        return out


def decode_scene(
    lengths: list[int], heads: Heads, device: torch.device, seed: int = 0
) -> DecodeScene:
    """
    Return rows of these lengths in shuffled blocks; 0 is a padding row, with the dummy block in its
    table.

    Unused blocks, the ends of last blocks and the dummy block are NaN; unused entries of the table
    name another row's block.
    """
    generator = torch.Generator().manual_seed(seed)
    block_size, width = heads.block_size, (2, heads.num_kv_heads, heads.head_dim)
    held = [-(-length // block_size) for length in lengths]
    shuffled = torch.Generator().manual_seed(seed)  # its own: numbers are the same in any blocks
    free = (torch.randperm(sum(held) + 3, generator=shuffled) + 1).to(torch.int32)
    cache = torch.full((len(free) + 1, block_size, *width), float("nan"), dtype=heads.dtype)
    table = torch.zeros((len(lengths), max(held) + 2), dtype=torch.int32)
    for row, (length, count) in enumerate(zip(lengths, held, strict=True)):
        if length:
            table[row] = free[-1]
            table[row, :count], free = free[:count], free[count:]
            filled = torch.full((count * block_size, *width), float("nan"))
            filled[:length] = torch.randn((length, *width), generator=generator)
            blocks = filled.view(count, block_size, *width)
            cache[table[row, :count].long()] = blocks.to(heads.dtype)
    query = torch.randn((len(lengths), heads.num_heads, heads.head_dim), generator=generator)
    return DecodeScene(
        query.to(heads.dtype).to(device),
        cache.to(device),
        table.to(device),
        torch.tensor(lengths, dtype=torch.int32, device=device),
    )
