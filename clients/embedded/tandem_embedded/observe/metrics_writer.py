"""
Numbers of every N-th step for a metrics writer: Weights & Biases, or TensorBoard.

Keys are those of Megatron Core's dynamic engine, so that its plots can show these numbers.
"""

from __future__ import annotations

from typing import Any

import structlog

from scheduler_svc.core.scheduler import Scheduler
from tandem.engine_config import EngineConfig
from tandem.errors import InvalidConfig
from tandem.link.results import StepResult

PREFIX = "inference/"
STEP = f"{PREFIX}inference_step"
"""Key of the step number, which is the x-axis of all others."""
PERCENT = 100.0

_log: structlog.stdlib.BoundLogger = structlog.get_logger()


class StepMetrics:
    """
    Counter of steps that writes the numbers of every N-th one. Owned by the thread that drives.

    With Weights & Biases the number of a resumed run's last step is where counting goes on. A
    writer that fails is logged and not called again: serving does not depend on it.
    """

    def __init__(self, writer: object, interval: int) -> None:
        """
        Args:
            writer: The module `wandb`, one of its runs, a `SummaryWriter` of TensorBoard, or None.
            interval: Steps from one writing to the next; 0 for none.

        Raises:
            InvalidConfig: The writer is of no type that is known or refuses the first calls, or the
                interval is negative or no whole number.
        """
        if not isinstance(interval, int) or interval < 0:
            raise InvalidConfig(
                f"logging_step_interval must be a whole number of at least 0, got {interval!r}",
                field="logging_step_interval",
            )
        self._writer: Any = writer if interval else None
        self._is_tensorboard = callable(getattr(writer, "add_scalar", None))
        is_wandb = all(callable(getattr(writer, name, None)) for name in ("log", "define_metric"))
        if writer is not None and not (is_wandb or self._is_tensorboard):
            raise InvalidConfig(
                f"Unsupported metrics writer type: {type(writer).__name__}; give the module wandb, "
                "one of its runs, or TensorBoard's SummaryWriter",
                field="metrics_writer",
            )
        self._interval = interval
        self._num_steps = 0
        if self._writer is not None and not self._is_tensorboard:
            self._num_steps = _begin_wandb(self._writer)

    def note(
        self, result: StepResult, core: Scheduler, config: EngineConfig
    ) -> dict[str, float] | None:
        """
        Count a step whose result was applied.

        Args:
            result: The step's result.
            core: The core, whose lock is held.
            config: Limits of each runner.

        Returns:
            What is to be written now, by key; None if that is not due.
        """
        if self._writer is None:
            return None
        self._num_steps += 1
        return None if self._num_steps % self._interval else self._numbers(result, core, config)

    def write(self, numbers: dict[str, float]) -> None:
        """Write what `note` returned; no lock is held, as a writer may take its time."""
        try:
            if self._is_tensorboard:
                for key, value in numbers.items():
                    self._writer.add_scalar(key, value, self._num_steps)
            else:
                self._writer.log(numbers)
        except Exception as error:  # noqa: BLE001  # of the user's object, whatever it raises
            # It may be a writer that a training loop has closed: nothing is written any more.
            _log.warning("metrics_writer_failed", error=repr(error), step=self._num_steps)
            self._writer = None

    def _numbers(
        self, result: StepResult, core: Scheduler, config: EngineConfig
    ) -> dict[str, float]:
        """Return the step's numbers by key; utilizations are percent."""
        stats = core.stats()
        num_allocated = stats.used_blocks + stats.cached_blocks
        timings = result.timings
        numbers = {
            "inference_step": self._num_steps,
            "step_time_s": timings.compute_ns / 1e9,
            "waiting_queue_len": stats.waiting_requests,
            "total_requests_dict_size": core.num_requests,
            "total_blocks": stats.total_blocks,
            "allocated_blocks": num_allocated,
            "active_unique_blocks": stats.used_blocks,
            "allocated_utilization": PERCENT * num_allocated / stats.total_blocks,
            "active_utilization": PERCENT * stats.used_blocks / stats.total_blocks,
            "block_count_avail": stats.free_blocks,
            "active_request_count": stats.running_requests - stats.paused_requests,
            "paused_request_count": stats.paused_requests,
            "total_request_count": stats.running_requests,
            "max_requests": config.max_batch_size,
        }
        return {f"{PREFIX}{key}": value for key, value in numbers.items()}


def _begin_wandb(writer: Any) -> int:
    """
    Make the step number the x-axis; return the last one of a run that is resumed, or 0.

    Raises:
        InvalidConfig: The writer refuses these calls, such as `wandb` before `wandb.init()`.
    """
    try:
        writer.define_metric(STEP)
        writer.define_metric(f"{PREFIX}*", step_metric=STEP)
        run = getattr(writer, "run", None) or writer
        summary = getattr(run, "summary", None)
        return 0 if summary is None else int(summary.get(STEP) or 0)
    except Exception as error:  # of the user's object, whatever it raises
        raise InvalidConfig(
            f"metrics_writer cannot be written to: {error!r}; call wandb.init() before the engine "
            "is made",
            field="metrics_writer",
        ) from error
