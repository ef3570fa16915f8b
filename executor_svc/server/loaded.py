"""What the server, its service and its runner thread share about an executor that can run steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from executor_svc.model.files.tokenizer_files import TokenizerFile
from executor_svc.profile.recorder import Recorder
from tandem.executor.v1.executor_service_pb2 import DescribeResponse
from tandem.link.batch import Batch, KvMode, StepResult
from tandem.link.slot_state import SlotState
from tandem.profile import ProfileOptions

MAX_INFLIGHT_STEPS = 16
"""Credit: steps a scheduler may send ahead of the results it has applied."""

HEARTBEAT_INTERVAL_S = 0.2


class StepRunner(Protocol):
    """What runs steps: `ModelRunner`, or one without a model. One thread owns it."""

    @property
    def state_hash(self) -> int:
        """Hash of the slot state after the last batch."""

    @property
    def slots(self) -> SlotState:
        """Slot state after the last batch, to be read only."""

    def reset(self) -> None:
        """Forget all slots, as at the start of a session."""

    def suspend(self, mode: KvMode) -> None:
        """Give KV memory back until `resume`; raises SessionLost where slots forbid it."""

    def resume(self) -> None:
        """End a suspension; without one, do nothing."""

    def execute(self, batch: Batch, step_id: int) -> StepResult:
        """
        Apply one batch and compute its rows.

        Raises:
            SessionLost: The batch contradicts the slot state; nothing has changed.
        """


@runtime_checkable
class LaunchingRunner(StepRunner, Protocol):
    """
    A runner whose device works by itself once it was given a step, and does steps in order: the
    next one can be given to it before the result of this one is known.
    """

    def launch(self, batch: Batch, step_id: int) -> Callable[[], StepResult]:
        """
        Apply one batch and give its rows to the device.

        Returns:
            Waits for the result; to be called once, in the order of launches, on another thread
            than this one.

        Raises:
            SessionLost: The batch contradicts the slot state; nothing has changed.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """
    What a loaded executor is; the runner belongs to the thread that loaded it.

    Attributes:
        runner: Runs its steps.
        description: What `Describe` answers.
        tokenizer_files: What `GetTokenizer` sends.
        num_threads: CPU threads of one operation, for the log.
        is_sticky: Tells whether an error means that the device is lost for this process.
        recorder: Makes what records steps of the runner; None where nothing can.
    """

    runner: StepRunner
    description: DescribeResponse
    tokenizer_files: tuple[TokenizerFile, ...]
    num_threads: int = 1
    is_sticky: Callable[[Exception], bool] = lambda _: False
    recorder: Callable[[ProfileOptions], Recorder] | None = None
