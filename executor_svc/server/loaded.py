"""Types that the server, its service and its runner thread share: the runner and the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from executor_svc.model.files.tokenizer_files import TokenizerFile
from executor_svc.profile.recorder import Recorder
from tandem.errors import TandemError
from tandem.executor.v1.executor_service_pb2 import DescribeResponse
from tandem.link.batch import Batch
from tandem.link.commands import KvMode
from tandem.link.results import StepResult
from tandem.link.slots.slot_state import SlotState
from tandem.profile import ProfileOptions

MAX_INFLIGHT_STEPS = 16
"""Number of steps that a scheduler may send ahead of the results it has applied (its credit)."""

HEARTBEAT_INTERVAL_S = 0.2

DEPTH = 2
"""Most steps launched and not yet completed: one that runs, one that follows."""


def credit(num_stages: int) -> int:
    """
    Return how many steps a scheduler may send ahead to an executor with so many pipeline stages:
    where there are many, two for each keep all of them busy.
    """
    return max(MAX_INFLIGHT_STEPS, 2 * num_stages)


class StepRunner(Protocol):
    """A runner of steps: `ModelRunner`, or one without a model. One thread owns it."""

    @property
    def state_hash(self) -> int:
        """Hash of the slot state after the last batch."""

    @property
    def slots(self) -> SlotState:
        """Slot state after the last batch, for reading only."""

    def reset(self) -> None:
        """Forget all slots, as at the start of a session."""

    def suspend(self, mode: KvMode) -> None:
        """
        Give KV memory back until `resume`; a second suspension does nothing.

        Raises:
            SessionLost: The slots forbid it.
            OutOfMemory: The host has no room for what the mode copies to it; nothing has changed.
        """

    def resume(self) -> None:
        """End a suspension; without one, do nothing."""

    def launch(self, batch: Batch, step_id: int) -> Callable[[], StepResult]:
        """
        Apply one batch and launch its rows on the device, which works by itself and in order: the
        next step can be launched before the result of this one is known.

        Returns:
            A function that waits for the result; it is called once, in the order of launches, on
            another thread.

        Raises:
            SessionLost: The batch contradicts the slot state; nothing has changed.
        """


class Followers:
    """
    The other ranks of the model, to which the runner thread passes on all that it applies, in
    order; here there are none. Where there are some, an error of one step ends the process: ranks
    that stopped at different places never meet again.
    """

    exist = False

    def pass_on(self, raw: bytes) -> None:
        """Pass a step on, as the bytes in which it was received."""

    def reset(self) -> None:
        """Let all ranks forget all slots."""

    def lose(self) -> None:
        """Tell all ranks that the last step ended the session."""

    def check(self, checksum: int) -> None:
        """Let all ranks compare their tokens with those of this one."""

    def wait(self) -> None:
        """Wait until all ranks have done the last reset, suspension or resumption."""

    def cause_of(self, error: Exception) -> Exception:
        """Return the error of the rank that made a step fail here."""
        return error

    def on_failure(self, report: Callable[[TandemError], None]) -> None:
        """Name the function that is told, on any thread, when a rank cannot go on."""


ALONE = Followers()
"""The followers of a model on one rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """
    A loaded executor; the runner belongs to the thread that loaded it.

    Attributes:
        runner: Runner of its steps.
        description: Answer to `Describe`.
        tokenizer_files: Files that `GetTokenizer` sends.
        num_threads: CPU threads of one operation, for the log.
        is_sticky: Tells whether an error means that the device is lost for this process.
        recorder: Makes a recorder of the runner's steps; None if they cannot be recorded.
        followers: The other ranks of the model.
        depth: Most steps launched and not yet completed: one that runs on each stage of the model,
            one that follows.
        checksum: Returns a checksum of what the device has of live slots; equal on all ranks.
        compare_ranks: Compares what the ranks of a stage computed in the latest step, on all of
            them at the same time; raises InternalError where it differs.
    """

    runner: StepRunner
    description: DescribeResponse
    tokenizer_files: tuple[TokenizerFile, ...]
    num_threads: int = 1
    is_sticky: Callable[[Exception], bool] = lambda _: False
    recorder: Callable[[ProfileOptions], Recorder] | None = None
    followers: Followers = ALONE
    depth: int = DEPTH
    checksum: Callable[[], int] = lambda: 0
    compare_ranks: Callable[[], None] = lambda: None
