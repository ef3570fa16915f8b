"""Executors: our model runner as a `GPUExecutorTrait`, and any `GPUExecutorTrait` as a backend."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, runtime_checkable

from tandem.engine_config import EngineConfig
from tandem.link.batch import Batch
from tandem.link.commands import KvMode
from tandem.link.results import StepResult
from tandem_embedded.backend import Backend, geometry_of
from tandem_embedded.errors import (
    ConfigError,
    EngineError,
    ExecutionError,
    ValidationError,
    engine_errors,
)
from tandem_embedded.facade.batches import BatchReader, ExecutionBatch, ExecutionOutput
from tandem_embedded.loading.runners import RunnerSettings, load_backends
from tandem_embedded.observe.logs import quiet_unless_configured
from tandem_embedded.parallel.devices import on_device
from tandem_embedded.settings import check_config, model_directory


class GPUExecutorTrait(Protocol):
    """Interface of an executor that computes batches in order and keeps KV blocks between them."""

    def execute(self, batch: ExecutionBatch) -> ExecutionOutput:
        """Compute one step and draw the next tokens."""

    def capture_decode_graph(self, batch_size: int) -> None:
        """Prepare steps in which so many sequences decode."""

    def execute_graph(self, batch: ExecutionBatch) -> ExecutionOutput:
        """Compute one step by a captured graph; raise ExecutionError if none fits."""


@runtime_checkable
class _CapturingRunner(Protocol):
    def capture_decode_graph(self, batch_size: int) -> None: ...

    def has_decode_graph(self, batch: Batch) -> bool: ...

    def execute(self, batch: Batch, step_id: int) -> StepResult: ...


class ModelExecutor:
    """
    The model runner of an embedded engine, driven by batches of `Scheduler.schedule`.

    Attributes:
        config: Limits in force.
        backend: Runner and its limits.
    """

    def __init__(self, config: EngineConfig, backend: Backend) -> None:
        """Wrap a backend that exists already; `ModelExecutor.load` creates one."""
        self.config = config
        self.backend = backend
        self._num_steps = 0

    @classmethod
    def load(
        cls,
        config: EngineConfig | None = None,
        model_dir: Path | str | None = None,
        *,
        dtype: str = "auto",
        device: str = "cpu",
    ) -> ModelExecutor:
        """
        Load a model, the bundled one if none is given, and allocate its KV blocks.

        Raises:
            ConfigError or EngineMemoryError: As `InferenceEngine`.
        """
        quiet_unless_configured()
        with engine_errors():
            check_config(config)
            settings = RunnerSettings(dtype=dtype, device=device)
            config, (backend,) = load_backends(config, model_directory(model_dir), settings)
        return cls(config, backend)

    def execute(self, batch: ExecutionBatch) -> ExecutionOutput:
        """
        Compute one step.

        Raises:
            ValidationError: The batch was not planned by a `Scheduler`.
            EngineMemoryError or ExecutionError: The step failed; `Scheduler.reset` starts over.
        """
        delta = self._delta(batch)
        with engine_errors(), on_device(self.backend.device):
            return self._output(batch, self.backend.runner.execute(delta, self._num_steps))

    def capture_decode_graph(self, batch_size: int) -> None:
        """
        Capture steps in which so many sequences decode.

        Raises:
            ConfigError: The device has no graphs, or no step has so many sequences.
        """
        runner = self._capturing_runner()
        with engine_errors(), on_device(self.backend.device):
            runner.capture_decode_graph(batch_size)

    def execute_graph(self, batch: ExecutionBatch) -> ExecutionOutput:
        """
        Compute one step by a captured graph.

        Raises:
            ConfigError: The backend captures no graphs.
            ExecutionError: No captured graph can run the batch; nothing has changed.
        """
        runner = self._capturing_runner()
        delta = self._delta(batch)
        if not runner.has_decode_graph(delta):
            raise ExecutionError(
                "No CUDA graph captured", reason="INVALID_PARAMETER", field="batch"
            )
        with engine_errors(), on_device(self.backend.device):
            return self._output(batch, runner.execute(delta, self._num_steps))

    def _capturing_runner(self) -> _CapturingRunner:
        runner = self.backend.runner
        if not isinstance(runner, _CapturingRunner):
            raise ConfigError(
                f"{type(runner).__name__} captures no graphs: call execute instead",
                reason="INVALID_CONFIG",
            )
        return runner

    def reset(self) -> None:
        """Clear all sequences after a step that failed; call `Scheduler.reset` as well."""
        with on_device(self.backend.device):
            self.backend.runner.reset()

    def _delta(self, batch: ExecutionBatch) -> Batch:
        if batch.delta is None and not batch.is_empty:
            message = "this executor computes what Scheduler.schedule() planned, and nothing else."
            raise ValidationError(message, reason="INVALID_PARAMETER", field="batch")
        self._num_steps += 1
        return Batch() if batch.delta is None else batch.delta

    def _output(self, batch: ExecutionBatch, result: StepResult) -> ExecutionOutput:
        slots = [] if batch.delta is None else batch.delta.row_slot.tolist()
        seq_id_of = dict(zip(slots, batch.seq_ids, strict=True))
        tokens = dict(zip(result.slot.tolist(), result.token.tolist(), strict=True))
        return ExecutionOutput(
            seq_ids=list(batch.seq_ids),
            next_tokens=[tokens.get(slot) for slot in slots],
            errors={seq_id_of[error.slot]: error.message for error in result.row_errors},
        )


def executor_backend(
    executor: GPUExecutorTrait,
    config: EngineConfig,
    *,
    vocab_size: int,
    eos_token_ids: tuple[int, ...] = (),
) -> Backend:
    """
    Let an `InferenceEngine` run on an executor: `InferenceEngine(config, backend=...)`.

    Args:
        executor: Executor of each step; it is never asked for two steps at once.
        config: Limits, the same as those of the engine.
        vocab_size: Size of the vocabulary; token ids are in [0, vocab_size).
        eos_token_ids: Ids that end a sequence.
    """
    return Backend(
        runner=_TraitRunner(executor, config),
        num_slots=config.max_batch_size,
        max_positions=config.max_model_len,
        vocab_size=vocab_size,
        eos_token_ids=eos_token_ids,
    )


class _TraitRunner:
    """Adapter that makes a runner, which takes deltas, of an executor of whole sequences."""

    def __init__(self, executor: GPUExecutorTrait, config: EngineConfig) -> None:
        self._executor = executor
        self._reader = BatchReader(
            geometry_of(config), lambda slot, generation: generation << 32 | slot
        )

    @property
    def state_hash(self) -> int:
        return self._reader.state_hash

    def execute(self, batch: Batch, step_id: int) -> StepResult:
        whole = self._reader.read(batch)
        try:
            output = ExecutionOutput() if whole.is_empty else self._executor.execute(whole)
        except EngineError as error:  # the driver retries the step after a RuntimeError
            raise RuntimeError(error.message) from error
        return self._reader.result(whole, output, step_id)

    def reset(self) -> None:
        self._reader.reset()

    def suspend(self, mode: KvMode) -> None:
        """Do nothing: the executor keeps its memory."""

    def resume(self) -> None:
        """Do nothing: no memory was released."""
