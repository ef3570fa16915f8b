"""The scheduler core under Hetero-Paged-Infer's names, for callers that drive it directly."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from scheduler_svc.core.request.options import CoreOptions, OnPressure
from scheduler_svc.core.scheduler import Scheduler as Core
from tandem.engine_config import EngineConfig
from tandem_embedded.backend import geometry_of
from tandem_embedded.errors import SchedulerError, ValidationError, engine_errors
from tandem_embedded.facade.batches import BatchReader, ExecutionBatch, ExecutionOutput
from tandem_embedded.intake import Intake
from tandem_embedded.ledger import Ledger
from tandem_embedded.params import Vocabulary
from tandem_embedded.results import CompletedRequest, MemoryStats, Request, RequestState
from tandem_embedded.settings import checked_options


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequence:
    """
    A request with tokens in a step, as of the plan of that step.

    Attributes:
        seq_id: Id of the request.
        request: Snapshot of the request.
        logical_blocks: KV blocks of the request, in order.
        num_computed_tokens: Number of tokens that have KV already.
        num_generated_tokens: Number of output tokens so far.
    """

    seq_id: int
    request: Request
    logical_blocks: list[int]
    num_computed_tokens: int
    num_generated_tokens: int

    @property
    def context_len(self) -> int:
        """Number of tokens of prompt and output so far."""
        return len(self.request.input_tokens) + self.num_generated_tokens

    def get_block_table(self) -> list[int]:
        """Return the KV blocks of the request, in order."""
        return list(self.logical_blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOutput:
    """
    Plan of one step.

    Attributes:
        prefill_sequences: Sequences with a prompt, or a part of one, to compute.
        decode_sequences: Sequences that get their next token.
        batch: Batch of the step for an executor; it must be executed even if it is empty, since it
            may release slots of the executor.
    """

    prefill_sequences: list[Sequence] = field(default_factory=list)
    decode_sequences: list[Sequence] = field(default_factory=list)
    batch: ExecutionBatch = field(default_factory=ExecutionBatch)

    @property
    def total_tokens(self) -> int:
        """Number of tokens to compute."""
        return self.batch.total_tokens

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to compute."""
        return self.batch.is_empty

    @property
    def num_sequences(self) -> int:
        """Number of sequences with tokens to compute."""
        return self.batch.num_sequences


class SchedulerTrait(Protocol):
    """Interface of a scheduler, which plans each step."""

    def add_request(self, request: Request) -> int:
        """Add a request to the waiting queue, and return its id."""

    def schedule(self) -> SchedulerOutput:
        """Plan the next step; nothing is computed."""

    def update_sequences(self, outputs: ExecutionOutput) -> None:
        """Apply the output of the step planned last."""

    def get_completed(self) -> list[CompletedRequest]:
        """Return the requests that are over, each once."""

    def has_pending_work(self) -> bool:
        """Return True while a request is in the system."""


