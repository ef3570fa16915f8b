"""Setup of a simulation: all that it depends on besides its requests."""

from __future__ import annotations

from dataclasses import dataclass, replace

from scheduler_svc.core.request.geometry import ExecutorGeometry
from scheduler_svc.core.request.options import CoreOptions
from tandem.engine_config import EngineConfig
from tandem_simulator.executor.step_time import StepTime

MEASURED = -1.0
"""Value of `core_s` that stands for the time that the core really takes on this machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """
    Loss of one executor, with an empty one in its place after a while.

    Attributes:
        executor: Its number.
        at_s: Time of the loss.
        back_after_s: Seconds after which there is an executor again.
    """

    executor: int
    at_s: float
    back_after_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """
    Everything a simulation depends on besides its requests.

    Attributes:
        limits: Limits of scheduler and executors alike.
        options: Options of the core.
        step_time: Parameters of each executor's step time.
        num_host_blocks: KV blocks in each executor's host memory, for swapping.
        num_executors: How many executors compute the requests.
        executor_blocks: KV blocks of each, the first again where there are more executors than
            sizes; none for those of `limits`.
        num_stages: Pipeline stages of each executor.
        has_lanes: True where the core knows of the stages, and plans lanes for them.
        outage: Loss of an executor, if any.
        core_s: Virtual seconds that each `schedule` and each `apply` takes; `MEASURED` for the time
            that they really take, which makes results differ from run to run.
        is_checked: Check every token, KV position and the core's state, see `audit`.
    """

    limits: EngineConfig
    options: CoreOptions
    step_time: StepTime
    num_host_blocks: int = 0
    num_executors: int = 1
    executor_blocks: tuple[int, ...] = ()
    num_stages: int = 1
    has_lanes: bool = True
    outage: Outage | None = None
    core_s: float = 0.0
    is_checked: bool = False

    def limits_of(self, number: int) -> EngineConfig:
        """Return the limits with one executor's number of blocks."""
        if not self.executor_blocks:
            return self.limits
        blocks = self.executor_blocks[number % len(self.executor_blocks)]
        return replace(self.limits, max_num_blocks=blocks)

    def geometry_of(self, number: int) -> ExecutorGeometry:
        """Return one executor's capacity: its limits, with as many slots as a real one has."""
        limits = self.limits_of(number)
        return ExecutorGeometry(
            num_blocks=limits.max_num_blocks,
            block_size=limits.block_size,
            num_slots=2 * limits.max_batch_size,
            max_batch_size=limits.max_batch_size,
            max_total_tokens=limits.max_total_tokens,
            max_model_len=limits.max_model_len,
            num_host_blocks=self.num_host_blocks,
            num_stages=self.num_stages if self.has_lanes else 1,
        )

    @property
    def total_blocks(self) -> int:
        """KV blocks of all executors."""
        return sum(self.limits_of(one).max_num_blocks for one in range(self.num_executors))
