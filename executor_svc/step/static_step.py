"""The decode step on the device: its buffers never move, and its tokens feed the next step."""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from dataclasses import fields

import torch
from torch import Tensor

from executor_svc.memory.decode_bytes import RING_LINES
from executor_svc.model.decoder import Decoder, DecoderInputs
from executor_svc.slots.mirror import SlotMirror
from executor_svc.slots.sampling import SAMPLING_FIELDS, SlotSampling
from executor_svc.slots.tokens import SlotTokens
from kernels.decode_rows import (
    DecodeRowColumns,
    SlotColumns,
    TokenRing,
    advance_rows,
    gather_rows,
)
from kernels.paged_attention import AttentionShape, plan_resident_decodes
from kernels.patch_rows import PackedRows, RowField, patch_rows
from kernels.sampling import Needs, SamplingColumns, VocabularyShard, draw
from tandem.link.batch import Int32Column
from tandem.link.slots.slot_state import SlotState


class Drawing(enum.Enum):
    """Way in which a step draws its tokens; each captured graph holds one of them."""

    PLAIN = 1
    """Greedy rows, and rows with noise over all ids."""
    FILTERED = 2
    """Rows as in PLAIN, and rows with min_p, top_k or top_p."""
    OUTSIDE = 3
    """No drawing: the caller draws from `DecodeStep.logits` and calls `DecodeStep.finish`."""


_NEEDS = {
    Drawing.PLAIN: Needs(top_k=False, top_p=False, min_p=False),
    Drawing.FILTERED: Needs(),
}


class DecodeStep:
    """
    A decode of one token for each row, from data that the device holds already.

    The device keeps token, position, block table and sampling parameters by slot. A step reads them
    for the slots of its rows, and each drawn token becomes the slot's next token. So `run`, or a
    graph captured from it, can be repeated without the host. `prepare` sends what only the host
    knows: the slots of the rows, admissions and new blocks; in most steps there are none.

    Other steps may run in between: they write tokens into the same histories, and `prepare`
    corrects positions.

    Source: token feedback and prepared inputs on the device as in TensorRT-LLM and vLLM's second
    runner; state by slot, so that rows change places for one word each, is ours.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv_layers: Sequence[Tensor],
        tokens: SlotTokens,
        shape: AttentionShape,
        windows: Collection[int | None],
        *,
        num_slots: int,
        max_rows: int,
        max_blocks: int,
    ) -> None:
        """
        Args:
            decoder: The model.
            kv_layers: KV cache per layer, ``[blocks, block_size, 2, num_kv_heads, head_dim]``.
            tokens: Token histories by slot.
            shape: Shape that attention is planned for.
            windows: Every sliding window of the model, None for full attention.
            num_slots: Number of slots, S.
            max_rows: Most rows of a step, padding included; at most S.
            max_blocks: M, blocks of the longest sequence.
        """
        self._decoder = decoder
        self._kv_layers = kv_layers
        self._shape = shape
        self._windows = frozenset(windows)
        self._packed = PackedRows(_slot_fields(max_blocks), num_slots, shape.device)
        self._slots = _slot_columns(self._packed, tokens)
        self._rows = _row_columns(self._packed.column("row_slot")[:max_rows], max_blocks)
        ring_shape = (RING_LINES, max_rows)
        self._ring = TokenRing(
            tokens=torch.zeros(ring_shape, dtype=torch.int32, device=shape.device),
            line=torch.zeros(1, dtype=torch.int32, device=shape.device),
        )
        self._logits = torch.zeros(
            (max_rows, decoder.num_logits), dtype=shape.dtype, device=shape.device
        )
        self._mirror = SlotMirror(num_slots, max_rows)
        self._line = 0
        self.forget()

    @property
    def max_rows(self) -> int:
        """Most rows of a step, padding included."""
        return len(self._rows.slot)

    @property
    def shard(self) -> VocabularyShard | None:
        """The ids of the logits, where ranks share the vocabulary."""
        return self._decoder.shard

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffers, without token histories."""
        own_rows = _num_bytes(self._rows) - self._rows.slot.nbytes  # `slot` is a packed column
        columns = own_rows + _num_bytes(self._ring)
        return self._packed.words.nbytes + columns + self._logits.nbytes

    def forget(self) -> None:
        """
        Forget all slots and rows, so that `run` computes padding alone, as a capture should.
        """
        self._packed.column("row_slot").fill_(-1)
        self._ring.line.zero_()
        self._line = 0
        self._mirror.forget()

    def admitted(self, slot: int) -> None:
        """Note that a slot has a new sequence."""
        self._mirror.admitted(slot)

    def prepare(
        self, slot: Int32Column, start: Int32Column, slots: SlotState, sampling: SlotSampling
    ) -> None:
        """
        Send the device what it lacks of the next step's rows, by one copy and one kernel; nothing
        is sent if all rows continue those of the last step without new blocks.

        Args:
            slot: int32 ``[R]``, slots of the rows in batch order, R at most `max_rows`.
            start: int32 ``[R]``, position of the token that each row computes.
            slots: Slot state after the batch.
            sampling: Sampling parameters of the slots.
        """
        patch = self._mirror.patch(self._packed, slot, start, slots, sampling)
        if patch is not None:
            patch_rows(self._packed.words, patch.packed())

    def run(self, num_rows: int, drawing: Drawing) -> None:
        """
        Compute the prepared rows from fixed buffers alone, without reading from the host.

        Args:
            num_rows: Rows to compute; rows beyond the prepared ones are padding.
            drawing: Way of drawing tokens.
        """
        rows, shape = self._rows.first(num_rows), self._shape
        gather_rows(self._slots, rows, self._ring, shape.block_size)
        inputs = DecoderInputs(
            token_id=rows.token_id,
            position=rows.position,
            kv_position=rows.kv_position,
            attention={
                window: plan_resident_decodes(rows.block_table, rows.seq_len, shape, window=window)
                for window in self._windows
            },
        )
        logits = self._decoder.project(self._decoder.forward(inputs, self._kv_layers))
        if drawing is Drawing.OUTSIDE:
            self._logits[:num_rows].copy_(logits)
            return
        token, valid = draw(logits, rows.sampling, _NEEDS[drawing], shard=self.shard)
        advance_rows(self._slots, rows, token, valid, self._ring)

    def logits(self, num_rows: int) -> Tensor:
        """Return the logits of a step run with OUTSIDE, ``[num_rows, num_logits]``."""
        return self._logits[:num_rows]

    def finish(self, token: Tensor, valid: Tensor) -> None:
        """End a step run with OUTSIDE: int64 tokens and bool ``[R]``, one per prepared row."""
        advance_rows(self._slots, self._rows.first(len(token)), token, valid, self._ring)

    def launched(self) -> Tensor:
        """
        Note that the prepared rows' step was launched, by `run` or by a replay.

        Returns:
            The tensor that gets its tokens, int32 ``[R]``, -1 where logits are not valid; it is
            overwritten `RING_LINES` steps later.
        """
        self._line = (self._line + 1) % RING_LINES
        return self._ring.tokens[self._line, : self._mirror.advance()]


