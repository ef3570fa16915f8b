"""
An executor without a model: checks the owner of each KV position it reads or writes, and draws
tokens that are a pure function of the prefix.
"""

from __future__ import annotations

import numpy as np

from scheduler_svc.core.request.geometry import ExecutorGeometry
from tandem.link.batch import ROW_SAMPLES, Batch
from tandem.link.commands import KvMode, Resume, Suspend
from tandem.link.logprobs import LogprobColumns, PromptLogprobColumns
from tandem.link.results import RowError, RowErrorKind, StepResult
from tandem.link.slots.slot_state import SlotState
from tests.scheduler_svc.core.kv_memory import KvMemory, Writer, fold, move_blocks


def next_token(fingerprint: int, vocab_size: int, choice: int = 0) -> int:
    """Return the token that follows a prefix; every choice draws others."""
    if choice:
        fingerprint = fold(fingerprint, choice)
    return (fingerprint >> 24) % vocab_size


def expected_outputs(
    prompt, max_tokens: int, ends=frozenset(), vocab_size: int = 50, choice: int = 0
) -> list[int]:
    """Return the outputs of a request with unlimited memory."""
    fingerprint = 0
    for token in prompt:
        fingerprint = fold(fingerprint, int(token))
    outputs: list[int] = []
    while len(outputs) < max_tokens:
        outputs.append(next_token(fingerprint, vocab_size, choice))
        if outputs[-1] in ends:
            break
        fingerprint = fold(fingerprint, outputs[-1])
    return outputs


def made_up_logprobs(
    position: int, token: int, num_top: int
) -> tuple[float, list[tuple[int, float]]]:
    """Return made-up values for a token: its log probability, and ids with theirs."""
    top = [(int(token) + place, -float(position + place)) for place in range(num_top)]
    return -float(64 * position + token), top


def made_up_score(
    position: int, token: int, num_top: int
) -> tuple[int, float, list[tuple[int, float]]]:
    """Return made-up values for a prompt token: its rank, and as `made_up_logprobs`."""
    return 1 + position % 3, *made_up_logprobs(position, token, num_top)


