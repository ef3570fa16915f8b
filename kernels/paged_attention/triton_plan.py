"""
Paged attention of one step in Triton: rows with one query are computed by the decode kernel, the
others by the prefill kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.paged_attention.sequences import AttentionShape, PagedSequences
from kernels.paged_attention.triton_decode import decode_attention
from kernels.paged_attention.triton_prefill import prefill_attention
from kernels.paged_attention.triton_prefill_tiles import (
    TileSize,
    cut_prefill,
    invariant_tile_size,
    tile_size,
)

_ALIGNMENT = 4
"""Multiple of int32 to which parts of an upload are padded: kernels expect 16-byte alignment."""


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """
    Rows with one query each, which are the first rows of the plan's block table.

    Attributes:
        seq_len: int32 ``[B]``; 0 for padding.
        query_at: int64 ``[B]``, places of their queries among the batch's; None if they are the
            batch's first.
    """

    seq_len: Tensor
    query_at: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonPlan:
    """
    A plan of one step's rows on the device.

    Launches depend on shapes only: a plan over buffers that do not move can be captured, and a
    replay uses the contents that the buffers then have.

    Attributes:
        num_queries: Number of queries of all rows, T.
        window: As in `plan_paged_attention`.
        block_table: int32 ``[R, M]``, rows of decodes first.
        decodes: Rows for the decode kernel; None if there are none.
        prefills: Sizes of tiles, each with a table of its tiles, int32 ``[N, 4]``.
        resident_len: int32 ``[R]``, lengths on the device of rows with one query each; each run
            sets the positions in the only table of tiles from it. None if the tables hold
            positions already.
    """

    shape: AttentionShape
    num_queries: int
    window: int | None
    block_table: Tensor
    decodes: DecodeRows | None
    prefills: tuple[tuple[TileSize, Tensor], ...]
    resident_len: Tensor | None = None

    def attend(self, query: Tensor, kv_cache: Tensor, scale: float) -> Tensor:
        """Compute attention; arguments and result are as in `paged_attention`, unchecked."""
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        if self.resident_len is not None:
            torch.sub(self.resident_len, 1, out=self.prefills[0][1][:, 2])
        if self.decodes is not None:
            self._decode(self.decodes, query, kv_cache, scale, out)
        for size, tiles in self.prefills:
            prefill_attention(
                query,
                kv_cache,
                self.block_table,
                tiles,
                size,
                scale=scale,
                window=self.window,
                out=out,
            )
        return out

    def _decode(
        self, rows: DecodeRows, query: Tensor, kv_cache: Tensor, scale: float, out: Tensor
    ) -> None:
        num_rows = len(rows.seq_len)
        table = self.block_table[:num_rows]
        if rows.query_at is None:
            own, target = query[:num_rows], out[:num_rows]
        else:
            own = query.index_select(0, rows.query_at)
            target = torch.empty_like(own)
        decode_attention(
            own, kv_cache, table, rows.seq_len, scale=scale, window=self.window, out=target
        )
        if rows.query_at is not None:
            out.index_copy_(0, rows.query_at, target)


def plan(sequences: PagedSequences, shape: AttentionShape, window: int | None) -> TritonPlan:
    """
    Prepare a step; arguments are as in `plan_paged_attention`, unchecked. All data goes to the
    device in one copy.

    Raises:
        ValueError: The kernels do not take this head size or number type.
    """
    tile_size(shape, is_short=False)  # so that steps of decodes alone are refused too
    query_len, table = sequences.query_len, sequences.block_table
    is_decode = query_len == 1
    if shape.batch_invariant:  # the prefill kernel gives a query the same bits in any chunk
        is_decode = np.zeros_like(is_decode)
    num_decodes = int(is_decode.sum())
    in_order = bool(is_decode[:num_decodes].all())
    order = np.argsort(~is_decode, kind="stable")
    decodes = order[:num_decodes]
    tables = cut_prefill(sequences, shape, order[num_decodes:])
    if in_order:
        columns = [table, sequences.seq_len[:num_decodes]]
    else:
        place = np.argsort(order)
        for _, tiles in tables:
            tiles[:, 0] = place[tiles[:, 0]]
        first_query = np.cumsum(query_len) - query_len
        columns = [table[order], sequences.seq_len[decodes], first_query[decodes]]
    columns += [tiles for _, tiles in tables]
    block_table, seq_len, *rest = _upload(columns, shape.device)
    query_at = None if in_order else rest.pop(0).to(torch.int64)  # for torch's indexing
    return TritonPlan(
        shape=shape,
        num_queries=int(query_len.sum()),
        window=window,
        block_table=block_table,
        decodes=DecodeRows(seq_len, query_at) if num_decodes else None,
        prefills=tuple((size, tiles) for (size, _), tiles in zip(tables, rest, strict=True)),
    )


def plan_resident_decodes(
    block_table: Tensor, seq_len: Tensor, shape: AttentionShape, window: int | None
) -> TritonPlan:
    """
    Prepare decodes; arguments are as in `resident.plan_resident_decodes`, unchecked.

    Raises:
        ValueError: The kernels do not take this head size or number type.
    """
    tile_size(shape, is_short=False)
    decodes: DecodeRows | None = DecodeRows(seq_len, None)
    prefills: tuple[tuple[TileSize, Tensor], ...] = ()
    if shape.batch_invariant:  # as in `plan`, rows with one query go to the prefill kernel
        row = torch.arange(len(seq_len), dtype=torch.int32, device=seq_len.device)
        tiles = torch.stack((row, row, row, torch.ones_like(row)), dim=1)
        decodes, prefills = None, ((invariant_tile_size(shape), tiles),)
    return TritonPlan(
        shape=shape,
        num_queries=len(seq_len),
        window=window,
        block_table=block_table,
        decodes=decodes,
        prefills=prefills,
        resident_len=seq_len if shape.batch_invariant else None,
    )


def _upload(columns: Sequence[NDArray[np.integer[Any]]], device: torch.device) -> list[Tensor]:
    """Copy columns to a device as int32, in one copy; each begins at a multiple of 16 bytes."""
    ends = np.cumsum([-(-column.size // _ALIGNMENT) * _ALIGNMENT for column in columns]).tolist()
    packed = np.zeros(ends[-1], np.int32)
    begins = [0, *ends[:-1]]
    for begin, column in zip(begins, columns, strict=True):
        packed[begin : begin + column.size] = column.reshape(-1)
    host = torch.from_numpy(packed)
    if device.type == "cuda":
        host = host.pin_memory()  # the copy then does not wait for running work
    there = host.to(device, non_blocking=True)
    return [
        there[begin : begin + column.size].view(column.shape)
        for begin, column in zip(begins, columns, strict=True)
    ]
