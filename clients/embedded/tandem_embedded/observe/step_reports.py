"""
Reports on every N-th step: a line in the log, and numbers for a metrics writer if there is one.

As text the line has the wording of Megatron Core's dynamic engine, as that of the service has.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from scheduler_svc.core.executor_port import ExecutorPort
from scheduler_svc.core.observe.step_lines import Load, step_line
from scheduler_svc.core.request.events import LogLine
from scheduler_svc.core.scheduler import Scheduler
from tandem.engine_config import EngineConfig
from tandem.errors import InvalidConfig
from tandem.link.batch import Batch
from tandem.link.results import StepResult
from tandem_embedded.observe.logs import log_line
from tandem_embedded.observe.metrics_writer import StepMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class AppliedStep:
    """
    A step whose result was applied.

    Attributes:
        port: Port of its runner.
        batch: Its batch; an empty one stands for a command.
        result: Its result.
        rank: Number of the process that shares the model, or else of the runner.
    """

    port: ExecutorPort
    batch: Batch
    result: StepResult
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """
    Line and numbers of one step that are yet to be told.

    Attributes:
        line: Line of the log.
        numbers: Numbers for the metrics writer, by key; None without one.
    """

    line: LogLine
    numbers: dict[str, float] | None


class StepReports:
    """Counter of steps that reports every N-th one. Owned by the thread that drives."""

    def __init__(self, writer: object, interval: int) -> None:
        """
        Args:
            writer: Metrics writer, as of `StepMetrics`, or None.
            interval: Steps from one report to the next; 0 for none.

        Raises:
            InvalidConfig: The interval is negative or no whole number, or the writer is of no type
                that is known or refuses the first calls.
        """
        if not isinstance(interval, int) or interval < 0:
            raise InvalidConfig(
                f"logging_step_interval must be a whole number of at least 0, got {interval!r}",
                field="logging_step_interval",
            )
        self._interval = interval
        self._num_steps = 0
        self._metrics = StepMetrics(writer)
        if interval:
            self._metrics.begin()

    def is_next_due(self) -> bool:
        """Count a step; return True if it must be reported."""
        self._num_steps += 1
        return self._interval > 0 and not self._num_steps % self._interval

    def report(self, step: AppliedStep, core: Scheduler, config: EngineConfig) -> Report:
        """
        Return what is to be told about the step that was counted last.

        Args:
            step: The step.
            core: The core, whose lock is held.
            config: Limits of each runner.
        """
        load = Load(
            stats=core.stats(),
            max_requests=config.max_batch_size,
            paused_blocks=step.port.num_paused_blocks,
            paused_budget_blocks=step.port.paused_budget_blocks,
        )
        line = step_line(
            step.batch,
            step.result,
            load,
            step=self._num_steps,
            time_of_day=time.strftime("%H:%M:%S"),
            rank=step.rank,
        )
        numbers = self._metrics.numbers(self._num_steps, step.result, load, core.num_requests)
        return Report(line=line, numbers=numbers)

    def tell(self, report: Report) -> None:
        """Tell what `report` returned; no lock is held, as log and writer may take their time."""
        log_line(report.line, is_asked=True)
        if report.numbers is not None:
            self._metrics.write(report.numbers)
