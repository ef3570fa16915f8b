"""
Encoder of steps, which writes repeated decode steps directly.

Most steps have only decode rows, and most of these have the slots, token counts and flags of the
step before, or of one shortly before where lanes take turns, as `Batch.rows_version` says. These
fields are then kept serialized. The message around them has few fields of fixed types, so writing
it directly costs less than building it with protobuf. Protobuf reads fields in any order. All other
steps go through `wire.encode_step`.
"""

from __future__ import annotations

import struct

from tandem.executor.v1 import batch_pb2
from tandem.link import MAX_STAGES
from tandem.link.batch import Batch
from tandem.link.codec.checksum import seal
from tandem.link.codec.fields import INT32, UINT8, raw_column
from tandem.link.codec.varint import FIXED64, LENGTH_DELIMITED, VARINT, tag, varint
from tandem.link.codec.wire import encode_step
from tandem.link.commands import Command, Step

_STEP_TAG = tag(batch_pb2.ExecuteRequest, "step", LENGTH_DELIMITED)
_EPOCH_TAG = tag(batch_pb2.Step, "session_epoch", VARINT)
_ID_TAG = tag(batch_pb2.Step, "step_id", VARINT)
_ACKED_TAG = tag(batch_pb2.Step, "acked_step_id", VARINT)
_HASH_TAG = tag(batch_pb2.Step, "state_hash", FIXED64)
_BATCH_TAG = tag(batch_pb2.Step, "batch", LENGTH_DELIMITED)
_SLOT_TAG = tag(batch_pb2.ExecutionBatch, "row_slot", LENGTH_DELIMITED)
_NUM_TOKENS_TAG = tag(batch_pb2.ExecutionBatch, "row_num_tokens", LENGTH_DELIMITED)
_START_TAG = tag(batch_pb2.ExecutionBatch, "row_start", LENGTH_DELIMITED)
_FLAGS_TAG = tag(batch_pb2.ExecutionBatch, "row_flags", LENGTH_DELIMITED)
_APPEND_SLOT_TAG = tag(batch_pb2.ExecutionBatch, "append_slot", LENGTH_DELIMITED)
_APPEND_BLOCK_TAG = tag(batch_pb2.ExecutionBatch, "append_block", LENGTH_DELIMITED)
_FIXED64_BYTES = struct.Struct("<Q").pack

MAX_VERSIONS = 2 * MAX_STAGES
"""Most versions of rows that are kept: those of lanes, which take turns, and former ones."""


class StepEncoder:
    """Encoder of the steps of one end of the link."""

    __slots__ = ("_columns",)

    def __init__(self) -> None:
        self._columns: dict[int, bytes] = {}
        """The slots, token counts and flags of rows by their version, serialized."""

    def encode(
        self,
        command: Command,
        *,
        session_epoch: int,
        step_id: int,
        acked_step_id: int,
        state_hash: int,
    ) -> bytes:
        """
        Serialize a step, as an ExecuteRequest.

        Raises:
            TypeError: A column's type is not the documented one and cannot be widened to it.
        """
        if not isinstance(command, Batch) or (columns := self._kept_columns(command)) is None:
            return encode_step(
                Step(
                    session_epoch=session_epoch,
                    step_id=step_id,
                    acked_step_id=acked_step_id,
                    state_hash=state_hash,
                    command=command,
                )
            )
        start = raw_column(command.row_start, INT32)
        appends = b""
        if len(command.append_slot):
            slot = raw_column(command.append_slot, INT32)
            block = raw_column(command.append_block, INT32)
            slot_head = _APPEND_SLOT_TAG + varint(len(slot))
            appends = b"".join((slot_head, slot, _APPEND_BLOCK_TAG, varint(len(block)), block))
        batch = b"".join((columns, _START_TAG, varint(len(start)), start, appends))
        head = b"".join(
            (
                _EPOCH_TAG,
                varint(session_epoch),
                _ID_TAG,
                varint(step_id),
                _ACKED_TAG,
                varint(acked_step_id),
                _HASH_TAG,
                _FIXED64_BYTES(state_hash),
                _BATCH_TAG,
                varint(len(batch)),
            )
        )
        return seal(b"".join((_STEP_TAG, varint(len(head) + len(batch)), head, batch)))

    def _kept_columns(self, batch: Batch) -> bytes | None:
        """
        Return what is kept, or is kept from now on, of the rows of a batch of rows and appends
        alone; None for any other batch and for rows without a version.
        """
        if (
            batch.admits
            or len(batch.release_slot)
            or len(batch.copy_source)
            or len(batch.swap_out_block)
            or len(batch.swap_in_host)
        ):
            return None
        if not batch.rows_version or not len(batch.row_slot):
            return None
        kept = self._columns.get(batch.rows_version)
        if kept is not None:
            return kept
        if len(self._columns) == MAX_VERSIONS:  # rows that changed, all but a few
            self._columns.clear()
        parts = []
        for column_tag, raw in (
            (_SLOT_TAG, raw_column(batch.row_slot, INT32)),
            (_NUM_TOKENS_TAG, raw_column(batch.row_num_tokens, INT32)),
            (_FLAGS_TAG, raw_column(batch.row_flags, UINT8)),
        ):
            parts += [column_tag, varint(len(raw)), raw]
        columns = self._columns[batch.rows_version] = b"".join(parts)
        return columns
