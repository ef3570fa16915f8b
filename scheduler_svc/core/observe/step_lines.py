"""
A log line for every N-th step: its time and shape, its CUDA graph, and the engine's load.

The line has the wording of Megatron Core's dynamic engine, so that tools that read those logs can
read these. It is written where results are applied, as it tells the result of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from scheduler_svc.core.request.events import LogLine
from tandem.admin.v1.stats_pb2 import GetStatsResponse as Stats
from tandem.link.batch import Batch
from tandem.link.commands import Command
from tandem.link.results import StepResult

_GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """
    Load of the core after a step.

    Attributes:
        stats: The core's statistics.
        max_requests: Most requests that may run at once.
        paused_blocks: Blocks that paused requests hold.
        paused_budget_blocks: Blocks that they may keep.
    """

    stats: Stats
    max_requests: int
    paused_blocks: int
    paused_budget_blocks: int


class StepLines:
    """Counter of steps that words the line of every N-th one. Owned by the caller of the core."""

    def __init__(self, interval: int, time_of_day: Callable[[], str]) -> None:
        """
        Args:
            interval: Steps from one line to the next; 0 for no line at all.
            time_of_day: Returns the local time, HH:MM:SS.
        """
        self._interval = interval
        self._time_of_day = time_of_day
        self._num_steps = 0

    def line(
        self, command: Command, result: StepResult, load: Callable[[], Load], *, rank: int = 0
    ) -> LogLine | None:
        """
        Count a step and return the line that is due after it, or None.

        Args:
            command: Batch or command of the step.
            result: Result of the step.
            load: Returns the core's load after the result was applied; called only if a line is
                due.
            rank: Number of the executor, or of the process of an executor, that computed it.
        """
        self._num_steps += 1
        if not self._interval or self._num_steps % self._interval:
            return None
        now = self._time_of_day()
        return step_line(command, result, load(), step=self._num_steps, time_of_day=now, rank=rank)


def step_line(
    command: Command,
    result: StepResult,
    load: Load,
    *,
    step: int,
    time_of_day: str,
    rank: int = 0,
) -> LogLine:
    """
    Return the log line of one step.

    `time` is the executor's time for the step without its wait in the executor's queue. P is the
    number of rows with more than one token (prefill), D of those with one (decode). Of requests, a
    are running, p paused and w waiting; f have finished and e is the number of preemptions, both
    since the start. Of blocks, a are in use, and p are held by paused requests, beside the number
    that these may keep.
    """
    timings, stats, max_requests = result.timings, load.stats, load.max_requests
    num_active = stats.running_requests - stats.paused_requests
    step_ms = timings.compute_ns / 1e6
    blocks = f"a {stats.used_blocks}/{stats.total_blocks}"
    text = (
        f"* rank {rank} | step {step} | {time_of_day} ... time: {step_ms:.3f} ms "
        f"[{_shape(command, result)}] ... "
        f"reqs: a {num_active}/{max_requests}, p {stats.paused_requests}, "
        f"w {stats.waiting_requests}, f {stats.finished_requests}, e {stats.preemptions} ... "
        f"blocks: {blocks}, p {load.paused_blocks}/{load.paused_budget_blocks} ... "
        f"mem: {result.device_memory_bytes / _GB:.1f} gb"
    )
    values = {
        "rank": rank,
        "step": step,
        "step_id": result.step_id,
        "step_ms": round(step_ms, 3),
        "shape": _shape(command, result),
        "active_requests": num_active,
        "max_requests": max_requests,
        "paused_requests": stats.paused_requests,
        "waiting_requests": stats.waiting_requests,
        "finished_requests": stats.finished_requests,
        "preemptions": stats.preemptions,
        "used_blocks": stats.used_blocks,
        "total_blocks": stats.total_blocks,
        "paused_blocks": load.paused_blocks,
        "paused_budget_blocks": load.paused_budget_blocks,
        "used_host_blocks": stats.used_host_blocks,
        "host_blocks": stats.host_blocks,
        "device_memory_bytes": result.device_memory_bytes,
    }
    return LogLine(event="step", values=values, text=text)


def _shape(command: Command, result: StepResult) -> str:
    if not isinstance(command, Batch):
        return type(command).__name__.lower()
    num_prefills = int((command.row_num_tokens > 1).sum())
    num_decodes = len(command.row_num_tokens) - num_prefills
    graph = f"[{result.graph}]" if result.graph else "OFF"
    return (
        f"{'non-decode' if num_prefills else 'decode'} + real config "
        f"[{command.num_tokens}]: {num_prefills} P + {num_decodes} D + cuda graph {graph}"
    )
