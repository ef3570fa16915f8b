"""Encoding of batches as `ExecutionBatch` messages, and back."""

from __future__ import annotations

from tandem.errors import SessionLost
from tandem.executor.v1 import batch_pb2
from tandem.link.batch import Admission, Batch
from tandem.link.codec.fields import INT32, UINT8, check_length, malformed, raw_column, read_column
from tandem.link.codec.sampling_codec import read_sampling, sampling_message
from tandem.link.refusal import in_slot

MAX_ADMITTED_ROWS = 65_536
"""Most admissions in one batch, far above any `num_slots`, so that garbage cannot fill memory."""

_MAX_INT32 = 2**31 - 1


_COPIES = (
    ("copy_source", "copy_destination"),
    ("swap_out_block", "swap_out_host"),
    ("swap_in_host", "swap_in_block"),
)
"""Pairs of columns that most batches leave empty."""


def write_batch(batch: Batch, message: batch_pb2.ExecutionBatch) -> None:
    """
    Fill in the message of a batch, in place in the larger message, as a copy would cost as much.

    An absent field reads as an empty column, and most batches have only decode rows.
    """
    message.SetInParent()
    message.row_slot = raw_column(batch.row_slot, INT32)
    message.row_num_tokens = raw_column(batch.row_num_tokens, INT32)
    message.row_start = raw_column(batch.row_start, INT32)
    message.row_flags = raw_column(batch.row_flags, UINT8)
    if len(batch.append_slot):
        message.append_slot = raw_column(batch.append_slot, INT32)
        message.append_block = raw_column(batch.append_block, INT32)
    if len(batch.release_slot):
        message.release_slot = raw_column(batch.release_slot, INT32)
    for admission in batch.admits:
        message.admit.append(_admission_message(admission))
    if len(batch.copy_source):
        message.copy_source = raw_column(batch.copy_source, INT32)
        message.copy_destination = raw_column(batch.copy_destination, INT32)
    if len(batch.swap_out_block):
        message.swap_out_block = raw_column(batch.swap_out_block, INT32)
        message.swap_out_host = raw_column(batch.swap_out_host, INT32)
    if len(batch.swap_in_host):
        message.swap_in_host = raw_column(batch.swap_in_host, INT32)
        message.swap_in_block = raw_column(batch.swap_in_block, INT32)


def read_batch(message: batch_pb2.ExecutionBatch) -> Batch:
    """Read a batch, or raise `SessionLost` naming the malformed field."""
    if len(message.admit) > MAX_ADMITTED_ROWS:
        raise malformed("step.batch.admit", f"has {len(message.admit)} rows")
    batch = Batch(
        row_slot=read_column(message.row_slot, INT32, "step.batch.row_slot"),
        row_num_tokens=read_column(message.row_num_tokens, INT32, "step.batch.row_num_tokens"),
        row_start=read_column(message.row_start, INT32, "step.batch.row_start"),
        row_flags=read_column(message.row_flags, UINT8, "step.batch.row_flags"),
        append_slot=read_column(message.append_slot, INT32, "step.batch.append_slot"),
        append_block=read_column(message.append_block, INT32, "step.batch.append_block"),
    )
    num_rows = len(batch.row_slot)
    check_length(batch.row_num_tokens, num_rows, "step.batch.row_num_tokens")
    check_length(batch.row_start, num_rows, "step.batch.row_start")
    check_length(batch.row_flags, num_rows, "step.batch.row_flags")
    check_length(batch.append_block, len(batch.append_slot), "step.batch.append_block")
    if message.admit:
        batch.admits = tuple(
            _admission_in_slot(row, index) for index, row in enumerate(message.admit)
        )
    if message.release_slot:
        batch.release_slot = read_column(message.release_slot, INT32, "step.batch.release_slot")
    for first, second in _COPIES:
        # Most steps copy no block: a pair of columns that are both empty is skipped.
        if getattr(message, first) or getattr(message, second):
            _read_copies(message, batch, first, second)
    return batch


def _read_copies(message: batch_pb2.ExecutionBatch, batch: Batch, first: str, second: str) -> None:
    """Read two columns of equal length into the batch's fields of the same names."""
    one = read_column(getattr(message, first), INT32, f"step.batch.{first}")
    other = read_column(getattr(message, second), INT32, f"step.batch.{second}")
    check_length(other, len(one), f"step.batch.{second}")
    setattr(batch, first, one)
    setattr(batch, second, other)


def _admission_message(admission: Admission) -> batch_pb2.AdmittedRow:
    return batch_pb2.AdmittedRow(
        slot=admission.slot,
        generation=admission.generation,
        token_ids=raw_column(admission.token_ids, INT32),
        num_prompt_tokens=admission.num_prompt_tokens,
        num_cached_tokens=admission.num_cached_tokens,
        block_ids=raw_column(admission.block_ids, INT32),
        sampling=sampling_message(admission.sampling),
    )


def _admission_in_slot(row: batch_pb2.AdmittedRow, index: int) -> Admission:
    """Read an admission, or raise `SessionLost` naming the malformed field and the slot."""
    try:
        return _admission(row, index)
    except SessionLost as error:
        metadata = dict(error.metadata) | in_slot(row.slot)
        raise SessionLost(error.message, metadata=metadata) from error


def _admission(row: batch_pb2.AdmittedRow, index: int) -> Admission:
    field = f"step.batch.admit[{index}]"
    if row.slot > _MAX_INT32:
        raise malformed(f"{field}.slot", f"is {row.slot}")
    return Admission(
        slot=row.slot,
        generation=row.generation,
        token_ids=read_column(row.token_ids, INT32, f"{field}.token_ids"),
        num_prompt_tokens=row.num_prompt_tokens,
        num_cached_tokens=row.num_cached_tokens,
        block_ids=read_column(row.block_ids, INT32, f"{field}.block_ids"),
        sampling=read_sampling(row.sampling, f"{field}.sampling"),
    )