def _num_bytes(columns: DecodeRowColumns | SamplingColumns | TokenRing) -> int:
    values = [getattr(columns, field.name) for field in fields(columns)]
    return sum(value.nbytes if isinstance(value, Tensor) else _num_bytes(value) for value in values)


def _slot_fields(max_blocks: int) -> list[RowField]:
    return [
        RowField(name="row_slot", dtype=torch.int32),  # by row; there are no more rows than slots
        RowField(name="position", dtype=torch.int32),
        RowField(name="block_table", dtype=torch.int32, width=max_blocks),
        *SAMPLING_FIELDS,
    ]


def _slot_columns(packed: PackedRows, tokens: SlotTokens) -> SlotColumns:
    return SlotColumns(
        position=packed.column("position"),
        block_table=packed.column("block_table"),
        history=tokens.history,
        **{field.name: packed.column(field.name) for field in SAMPLING_FIELDS},
    )


def _row_columns(slot: Tensor, max_blocks: int) -> DecodeRowColumns:
    num_rows = len(slot)

    def zeros(dtype: torch.dtype) -> Tensor:
        return torch.zeros(num_rows, dtype=dtype, device=slot.device)

    return DecodeRowColumns(
        slot=slot,
        token_id=zeros(torch.int32),
        position=zeros(torch.int64),
        kv_position=zeros(torch.int64),
        seq_len=zeros(torch.int32),
        block_table=torch.zeros((num_rows, max_blocks), dtype=torch.int32, device=slot.device),
        sampling=SamplingColumns(
            temperature=zeros(torch.float32),
            top_k=zeros(torch.int32),
            top_p=zeros(torch.float32),
            seed=zeros(torch.int64),
            position=zeros(torch.int64),
            choice=zeros(torch.int64),
            min_p=zeros(torch.float32),
        ),
    )
