"""Checks of a delta batch, and a step's input tensors, made from it and the slot state after it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from executor_svc.device.upload import upload
from executor_svc.model.decoder import DecoderInputs
from executor_svc.slots.tokens import SlotTokens
from kernels.paged_attention import AttentionShape, PagedSequences, plan_paged_attention
from tandem.errors import SessionLost
from tandem.link.batch import ROW_SAMPLES, Batch, Int32Column
from tandem.link.slots.slot_state import SlotState


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRows:
    """
    The rows of a step that sample, in batch order.

    Attributes:
        slot: int32 ``[R]``.
        position: int32 ``[R]``, position in its sequence of the token to be sampled.
        hidden_row: int64 ``[R]``, index among the step's T tokens of the hidden state to sample
            from.
    """

    slot: Int32Column
    position: Int32Column
    hidden_row: NDArray[np.int64]


def sampling_rows(batch: Batch) -> SamplingRows:
    """Return the rows that are flagged to sample."""
    last_token = np.cumsum(batch.row_num_tokens, dtype=np.int64) - 1
    samples = (batch.row_flags & ROW_SAMPLES) != 0
    return SamplingRows(
        slot=batch.row_slot[samples],
        position=(batch.row_start + batch.row_num_tokens)[samples],
        hidden_row=last_token[samples],
    )


def decoder_inputs(
    batch: Batch,
    slots: SlotState,
    tokens: SlotTokens | None,
    shape: AttentionShape,
    windows: Collection[int | None],
) -> DecoderInputs:
    """
    Build the model's inputs for a batch that has at least one row.

    Args:
        batch: The batch, already applied to `slots` and `tokens`.
        slots: Slot state with the block tables.
        tokens: Input tokens, those sampled in earlier steps included; None on stages that get
            hidden states instead.
        shape: Shape that attention is planned for.
        windows: Every sliding window of the model, None for full attention.
    """
    query_len = batch.row_num_tokens
    seq_len = batch.row_start + query_len
    num_blocks = -(-int(seq_len.max()) // shape.block_size)
    block_table = slots.block_table[batch.row_slot, :num_blocks]
    row, position = token_rows(batch)
    block = block_table[row, position // shape.block_size].astype(np.int64)
    kv_position = block * shape.block_size + position % shape.block_size
    sequences = PagedSequences(query_len=query_len, seq_len=seq_len, block_table=block_table)
    return DecoderInputs(
        token_id=None if tokens is None else tokens.gather(batch.row_slot[row], position),
        position=upload(position, shape.device),
        kv_position=upload(kv_position, shape.device),
        attention={
            window: plan_paged_attention(sequences, shape, window=window) for window in windows
        },
    )


def token_rows(batch: Batch) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return every token's row in the batch and position in its sequence, int64 ``[T]`` each."""
    num_rows, num_tokens = len(batch.row_slot), batch.num_tokens
    row = np.arange(num_rows)
    start = batch.row_start.astype(np.int64)
    if num_tokens == num_rows:
        return row, start
    row = np.repeat(row, batch.row_num_tokens)
    first_token = np.cumsum(batch.row_num_tokens) - batch.row_num_tokens
    return row, start[row] + np.arange(num_tokens) - first_token[row]


def needs_kv(batch: Batch) -> bool:
    """Tell whether a batch reads or writes KV memory."""
    columns = (batch.row_slot, batch.copy_source, batch.swap_out_block, batch.swap_in_host)
    return any(map(len, columns))


def check_lengths(batch: Batch, max_model_len: int) -> None:
    """
    Check max_model_len: a slot's blocks may have room past it, its token history has not.

    Raises:
        SessionLost: The batch takes a slot past it.
    """
    ends = batch.row_start + batch.row_num_tokens
    longest = max((len(admission.token_ids) for admission in batch.admits), default=0)
    if len(ends):
        longest = max(longest, int(ends.max()))
    if longest > max_model_len:
        raise SessionLost(
            f"the batch takes a slot to {longest} tokens, max_model_len is {max_model_len}"
        )