class FakeExecutor:
    """
    Executor that applies batches in order to a `KvMemory`, which knows each position's writer.

    All rows of a batch read before any writes, as on a device: what one row computes in a batch
    another can read only in the next. A row that reads what was computed with NaN has NaN too.
    """

    def __init__(self, geometry: ExecutorGeometry, vocab_size: int = 50) -> None:
        self.geometry = geometry
        self.vocab_size = vocab_size
        self.boot_id = "boot"
        bs = geometry.block_size
        width = -(-geometry.max_model_len // bs)
        self.slots = SlotState(
            geometry.num_slots, width, bs, geometry.num_blocks, geometry.num_host_blocks
        )
        self.memory = KvMemory(geometry.num_blocks, bs)
        self.host = KvMemory(geometry.num_host_blocks, bs)
        self.holders: dict[int, Writer] = {}
        """Request in each slot, as a writer of KV."""
        self.choice: dict[int, int] = {}
        self.prompts: dict[int, tuple[int | None, list[int]]] = {}
        """Number of ids that are asked for with each prompt token, and the prompt, by slot."""
        self.num_top: dict[int, int | None] = {}
        """Number of likeliest ids that each slot's request asks for, None for nothing."""
        self.admitted_len: dict[int, int] = {}
        self.cached_len: dict[int, int] = {}
        self.poisoned: set[tuple[int, int]] = set()
        """(slot, generation) of rows with NaN logits."""
        self.num_steps = 0
        self.is_suspended = False

    def execute(self, batch: Batch, state_hash: int | None = None, salts=None) -> StepResult:
        """
        Run one batch; fails where the batch breaks a rule of the link or reads another's KV.

        `salts` says, by slot, under which salt the requests admitted by this batch may share.
        """
        assert not self.is_suspended, "a batch during a suspension"
        self._check_limits(batch)
        self.slots.apply(batch)
        assert state_hash in {None, self.slots.state_hash}
        move_blocks(self.memory, self.host, batch)
        for admission in batch.admits:
            self._admit(admission, b"" if salts is None else salts[admission.slot])
        self._take_fresh(batch.append_block)
        self.num_steps += 1
        rows, errors = [], []
        columns = list(
            zip(
                batch.row_slot.tolist(),
                batch.row_start.tolist(),
                batch.row_num_tokens.tolist(),
                batch.row_flags.tolist(),
                strict=True,
            )
        )
        bad = {slot for slot, start, _, _ in columns if not self._reads_well(slot, start)}
        for slot, start, length, flags in columns:
            self._write(slot, start, length, is_bad=slot in bad)
            samples = flags == ROW_SAMPLES
            token = self._sample(slot) if samples and slot not in bad else 0
            generation = int(self.slots.generation[slot])
            if slot in bad:
                errors.append(RowError(slot=slot, generation=generation,
                                       kind=RowErrorKind.INVALID_LOGITS, message="NaN"))  # fmt: skip
            elif samples:
                rows.append((slot, generation, start + length, token))
            if samples:
                prefixes = self.holders[slot].prefixes
                prefixes.append(fold(prefixes[-1], token))
        scored = [row[:3] for row in columns if row[0] not in bad]
        return self._result(rows, errors, scored)

    def obey(self, command: Suspend | Resume) -> StepResult:
        """Suspend or resume; under RECOMPUTE all KV on the device is gone."""
        self.num_steps += 1
        assert self.is_suspended == isinstance(command, Resume), "suspends or resumes twice"
        self.is_suspended = isinstance(command, Suspend)
        if isinstance(command, Suspend) and command.kv_mode is KvMode.RECOMPUTE:
            assert not self.slots.live.any(), "drops KV that slots hold"
            self.memory.forget(slice(None))
        return self._result([], [])

    def _admit(self, admission, salt: bytes) -> None:
        slot, bs = admission.slot, self.geometry.block_size
        prefixes, fingerprint = [], 0
        for token in admission.token_ids.tolist():
            fingerprint = fold(fingerprint, token)
            prefixes.append(fingerprint)
        self.holders[slot] = Writer(slot << 32 | admission.generation, salt, prefixes)
        self.choice[slot] = admission.sampling.choice
        self.num_top[slot] = admission.sampling.logprobs
        prompt = admission.token_ids[: admission.num_prompt_tokens].tolist()
        self.prompts[slot] = admission.sampling.prompt_logprobs, prompt
        self.admitted_len[slot] = len(prefixes)
        self.cached_len[slot] = cached = admission.num_cached_tokens
        num_whole, in_partial = divmod(cached, bs)
        self._take_fresh(admission.block_ids[num_whole + (in_partial > 0) :])
        if in_partial:
            self._take_fresh(admission.block_ids[num_whole : num_whole + 1], in_partial)

    def _take_fresh(self, blocks, first_offset: int = 0) -> None:
        """Check that blocks for a slot to write have no other holder, and forget their old KV."""
        assert (self.slots.num_holders[blocks] == 1).all(), "a block to write has two holders"
        self.memory.forget(blocks, first_offset)

    def _reads_well(self, slot: int, start: int) -> bool:
        reader, cached = self.holders[slot], self.cached_len[slot]
        is_sound = self.memory.read(self.slots.blocks_of(slot), reader, start, cached)
        return is_sound and (slot, int(self.slots.generation[slot])) not in self.poisoned

    def _write(self, slot: int, start: int, length: int, *, is_bad: bool) -> None:
        table, bs = self.slots.blocks_of(slot), self.geometry.block_size
        written = table[start // bs : (start + length - 1) // bs + 1]
        assert (self.slots.num_holders[written] == 1).all(), "writes into a shared block"
        self.memory.write(table, self.holders[slot], start, length, is_bad=is_bad)

    def _sample(self, slot: int) -> int:
        return next_token(self.holders[slot].prefixes[-1], self.vocab_size, self.choice[slot])

    def _check_limits(self, batch: Batch) -> None:
        assert len(batch.row_slot) <= self.geometry.max_batch_size, "more rows than max_batch_size"
        assert batch.num_tokens <= self.geometry.max_total_tokens, "over max_total_tokens"
        admitted = {admission.slot: len(admission.token_ids) for admission in batch.admits}
        is_prefill = [
            start < admitted.get(slot, self.admitted_len.get(slot, 0))
            for slot, start in zip(batch.row_slot.tolist(), batch.row_start.tolist(), strict=True)
        ]
        assert is_prefill == sorted(is_prefill), "a prefill stands before a decode"

    def _result(self, rows, errors, computed=()) -> StepResult:
        columns = np.array(rows, np.int64).reshape(-1, 4)
        return StepResult(
            boot_id=self.boot_id,
            step_id=self.num_steps,
            slot=columns[:, 0].astype(np.int32),
            generation=columns[:, 1].astype(np.uint32),
            position=columns[:, 2].astype(np.int32),
            token=columns[:, 3].astype(np.int32),
            row_errors=tuple(errors),
            logprobs=self._logprobs(columns) if columns.size else None,
            prompt_logprobs=self._prompt_logprobs(computed),
        )

    def _prompt_logprobs(self, computed) -> PromptLogprobColumns | None:
        """Return made-up log probabilities of the prompt tokens that these rows predict."""
        told = []
        for slot, start, length in computed:
            num_top, prompt = self.prompts[slot]
            if num_top is not None:
                ends = min(start + length + 1, len(prompt))
                told += [
                    (slot, at, *made_up_score(at, prompt[at], num_top))
                    for at in range(start + 1, ends)
                ]
        if not told:
            return None
        tops = [top for *_, top in told]
        slots = np.array([one[0] for one in told], np.int32)
        return PromptLogprobColumns(
            slot=slots,
            generation=self.slots.generation[slots],
            position=np.array([one[1] for one in told], np.int32),
            rank=np.array([one[2] for one in told], np.int32),
            columns=LogprobColumns(
                row=np.arange(len(told), dtype=np.int32),
                chosen=np.array([one[3] for one in told], np.float32),
                top_start=np.cumsum([0, *map(len, tops)]).astype(np.int32),
                top_token=np.array([token for top in tops for token, _ in top], np.int32),
                top=np.array([value for top in tops for _, value in top], np.float32),
            ),
        )

    def _logprobs(self, columns: np.ndarray) -> LogprobColumns | None:
        """Return log probabilities for the rows that asked, made up so that they show their row."""
        asked = [row for row, slot in enumerate(columns[:, 0]) if self.num_top[slot] is not None]
        if not asked:
            return None
        told = [made_up_logprobs(*columns[row, 2:], self.num_top[columns[row, 0]]) for row in asked]
        tops = [top for _, top in told]
        return LogprobColumns(
            row=np.array(asked, np.int32),
            chosen=np.array([chosen for chosen, _ in told], np.float32),
            top_start=np.cumsum([0, *map(len, tops)]).astype(np.int32),
            top_token=np.array([token for top in tops for token, _ in top], np.int32),
            top=np.array([value for top in tops for _, value in top], np.float32),
        )
