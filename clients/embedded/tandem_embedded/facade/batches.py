"""Steps as batches of whole sequences, built from the deltas that the scheduler core plans."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from scheduler_svc.core.request.geometry import ExecutorGeometry
from tandem.link.batch import ROW_SAMPLES, Batch
from tandem.link.results import RowError, RowErrorKind, StepResult
from tandem.link.slots.slot_state import SlotState
from tandem.sampling_params import SamplingParams
from tandem_embedded.errors import ValidationError


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionBatch:
    """
    All data of one step for an executor, with one entry per sequence, decodes first.

    Attributes:
        seq_ids: Ids of the sequences.
        input_tokens: Tokens to compute, of all sequences one after another.
        positions: Position of each of these tokens in its sequence.
        seq_lens: Number of these tokens in each sequence.
        context_lens: Number of tokens of each sequence after the step.
        block_tables: Block table of each sequence; token i is in block i // block_size.
        is_prefill: True: the step computes the prompt, or recomputes lost KV; False: it decodes one
            token.
        samples: True: the step draws the token after the last one; False while more of a prompt is
            left.
        sampling: Sampling params of each sequence.
        copies: KV blocks to copy before anything is computed, as (source, destination).
        delta: The same step for the model runner; None for a batch made by hand.

    Raises:
        ValidationError: The lengths contradict each other.
    """

    seq_ids: list[int] = field(default_factory=list)
    input_tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    seq_lens: list[int] = field(default_factory=list)
    context_lens: list[int] = field(default_factory=list)
    block_tables: list[list[int]] = field(default_factory=list)
    is_prefill: list[bool] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)
    sampling: list[SamplingParams] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    delta: Batch | None = None

    def __post_init__(self) -> None:
        num_tokens, num_seqs = sum(self.seq_lens), len(self.seq_ids)
        wanted = {
            "input_tokens": num_tokens,
            "positions": num_tokens,
            **dict.fromkeys(
                ("seq_lens", "context_lens", "block_tables", "is_prefill", "samples", "sampling"),
                num_seqs,
            ),
        }
        for name, length in wanted.items():
            if len(getattr(self, name)) != length:
                message = f"{name} has {len(getattr(self, name))} entries, it must have {length}."
                raise ValidationError(message, reason="INVALID_PARAMETER", field=name)

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to compute; the batch may still release slots."""
        return not self.seq_ids

    @property
    def num_sequences(self) -> int:
        """Number of sequences with tokens to compute."""
        return len(self.seq_ids)

    @property
    def total_tokens(self) -> int:
        """Number of tokens to compute."""
        return len(self.input_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionOutput:
    """
    Output of a step.

    Attributes:
        seq_ids: Sequences of the batch, each once, in any order.
        next_tokens: Next token of each sequence; None if the batch did not ask for one.
        errors: Error texts of sequences that failed alone, which need not be in `seq_ids`.
    """

    seq_ids: list[int] = field(default_factory=list)
    next_tokens: list[int | None] = field(default_factory=list)
    errors: Mapping[int, str] = field(default_factory=dict)


class BatchReader:
    """
    Reader of deltas in step order, which tracks the executor's slots and their tokens.

    Args:
        geometry: Geometry of the executor that the deltas are for.
        name: Function that returns the sequence id of a slot and a generation.
    """

    def __init__(self, geometry: ExecutorGeometry, name: Callable[[int, int], int]) -> None:
        width = -(-geometry.max_model_len // geometry.block_size)
        self._slots = SlotState(geometry.num_slots, width, geometry.block_size, geometry.num_blocks)
        self._name = name
        self._tokens: dict[int, list[int]] = {}
        self._num_admitted: dict[int, int] = {}
        self._sampling: dict[int, SamplingParams] = {}

    @property
    def state_hash(self) -> int:
        """Hash of the slots after the last delta."""
        return self._slots.state_hash

    def reset(self) -> None:
        """Clear all slots."""
        self._slots.reset()

    def read(self, delta: Batch) -> ExecutionBatch:
        """Apply the next delta; `result` must have been called for all earlier ones."""
        self._slots.apply(delta)
        for admission in delta.admits:
            slot = admission.slot
            self._tokens[slot] = admission.token_ids.tolist()
            self._num_admitted[slot] = len(admission.token_ids)
            self._sampling[slot] = admission.sampling
        slots, starts = delta.row_slot.tolist(), delta.row_start.tolist()
        ends = (delta.row_start + delta.row_num_tokens).tolist()
        rows = list(zip(slots, starts, ends, strict=True))
        return ExecutionBatch(
            seq_ids=[self._seq_id(slot) for slot in slots],
            input_tokens=[
                token for slot, start, end in rows for token in self._tokens[slot][start:end]
            ],
            positions=[at for _, start, end in rows for at in range(start, end)],
            seq_lens=delta.row_num_tokens.tolist(),
            context_lens=ends,
            block_tables=[self._slots.blocks_of(slot).tolist() for slot in slots],
            is_prefill=[start < self._num_admitted[slot] for slot, start, _ in rows],
            samples=(delta.row_flags == ROW_SAMPLES).tolist(),
            sampling=[self._sampling[slot] for slot in slots],
            copies=list(
                zip(delta.copy_source.tolist(), delta.copy_destination.tolist(), strict=True)
            ),
            delta=delta,
        )

    def result(self, batch: ExecutionBatch, output: ExecutionOutput, step_id: int) -> StepResult:
        """Convert the output of the batch read last for the core; a missing token fails its row."""
        assert batch.delta is not None
        found = dict(zip(output.seq_ids, output.next_tokens, strict=True))
        rows, errors = [], []
        for row, slot in enumerate(batch.delta.row_slot.tolist()):
            seq_id = batch.seq_ids[row]
            generation = int(self._slots.generation[slot])
            token = found.get(seq_id)
            error = output.errors.get(seq_id)
            if error is None and batch.samples[row] and token is None:
                error = "the executor gave no token for it"
            if error is not None:
                kind = RowErrorKind.INVALID_LOGITS
                errors.append(RowError(slot=slot, generation=generation, kind=kind, message=error))
            elif batch.samples[row] and token is not None:
                self._tokens[slot].append(token)
                rows.append((slot, generation, batch.context_lens[row], token))
        columns = np.array(rows, np.int64).reshape(-1, 4)
        return StepResult(
            boot_id="embedded",
            step_id=step_id,
            slot=columns[:, 0].astype(np.int32),
            generation=columns[:, 1].astype(np.uint32),
            position=columns[:, 2].astype(np.int32),
            token=columns[:, 3].astype(np.int32),
            row_errors=tuple(errors),
        )

    def _seq_id(self, slot: int) -> int:
        return self._name(slot, int(self._slots.generation[slot]))
