"""A step of prompts and decodes in buffers that never move."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from executor_svc.model.decoder import Decoder, DecoderInputs
from executor_svc.slots.sampling import SAMPLING_FIELDS, SlotSampling
from executor_svc.slots.tokens import SlotTokens
from executor_svc.step.batch_inputs import SamplingRows, token_rows
from executor_svc.step.graphs.shapes import GraphShape
from kernels.paged_attention import AttentionShape, plan_resident_decodes
from kernels.patch_rows import PackedRows, RowField, patch_rows
from kernels.sampling import Needs, SamplingColumns, draw
from tandem.link.batch import Batch
from tandem.link.slots.slot_state import SlotState

_Columns = Mapping[str, NDArray[np.integer | np.floating]]

_OF_PADDING = {"top_p": 1.0}
"""Values of columns in rows of padding, if not 0."""


class MixedStep:
    """
    A step of prompts' chunks and decodes that computes each token like a decode: as a row of its
    own that sees its sequence up to itself.

    That is exact, because a layer writes the keys of all tokens before any token attends. Shapes
    depend only on the numbers of tokens and rows. A sequence's keys are read once for each of the
    chunk's tokens, which is cheap for the few tokens that a captured step has.

    Sampled tokens are written into the histories, where the next step finds them.

    Source: shapes of prefills and decodes together as in Megatron Core's graphs; prompts as rows of
    single tokens are ours.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv_layers: Sequence[Tensor],
        tokens: SlotTokens,
        shape: AttentionShape,
        windows: Collection[int | None],
        *,
        max_tokens: int,
        max_blocks: int,
    ) -> None:
        """
        Args:
            decoder: The model.
            kv_layers: KV cache per layer, ``[blocks, block_size, 2, num_kv_heads, head_dim]``.
            tokens: Token histories by slot.
            shape: Shape that attention is planned for.
            windows: Every sliding window of the model, None for full attention.
            max_tokens: T, most tokens of a step, padding included; a step has no more rows.
            max_blocks: M, blocks of the longest sequence.
        """
        self._decoder = decoder
        self._kv_layers = kv_layers
        self._history = tokens.history
        self._shape = shape
        self._windows = frozenset(windows)
        self._packed = PackedRows(_fields(max_blocks), max_tokens, shape.device)
        self._token = torch.zeros(max_tokens, dtype=torch.int32, device=shape.device)
        self.forget()

    def forget(self) -> None:
        """Drop all rows, so that `run` computes padding alone, as a capture should."""
        self._packed.words.zero_()
        self._packed.column("top_p").fill_(1)
        self._packed.column("write_at").fill_(self._unread)

    def prepare(
        self,
        batch: Batch,
        rows: SamplingRows,
        slots: SlotState,
        sampling: SlotSampling,
        shape: GraphShape,
    ) -> None:
        """
        Send a batch with its padding to the device, by one copy and one kernel.

        Args:
            batch: A batch that fits into `shape`, already applied to `slots`.
            rows: Its rows that sample.
            slots: Slot state with the block tables.
            sampling: Sampling parameters of the slots.
            shape: Shape that `run` is called with next.
        """
        patch = self._packed.patch()
        columns = self._of_tokens(batch, slots), self._of_rows(rows, sampling)
        for found, count in zip(columns, (shape.num_tokens, shape.num_rows), strict=True):
            for name, column in found.items():
                padded = np.full(count, self._padding(name), column.dtype)
                padded[: len(column)] = column
                patch.set_rows(name, np.arange(count), padded)
        longest = int((batch.row_start + batch.row_num_tokens).max())
        table = slots.block_table[batch.row_slot, : -(-longest // self._shape.block_size)]
        patch.set_rows("block_table", np.arange(len(table)), table)
        patch_rows(self._packed.words, patch.packed())

    def run(self, shape: GraphShape) -> None:
        """
        Compute the prepared step from fixed buffers alone, without reading from the host.

        Args:
            shape: Numbers of tokens and rows, padding included.
        """
        tokens, rows = slice(shape.num_tokens), slice(shape.num_rows)
        column = self._packed.column
        history = self._history.view(-1)
        row_of_token = column("row")[tokens]
        table, seq_len = column("block_table")[row_of_token], column("seq_len")[tokens]
        inputs = DecoderInputs(
            token_id=history[column("read_at")[tokens]],
            position=column("position")[tokens],
            kv_position=column("kv_position")[tokens],
            attention={
                window: plan_resident_decodes(table, seq_len, self._shape, window=window)
                for window in self._windows
            },
        )
        hidden = self._decoder.forward(inputs, self._kv_layers)
        logits = self._decoder.project(hidden[column("hidden_row")[rows]])
        parameters = SamplingColumns(
            **{field.name: column(field.name)[rows] for field in SAMPLING_FIELDS},
            position=column("drawn_position")[rows],
        )
        token, valid = draw(logits, parameters, Needs(), shard=self._decoder.shard)
        history[column("write_at")[rows]] = token.to(torch.int32)
        self._token[rows].copy_(torch.where(valid, token, -1))

    def tokens(self, num_rows: int) -> Tensor:
        """
        Return the tokens of the rows that sampled in the last step, int32 ``[num_rows]``, -1 where
        logits were not valid; they are a copy, because the next step overwrites the buffer.
        """
        return self._token[:num_rows].clone()

    @property
    def _unread(self) -> int:
        """Index in the histories that is never read: the last place of the first history."""
        return self._history.shape[1] - 1

    def _padding(self, name: str) -> float:
        return self._unread if name == "write_at" else _OF_PADDING.get(name, 0)

    def _of_tokens(self, batch: Batch, slots: SlotState) -> _Columns:
        row, position = token_rows(batch)
        slot, block_size = batch.row_slot[row].astype(np.int64), self._shape.block_size
        block = slots.block_table[slot, position // block_size].astype(np.int64)
        return {
            "row": row,
            "read_at": slot * self._history.shape[1] + position,
            "position": position,
            "kv_position": block * block_size + position % block_size,
            "seq_len": (position + 1).astype(np.int32),
        }

    def _of_rows(self, rows: SamplingRows, sampling: SlotSampling) -> _Columns:
        position = rows.position.astype(np.int64)
        return {
            "hidden_row": rows.hidden_row,
            "write_at": rows.slot.astype(np.int64) * self._history.shape[1] + position,
            "drawn_position": position,
            **sampling.parameters(rows.slot),
        }


def _fields(max_blocks: int) -> list[RowField]:
    """Return the columns' fields: by token up to `seq_len`, by row after it."""
    return [
        RowField(name="row", dtype=torch.int64),
        RowField(name="read_at", dtype=torch.int64),
        RowField(name="position", dtype=torch.int64),
        RowField(name="kv_position", dtype=torch.int64),
        RowField(name="seq_len", dtype=torch.int32),
        RowField(name="block_table", dtype=torch.int32, width=max_blocks),
        RowField(name="hidden_row", dtype=torch.int64),
        RowField(name="write_at", dtype=torch.int64),
        RowField(name="drawn_position", dtype=torch.int64),
        *SAMPLING_FIELDS,
    ]
