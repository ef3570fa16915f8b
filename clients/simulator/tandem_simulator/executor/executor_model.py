"""
Executor without a model: KV memory that holds fingerprints of prefixes, and tokens drawn from it.

The KV of a position is the fingerprint of all tokens up to it. A row reads the fingerprint before
its first position through its block table and writes those of the positions that it computes. So a
wrong, stale or too early read gives other tokens, as on a real executor.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.request.geometry import ExecutorGeometry
from tandem.link.batch import ROW_SAMPLES, Admission, Batch, Int32Column
from tandem.link.results import StepResult
from tandem_simulator.executor.model_tokens import (
    UInt64Column,
    choice_term,
    end_position,
    next_tokens,
    powers_of_base,
    token_terms,
)

_UNWRITTEN = np.uint64(0x5A5A5A5A5A5A5A5A)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelledWork:
    """Work of one step; see `step_time` for the time that each number costs."""

    num_rows: int
    num_decodes: int
    tokens: int
    context: int
    pairs: int
    copied_blocks: int
    swapped_out_blocks: int
    swapped_in_blocks: int

    @property
    def swapped_blocks(self) -> int:
        """Blocks moved in either direction."""
        return self.swapped_out_blocks + self.swapped_in_blocks


class ExecutorModel:
    """
    Executor that applies batches in order.

    Attributes:
        geometry: Capacity of the executor.
        kv: Fingerprints, shape ``[num_blocks + 1, block_size]``; block 0 belongs to no sequence.
        block_table: Block ids, shape ``[slots, blocks per sequence]``.
        planned: Positions computed per slot.
    """

    def __init__(self, geometry: ExecutorGeometry) -> None:
        slots, size = geometry.num_slots, geometry.block_size
        width = -(-geometry.max_model_len // size)
        self.geometry = geometry
        self.kv: NDArray[np.uint64] = np.full((geometry.num_blocks + 1, size), _UNWRITTEN)
        self.host_kv: NDArray[np.uint64] = np.full((geometry.num_host_blocks + 1, size), _UNWRITTEN)
        self.block_table: Int32Column = np.zeros((slots, width), np.int32)
        self.planned: Int32Column = np.zeros(slots, np.int32)
        self._flat_kv = self.kv.reshape(-1)
        self._flat_table = self.block_table.reshape(-1)
        self._weights = powers_of_base(geometry.max_model_len + 1)
        self._num_blocks: Int32Column = np.zeros(slots, np.int32)
        self._generation = np.zeros(slots, np.uint32)
        self._choice_term: UInt64Column = np.zeros(slots, np.uint64)
        self._last_place: NDArray[np.int64] = np.zeros(slots, np.int64)
        """Index into the flattened `kv` of each slot's last computed position."""
        self._end_position: Int32Column = np.zeros(slots, np.int32)
        self._last_token: Int32Column = np.zeros(slots, np.int32)
        self._admitted_len: Int32Column = np.zeros(slots, np.int32)
        self._admitted: list[Int32Column] = [np.empty(0, np.int32)] * slots
        self._num_steps = 0

    def execute(self, batch: Batch) -> tuple[StepResult, ModelledWork]:
        """Run one batch; return its result and the work it took."""
        self._move(batch)
        for admission in batch.admits:
            self._admit(admission)
        if len(batch.append_slot):
            index = self._num_blocks[batch.append_slot]
            self.block_table[batch.append_slot, index] = batch.append_block
            self._num_blocks[batch.append_slot] = index + 1
        self._num_steps += 1
        slot, start = batch.row_slot, batch.row_start
        is_prefill = start < self._admitted_len.take(slot)
        end = start + batch.row_num_tokens
        # Every row reads the KV as it was before the step.
        before = self._flat_kv.take(self._last_place.take(slot))
        before[start == 0] = 0
        prefills = is_prefill.nonzero()[0]
        if len(prefills):
            decodes = (~is_prefill).nonzero()[0]
            fingerprints: UInt64Column = np.empty(len(slot), np.uint64)
            fingerprints[decodes] = self._decode(slot[decodes], start[decodes], before[decodes])
            for row in prefills.tolist():
                fingerprints[row] = self._compute_chunk(
                    int(slot[row]), int(start[row]), int(end[row]), before[row]
                )
        else:
            fingerprints = self._decode(slot, start, before)
        self.planned[slot] = end
        return self._sample(batch, end, fingerprints), _work_of(batch, end, len(prefills))

    def places(self, slots: Int32Column, positions: Int32Column) -> NDArray[np.int64]:
        """Return the indices of these positions into the flattened `kv`; all shape ``[N]``."""
        size = self.geometry.block_size
        index, offset = np.divmod(positions, size)
        index += slots * np.int32(self.block_table.shape[1])
        places: NDArray[np.int64] = self._flat_table.take(index).astype(np.int64)
        places *= size
        places += offset
        return places

    def _move(self, batch: Batch) -> None:
        if len(batch.swap_out_block):
            self.host_kv[batch.swap_out_host] = self.kv[batch.swap_out_block]
        if len(batch.copy_source):
            self.kv[batch.copy_destination] = self.kv[batch.copy_source]
        if len(batch.swap_in_host):
            self.kv[batch.swap_in_block] = self.host_kv[batch.swap_in_host]

    def _admit(self, admission: Admission) -> None:
        slot, tokens = admission.slot, admission.token_ids
        num_blocks = len(admission.block_ids)
        self.block_table[slot, :num_blocks] = admission.block_ids
        self._num_blocks[slot] = num_blocks
        self.planned[slot] = admission.num_cached_tokens
        self._generation[slot] = admission.generation
        self._choice_term[slot] = choice_term(admission.sampling.choice)
        if admission.num_cached_tokens:
            block, offset = divmod(admission.num_cached_tokens - 1, self.geometry.block_size)
            place = int(admission.block_ids[block]) * self.geometry.block_size + offset
            self._last_place[slot] = place
        seed = admission.sampling.seed
        self._end_position[slot] = end_position(admission.num_prompt_tokens, seed)
        self._admitted[slot] = tokens
        self._admitted_len[slot] = len(tokens)

    def _decode(self, slot: Int32Column, start: Int32Column, before: UInt64Column) -> UInt64Column:
        """Compute one position of each slot; return the fingerprints, all shape ``[N]``."""
        fingerprints = token_terms(self._last_token.take(slot), self._weights.take(start))
        fingerprints += before
        size = self.geometry.block_size
        place = self._last_place.take(slot)
        place += 1
        index, offset = np.divmod(start, size)
        fresh = (offset == 0).nonzero()[0]
        if len(fresh):
            place[fresh] = self.block_table[slot[fresh], index[fresh]].astype(np.int64) * size
        self._flat_kv[place] = fingerprints
        self._last_place[slot] = place
        return fingerprints

    def _compute_chunk(self, slot: int, start: int, end: int, before: np.uint64) -> np.uint64:
        positions = np.arange(start, end, dtype=np.int32)
        terms = token_terms(self._admitted[slot][start:end], self._weights[start:end])
        fingerprints = np.cumsum(terms, dtype=np.uint64) + before
        places = self.places(np.full(end - start, slot, np.int32), positions)
        self._flat_kv[places] = fingerprints
        self._last_place[slot] = places[-1]
        last: np.uint64 = fingerprints[-1]
        return last

    def _sample(self, batch: Batch, end: Int32Column, fingerprints: UInt64Column) -> StepResult:
        slot, position = batch.row_slot, end
        samples = batch.row_flags == ROW_SAMPLES
        if not samples.all():
            slot, position, fingerprints = slot[samples], position[samples], fingerprints[samples]
        token = next_tokens(
            fingerprints, self._choice_term.take(slot), position, self._end_position.take(slot)
        )
        self._last_token[slot] = token
        return StepResult(
            boot_id="model",
            step_id=self._num_steps,
            slot=slot,
            generation=self._generation.take(slot),
            position=position,
            token=token,
        )


def _work_of(batch: Batch, end: Int32Column, num_prefills: int) -> ModelledWork:
    num_rows = len(end)
    context = int(end.sum(dtype=np.int64))
    tokens, pairs = num_rows, context
    if num_prefills:
        num_tokens = batch.row_num_tokens.astype(np.int64)
        tokens = int(num_tokens.sum())
        pairs = int((batch.row_start * num_tokens + num_tokens * (num_tokens + 1) // 2).sum())
    return ModelledWork(
        num_rows=num_rows,
        num_decodes=num_rows - num_prefills,
        tokens=tokens,
        context=context,
        pairs=pairs,
        copied_blocks=len(batch.copy_source),
        swapped_out_blocks=len(batch.swap_out_block),
        swapped_in_blocks=len(batch.swap_in_host),
    )
