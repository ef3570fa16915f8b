"""Driver of an embedded engine, which joins scheduler core and runner by direct calls."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from scheduler_svc.core.scheduler import Scheduler
from tandem.errors import ExecutorLost, OutOfMemory, SessionLost, TandemError
from tandem.link.batch import Batch
from tandem.link.commands import KvMode
from tandem.link.results import StepResult
from tandem_embedded.backend import Runner
from tandem_embedded.ledger import Ledger

MAX_STEP_RETRIES = 2
"""Number of times in a row that a failed step is recomputed before all requests fail."""


class Driver:
    """
    Loop that plans, computes and applies steps; one thread at a time may call `turn`.

    Args:
        core: Scheduler core, shared with threads that submit.
        runner: Runner, owned by the driver.
        ledger: Ledger, shared with threads that submit.
        lock: Guards core and ledger; never held while a step computes.
        window: Number of steps planned before the first of them is applied, at least 1.
        clock: Clock in monotonic seconds.
    """

    def __init__(
        self,
        core: Scheduler,
        runner: Runner,
        ledger: Ledger,
        lock: threading.Lock,
        *,
        window: int,
        clock: Callable[[], float],
    ) -> None:
        self._core = core
        self._runner = runner
        self._ledger = ledger
        self._lock = lock
        self._window = window
        self._clock = clock
        self._under_way: deque[StepResult] = deque()
        self._num_steps = 0
        self._failures_in_a_row = 0

    def turn(self) -> None:
        """Plan and compute one batch, and apply all results that are due."""
        with self._lock:
            batch, state_hash = self._core.schedule(self._clock()), self._core.state_hash
        try:
            if batch is not None:
                self._under_way.append(self._compute(batch, state_hash))
            num_due = len(self._under_way) - (self._window - 1 if batch is not None else 0)
            with self._lock:
                for _ in range(num_due):
                    self._apply(self._under_way.popleft())
        except (TandemError, RuntimeError, MemoryError) as error:
            self._recover(error)
        with self._lock:
            self._ledger.settle(self._core, self._clock())

    def suspend(self, mode: KvMode) -> None:
        """
        Release KV memory as `mode` says; `turn` must not be called until `resume`.

        After an error nothing is suspended, and running requests are computed again.

        Raises:
            OutOfMemory: The host has no room for the KV of the device, or a step before the
                suspension ran out of memory.
            TandemError, RuntimeError or MemoryError: A step before the suspension failed otherwise.
        """
        with self._lock:
            self._core.suspend(mode, self._clock())
        try:
            self._apply_all()
            while self._is_waiting_for_releases():
                self._release()
            self._runner.suspend(mode)
            self._acknowledge()
        except (TandemError, RuntimeError, MemoryError) as error:
            with self._lock:
                self._core.resume()
            self._recover(error)
            raise

    def resume(self) -> None:
        """
        End a suspension.

        Raises:
            OutOfMemory: The memory is taken. The suspension goes on, and may be ended later.
        """
        self._runner.resume()
        with self._lock:
            self._core.resume()
            self._core.take_command()
        self._acknowledge()

    def _apply_all(self) -> None:
        with self._lock:
            while self._under_way:
                self._apply(self._under_way.popleft())

    def _is_waiting_for_releases(self) -> bool:
        """Take the suspend command; return True if slots must be released before it."""
        with self._lock:
            return self._core.is_command_due and self._core.take_command() is None

    def _release(self) -> None:
        """Execute the batch that releases slots, which a suspension waits for."""
        with self._lock:
            batch, state_hash = self._core.schedule(self._clock()), self._core.state_hash
        assert batch is not None
        self._under_way.append(self._compute(batch, state_hash))
        self._apply_all()

    def _acknowledge(self) -> None:
        """Apply the empty result of a command that was taken from the core."""
        self._under_way.append(self._compute(Batch(), self._core.state_hash))
        self._apply_all()

    def _compute(self, batch: Batch, state_hash: int) -> StepResult:
        self._num_steps += 1
        result = self._runner.execute(batch, self._num_steps)
        if self._runner.state_hash != state_hash:
            raise SessionLost(f"scheduler and runner disagree after step {self._num_steps}")
        return result

    def _apply(self, result: StepResult) -> None:
        self._ledger.note_margins(self._core, result)
        now = self._clock()
        self._core.apply(result, now)
        self._ledger.settle(self._core, now)
        self._failures_in_a_row = 0

    def _recover(self, error: TandemError | RuntimeError | MemoryError) -> None:
        """
        Start over with an empty runner, or fail all requests after too many failures in a row.

        A step that ran out of memory does not count as a failure: the core makes the next steps
        smaller, and ends a request that lacks memory even when it runs alone.
        """
        self._under_way.clear()
        self._runner.reset()
        is_memory = isinstance(error, OutOfMemory | MemoryError)
        with self._lock:
            now = self._clock()
            if is_memory:  # The step that failed is the last one planned.
                self._core.executor_lost(now, self._core.num_inflight - 1, out_of_memory=True)
                return
            self._core.executor_lost(now)
            self._failures_in_a_row += 1
            if self._failures_in_a_row > MAX_STEP_RETRIES:
                self._failures_in_a_row = 0
                self._core.fail_all(_step_error(error), now)


def _step_error(error: TandemError | RuntimeError | MemoryError) -> TandemError:
    if isinstance(error, TandemError):
        return error
    return ExecutorLost(f"computing a step failed {MAX_STEP_RETRIES + 1} times in a row: {error}")
