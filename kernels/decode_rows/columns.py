"""Columns on a device: of sequences that decode, and of the rows of one step; they never move."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kernels.sampling.columns import SamplingColumns


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotColumns:
    """
    Columns of S sequences by slot.

    Attributes:
        position: int32 ``[S]``, position in its sequence of the token that is computed next.
        block_table: int32 ``[S, M]``, contiguous, blocks of the KV cache in order; entries past
            the block of `position` are any valid blocks.
        history: int32 ``[S, L + 1]``, contiguous, tokens by position. The last column takes the
            token after a sequence of full length, and tokens of rows of padding.
        temperature: float32 ``[S]``; this and the next as in `SamplingColumns`.
        top_k: int32 ``[S]``.
        top_p: float32 ``[S]``.
        seed: int64 ``[S]``.
        choice: int64 ``[S]``.
        min_p: float32 ``[S]``.
    """

    position: Tensor
    block_table: Tensor
    history: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    seed: Tensor
    choice: Tensor
    min_p: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRowColumns:
    """
    Columns of R rows of one step; each row is one token of a slot.

    Attributes:
        slot: int32 ``[R]``; negative for a row of padding.
        token_id: int32 ``[R]``, token to be computed; 0 for padding.
        position: int64 ``[R]``, position of that token; 0 for padding.
        kv_position: int64 ``[R]``, cache position of its keys and values: block * block_size +
            offset; 0, in the dummy block, for padding.
        seq_len: int32 ``[R]``, number of positions including the token's; 0 for padding.
        block_table: int32 ``[R, M]``, contiguous; entries past `seq_len` are any valid blocks.
        sampling: Sampling columns of the next token, min_p included; greedy for padding.
    """

    slot: Tensor
    token_id: Tensor
    position: Tensor
    kv_position: Tensor
    seq_len: Tensor
    block_table: Tensor
    sampling: SamplingColumns

    def first(self, num_rows: int) -> DecodeRowColumns:
        """Return the first rows as views of these columns."""
        part = slice(num_rows)
        return DecodeRowColumns(
            slot=self.slot[part],
            token_id=self.token_id[part],
            position=self.position[part],
            kv_position=self.kv_position[part],
            seq_len=self.seq_len[part],
            block_table=self.block_table[part],
            sampling=self.sampling.select(part),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRing:
    """
    Tokens of the last N steps, for the host to fetch while the next ones run.

    Attributes:
        tokens: int32 ``[N, R]``, contiguous; -1 for rows of padding and where logits were not
            valid.
        line: int32 ``[1]``, in [0, N): index of the line that the step writes.
    """

    tokens: Tensor
    line: Tensor