class Scheduler:
    """
    The scheduler core for callers that drive it directly, one step at a time; not thread-safe.

    Args:
        config: Limits.
        options: Scheduling options; the default is that of an engine.
        vocab_size: Size of the vocabulary; token ids are in [0, vocab_size). None if unknown.
        eos_token_ids: Ids that end a request.
        clock: Clock in monotonic seconds.

    Raises:
        ConfigError: A limit or an option is out of range.
    """

    def __init__(
        self,
        config: EngineConfig,
        options: CoreOptions | None = None,
        *,
        vocab_size: int | None = None,
        eos_token_ids: tuple[int, ...] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        options = CoreOptions(on_pressure=OnPressure.REFUSE) if options is None else options
        with engine_errors():
            config.validate()
            options = checked_options(options, window=1)
            self._core = Core(config, geometry_of(config), options)
        size = 2**31 - 1 if vocab_size is None else vocab_size
        vocabulary = Vocabulary(size=size, eos_token_ids=eos_token_ids)
        self._intake = Intake(None, vocabulary, config.max_model_len)
        self._reader = BatchReader(geometry_of(config), self._owner)
        self._ledger = Ledger(None)
        self._clock = clock
        self._due: ExecutionBatch | None = None
        """Batch that is planned and has no output yet."""
        self._num_steps = 0

    def add_request(self, request: Request) -> int:
        """
        Add a request of token ids to the waiting queue, and return its id, which must be new.

        Raises:
            ValidationError: The request is wrong, has several choices, or can never fit.
            EngineMemoryError: Too many blocks are in use.
            SchedulerError: max_num_seqs requests are in the system, or the id is in use.
        """
        if request.params.n != 1:
            message = "a request of this scheduler has one choice: n must be 1."
            raise ValidationError(message, reason="INVALID_PARAMETER", field="n")
        entry = self._intake.prepare(request.input_tokens, None, request.params, None)
        entry.request_id, entry.created_at = request.request_id, self._clock()
        with engine_errors():
            acceptance = self._core.submit(self._intake.new_request(entry), entry.created_at)
        entry.num_truncated = acceptance.num_truncated_tokens
        del entry.prompt[: entry.num_truncated]
        self._ledger.add(entry)
        return request.request_id

    def schedule(self) -> SchedulerOutput:
        """
        Plan the next step; nothing is computed.

        Raises:
            SchedulerError: `update_sequences` was not called with the output of the last step.
        """
        if self._due is not None:
            message = "execute the batch planned last and call update_sequences with its output"
            raise SchedulerError(message, reason="INTERNAL")
        delta = self._core.schedule(self._clock())
        self._ledger.settle(self._core, self._clock())
        if delta is None:
            return SchedulerOutput()
        self._due = batch = self._reader.read(delta)
        sequences = [
            self._sequence(batch, row, start) for row, start in enumerate(delta.row_start.tolist())
        ]
        parts = list(zip(sequences, batch.is_prefill, strict=True))
        return SchedulerOutput(
            prefill_sequences=[sequence for sequence, is_prefill in parts if is_prefill],
            decode_sequences=[sequence for sequence, is_prefill in parts if not is_prefill],
            batch=batch,
        )

    def update_sequences(self, outputs: ExecutionOutput) -> None:
        """
        Apply the output of the step planned last; a sequence that lacks its token fails alone.

        Raises:
            SchedulerError: The output has a sequence that had no part in the step.
        """
        batch = ExecutionBatch() if self._due is None else self._due
        if strangers := {*outputs.seq_ids, *outputs.errors} - {*batch.seq_ids}:
            message = f"sequences {sorted(strangers)} have no part in the step planned last"
            raise SchedulerError(message, reason="REQUEST_NOT_FOUND")
        if self._due is None:
            return
        self._num_steps += 1
        result = self._reader.result(batch, outputs, self._num_steps)
        self._due = None
        self._core.apply(result, self._clock())
        self._ledger.settle(self._core, self._clock())

    def get_completed(self) -> list[CompletedRequest]:
        """Return the requests that are over, each once."""
        return self._ledger.take()

    def has_pending_work(self) -> bool:
        """Return True while a request is in the system or a release is to be executed."""
        return self._core.has_pending_work()

    def reset(self) -> None:
        """Start over with an executor that has no state; requests are computed again."""
        self._due = None
        self._reader.reset()
        self._core.executor_lost(self._clock())

    def get_memory_stats(self) -> MemoryStats:
        """Return the numbers of KV blocks in use and free."""
        return MemoryStats.of(self._core.stats(), self._core.num_slots_in_use)

    def check_integrity(self) -> None:
        """
        Check every invariant of the core.

        Raises:
            ExecutionError: An invariant does not hold, which is a bug of ours.
        """
        with engine_errors():
            self._core.check_integrity()

    def _owner(self, slot: int, generation: int) -> int:
        owner = self._core.row_owner(slot, generation)
        assert owner is not None
        return owner

    def _sequence(self, batch: ExecutionBatch, row: int, num_computed: int) -> Sequence:
        entry = self._ledger.entries[batch.seq_ids[row]]
        outputs = list(entry.choices[0].tokens)
        is_prefill = batch.is_prefill[row]
        return Sequence(
            seq_id=entry.request_id,
            request=Request(
                request_id=entry.request_id,
                input_tokens=list(entry.prompt),
                output_tokens=outputs,
                params=entry.params,
                state=RequestState.PREFILL if is_prefill else RequestState.DECODE,
                created_at=entry.created_at,
            ),
            logical_blocks=batch.block_tables[row],
            num_computed_tokens=num_computed,
            num_generated_tokens=len(outputs),
        )
