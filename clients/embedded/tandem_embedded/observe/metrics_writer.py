"""
Numbers of steps for a metrics writer: Weights & Biases, or TensorBoard.

Keys are those of Megatron Core's dynamic engine, so that its plots can show these numbers.
"""

from __future__ import annotations

from typing import Any

import structlog

from scheduler_svc.core.observe.step_lines import Load
from tandem.errors import InvalidConfig
from tandem.link.results import StepResult

PREFIX = "inference/"
STEP = f"{PREFIX}inference_step"
"""Key of the step number, which is the x-axis of all others."""
PERCENT = 100.0

_log: structlog.stdlib.BoundLogger = structlog.get_logger()


class StepMetrics:
    """
    Writer of numbers of steps. Owned by the thread that drives.

    With Weights & Biases steps of a resumed run are numbered from its last one. A writer that fails
    is logged and not called again: serving does not depend on it.
    """

    def __init__(self, writer: object) -> None:
        """
        Args:
            writer: The module `wandb`, one of its runs, a `SummaryWriter` of TensorBoard, or None.

        Raises:
            InvalidConfig: The writer is of no type that is known.
        """
        self._writer: Any = writer
        self._num_earlier = 0
        """Number of the last step of the run that is resumed."""
        self._is_tensorboard = callable(getattr(writer, "add_scalar", None))
        is_wandb = all(callable(getattr(writer, name, None)) for name in ("log", "define_metric"))
        if writer is not None and not (is_wandb or self._is_tensorboard):
            raise InvalidConfig(
                f"Unsupported metrics writer type: {type(writer).__name__}; give the module wandb, "
                "one of its runs, or TensorBoard's SummaryWriter",
                field="metrics_writer",
            )

    def begin(self) -> None:
        """
        Prepare the writer for numbers.

        Raises:
            InvalidConfig: It refuses the first calls.
        """
        if self._writer is not None and not self._is_tensorboard:
            self._num_earlier = _begin_wandb(self._writer)

    def numbers(
        self, step: int, result: StepResult, load: Load, num_requests: int
    ) -> dict[str, float] | None:
        """
        Return what is to be written about a step, by key; None without a writer.

        Args:
            step: Number of the step in this process, from 1.
            result: Its result.
            load: The core's load after it.
            num_requests: Number of requests in the system after it.
        """
        if self._writer is None:
            return None
        stats = load.stats
        num_allocated = stats.used_blocks + stats.cached_blocks
        numbers = {
            "inference_step": self._num_earlier + step,
            "step_time_s": result.timings.compute_ns / 1e9,
            "waiting_queue_len": stats.waiting_requests,
            "total_requests_dict_size": num_requests,
            "total_blocks": stats.total_blocks,
            "allocated_blocks": num_allocated,
            "active_unique_blocks": stats.used_blocks,
            "allocated_utilization": PERCENT * num_allocated / stats.total_blocks,
            "active_utilization": PERCENT * stats.used_blocks / stats.total_blocks,
            "block_count_avail": stats.free_blocks,
            "active_request_count": stats.running_requests - stats.paused_requests,
            "paused_request_count": stats.paused_requests,
            "total_request_count": stats.running_requests,
            "max_requests": load.max_requests,
        }
        return {f"{PREFIX}{key}": value for key, value in numbers.items()}

    def write(self, numbers: dict[str, float]) -> None:
        """Write what `numbers` returned; no lock is held, as a writer may take its time."""
        step = int(numbers[STEP])
        try:
            if self._is_tensorboard:
                for key, value in numbers.items():
                    self._writer.add_scalar(key, value, step)
            else:
                self._writer.log(numbers)
        except Exception as error:  # noqa: BLE001  # of the user's object, whatever it raises
            # It may be a writer that a training loop has closed: nothing is written any more.
            _log.warning("metrics_writer_failed", error=repr(error), step=step)
            self._writer = None


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
