"""Backend of an embedded engine: a runner that computes its steps, and the runner's limits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

from scheduler_svc.core.request.geometry import ExecutorGeometry
from tandem.engine_config import EngineConfig
from tandem.link.batch import Batch
from tandem.link.commands import KvMode
from tandem.link.results import StepResult
from tandem.sampling_params import SamplingParams
from tandem_embedded.params import Vocabulary


class Runner(Protocol):
    """Interface of a runner, which computes batches in order."""

    @property
    def state_hash(self) -> int:
        """Hash of the slot state after the last batch."""

    def execute(self, batch: Batch, step_id: int) -> StepResult:
        """Apply and compute one batch."""

    def reset(self) -> None:
        """Clear all slots, and end a suspension."""

    def suspend(self, mode: KvMode) -> None:
        """Release KV memory until `resume`; with RECOMPUTE no slot is live at this time."""

    def resume(self) -> None:
        """End a suspension; raise OutOfMemory, and stay suspended, if the memory is taken."""


@runtime_checkable
class LaunchingRunner(Runner, Protocol):
    """A runner that takes the next batch before the result of the one before is known."""

    def launch(self, batch: Batch, step_id: int) -> Callable[[], StepResult]:
        """Apply a batch and begin to compute it; the function waits, and is called in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """
    A runner and its limits.

    Attributes:
        num_slots: Number of slots of the runner.
        max_positions: Length in tokens of the longest sequence that the model supports.
        vocab_size: Size of the vocabulary; token ids are in [0, vocab_size).
        eos_token_ids: Ids that end a sequence.
        defaults: Sampling defaults for requests that set none.
        num_host_blocks: Number of host blocks that preempted requests can be swapped to.
        device: Device of the runner, which its thread is to use.
        num_stages: Number of stages of the model; with several the runner must be a
            `LaunchingRunner`, which the engine checks.
    """

    runner: Runner
    num_slots: int
    max_positions: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    defaults: SamplingParams = field(default_factory=SamplingParams)
    num_host_blocks: int = 0
    device: str = "cpu"
    num_stages: int = 1

    @property
    def vocabulary(self) -> Vocabulary:
        """Vocabulary and defaults that requests are checked with."""
        return Vocabulary(
            size=self.vocab_size, eos_token_ids=self.eos_token_ids, defaults=self.defaults
        )

    def geometry(self, config: EngineConfig) -> ExecutorGeometry:
        """Return the geometry that the scheduler core plans with under these limits."""
        found = geometry_of(config)
        return replace(
            found,
            num_slots=self.num_slots,
            num_host_blocks=self.num_host_blocks,
            num_stages=self.num_stages,
        )


def geometry_of(config: EngineConfig) -> ExecutorGeometry:
    """Return the geometry of an executor with these limits."""
    return ExecutorGeometry(
        num_blocks=config.max_num_blocks,
        block_size=config.block_size,
        num_slots=config.max_batch_size,
        max_batch_size=config.max_batch_size,
        max_total_tokens=config.max_total_tokens,
        max_model_len=config.max_model_len,
    )
