"""
An executor without a model: checks who owns each KV position it reads or writes, and draws tokens
that are a pure function of the prefix.
"""

from __future__ import annotations

import numpy as np

from scheduler_svc.core.geometry import ExecutorGeometry
from tandem.link.batch import ROW_SAMPLES, Batch, RowError, RowErrorKind, StepResult
from tandem.link.slot_state import SlotState

_PRIME = 0x100000001B3
_WORD = (1 << 64) - 1


def fold(fingerprint: int, token: int) -> int:
    """Fingerprint of a prefix with one more token."""
    return ((fingerprint ^ (token + 1)) * _PRIME + 0x9E3779B97F4A7C15) & _WORD


def next_token(fingerprint: int, vocab_size: int) -> int:
    """The token that follows a prefix."""
    return (fingerprint >> 24) % vocab_size


def expected_outputs(prompt, max_tokens: int, ends=frozenset(), vocab_size: int = 50) -> list[int]:
    """What a request produces with unlimited memory."""
    fingerprint = 0
    for token in prompt:
        fingerprint = fold(fingerprint, int(token))
    outputs: list[int] = []
    while len(outputs) < max_tokens:
        outputs.append(next_token(fingerprint, vocab_size))
        if outputs[-1] in ends:
            break
        fingerprint = fold(fingerprint, outputs[-1])
    return outputs


class FakeExecutor:
    """
    Applies batches in order to KV memory that remembers, per position, who wrote it and what.

    Each position's "KV" is the fingerprint of the prefix up to it, so a wrong or stale read changes
    tokens; ownership is checked besides, so that it fails where it happens.
    """

    def __init__(self, geometry: ExecutorGeometry, vocab_size: int = 50) -> None:
        self.geometry = geometry
        self.vocab_size = vocab_size
        self.boot_id = "boot"
        bs = geometry.block_size
        self.slots = SlotState(
            geometry.num_slots, -(-geometry.max_model_len // bs), bs, geometry.num_blocks
        )
        shape = (geometry.num_blocks + 1, bs)
        self.owner = np.full(shape, -1, np.int64)
        self.position = np.full(shape, -1, np.int64)
        self.fingerprint = np.zeros(shape, np.uint64)
        self.tokens: dict[int, list[int]] = {}
        self.admitted_len: dict[int, int] = {}
        self.poisoned: set[tuple[int, int]] = set()
        """(slot, generation) of rows whose logits are NaN."""
        self.num_steps = 0

    def execute(self, batch: Batch, state_hash: int | None = None) -> StepResult:
        """Run one batch; fails where the batch breaks a rule of the link or reads another's KV."""
        self._check_limits(batch)
        self.slots.apply(batch)
        assert state_hash in {None, self.slots.state_hash}
        assert self.slots.num_holders.max() <= 1, "a block has two holders"
        for admission in batch.admits:
            self.tokens[admission.slot] = admission.token_ids.tolist()
            self.admitted_len[admission.slot] = len(admission.token_ids)
        self.num_steps += 1
        rows, errors = [], []
        for slot, length, start, flags in zip(
            batch.row_slot.tolist(),
            batch.row_num_tokens.tolist(),
            batch.row_start.tolist(),
            batch.row_flags.tolist(),
            strict=True,
        ):
            generation = int(self.slots.generation[slot])
            fingerprint = self._compute(slot, generation, start, length)
            if (slot, generation) in self.poisoned:
                errors.append(RowError(slot=slot, generation=generation,
                                       kind=RowErrorKind.INVALID_LOGITS, message="NaN"))  # fmt: skip
                if flags == ROW_SAMPLES:
                    self.tokens[slot].append(0)
            elif flags == ROW_SAMPLES:
                token = next_token(fingerprint, self.vocab_size)
                self.tokens[slot].append(token)
                rows.append((slot, generation, start + length, token))
        return self._result(rows, errors)

    def _compute(self, slot: int, generation: int, start: int, length: int) -> int:
        bs, key = self.geometry.block_size, slot << 32 | generation
        table = self.slots.blocks_of(slot)
        context = np.arange(start)
        blocks, offsets = table[context // bs], context % bs
        assert (self.owner[blocks, offsets] == key).all(), "reads KV of another request"
        assert (self.position[blocks, offsets] == context).all(), "reads KV of another position"
        fingerprint = 0
        if start:
            fingerprint = int(self.fingerprint[table[(start - 1) // bs], (start - 1) % bs])
        for position in range(start, start + length):
            fingerprint = fold(fingerprint, self.tokens[slot][position])
            block, offset = table[position // bs], position % bs
            self.owner[block, offset] = key
            self.position[block, offset] = position
            self.fingerprint[block, offset] = fingerprint
        return fingerprint

    def _check_limits(self, batch: Batch) -> None:
        assert len(batch.row_slot) <= self.geometry.max_batch_size, "more rows than max_batch_size"
        assert batch.num_tokens <= self.geometry.max_total_tokens, "over max_total_tokens"
        admitted = {admission.slot: len(admission.token_ids) for admission in batch.admits}
        is_prefill = [
            start < admitted.get(slot, self.admitted_len.get(slot, 0))
            for slot, start in zip(batch.row_slot.tolist(), batch.row_start.tolist(), strict=True)
        ]
        assert is_prefill == sorted(is_prefill), "a prefill stands before a decode"

    def _result(self, rows, errors) -> StepResult:
        columns = np.array(rows, np.int64).reshape(-1, 4)
        return StepResult(
            boot_id=self.boot_id,
            step_id=self.num_steps,
            slot=columns[:, 0].astype(np.int32),
            generation=columns[:, 1].astype(np.uint32),
            position=columns[:, 2].astype(np.int32),
            token=columns[:, 3].astype(np.int32),
            row_errors=tuple(errors),
        )
