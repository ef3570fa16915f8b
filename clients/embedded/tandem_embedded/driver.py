"""Driver of an embedded engine, which joins scheduler core and runners by direct calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import structlog

from scheduler_svc.core.scheduler import Scheduler
from tandem.engine_config import EngineConfig
from tandem.errors import InternalError, OutOfMemory, SessionLost, TandemError
from tandem.link.batch import Batch
from tandem.link.commands import KvMode
from tandem.link.results import StepResult
from tandem_embedded.backend import Backend
from tandem_embedded.ledger import Ledger
from tandem_embedded.observe.step_reports import AppliedStep, StepReports
from tandem_embedded.parallel.accord import Accord, Meeting, is_of_computing
from tandem_embedded.parallel.retries import Retries
from tandem_embedded.parallel.worker import Taken, Worker

_log: structlog.stdlib.BoundLogger = structlog.get_logger()


def _is_expected(error: Exception) -> bool:
    """Return True for an error of a step that is recomputed without the caller's knowing."""
    is_told = isinstance(error, TandemError) and not isinstance(error, InternalError)
    return is_told or is_of_computing(error)


class Driver:
    """
    Loop that plans, computes and applies steps; one thread at a time may call `turn`.

    Several runners compute side by side, each on a thread of its own; this loop alone plans their
    steps and applies their results. An idle runner gets its next step while others compute.

    Args:
        core: Scheduler core of one executor, shared with threads that submit.
        config: Limits of each runner.
        backends: The runners, each of which becomes an executor of the core.
        ledger: Ledger, shared with threads that submit.
        lock: Guards core and ledger; never held while a step computes.
        accord: The time, and the other ranks if the one runner has a share of a model.
        reports: Reports on steps.
    """

    def __init__(
        self,
        core: Scheduler,
        config: EngineConfig,
        backends: Sequence[Backend],
        ledger: Ledger,
        lock: threading.Lock,
        *,
        accord: Accord,
        reports: StepReports,
    ) -> None:
        self._core = core
        self._config = config
        self._ledger = ledger
        self._lock = lock
        self._accord = accord
        self._reports = reports
        self._changed = threading.Event()
        ports = [core, *(core.attach(config, one.geometry(config)) for one in backends[1:])]
        self._workers = [
            Worker(port, backend, is_alone=len(backends) == 1, on_done=self._changed.set)
            for port, backend in zip(ports, backends, strict=True)
        ]
        self._retries = Retries(len(backends))

    @property
    def is_suspended(self) -> bool:
        """True from `suspend` until `resume` has brought all runners back."""
        return any(worker.port.is_suspended for worker in self._workers)

    @property
    def num_slots_in_use(self) -> int:
        """Number of requests that hold a slot of a runner."""
        return sum(worker.port.num_slots_in_use for worker in self._workers)

    @property
    def steps_by_runner(self) -> tuple[int, ...]:
        """Number of steps that each runner was sent."""
        return tuple(worker.num_steps for worker in self._workers)

    def wake(self) -> None:
        """Let a turn that waits for results plan anew, as there is more for idle runners to do."""
        self._changed.set()

    def turn(self) -> None:
        """
        Plan a batch for each runner that is free, and apply all results that are due; wait for the
        first of them if none has arrived. Where no runner may get on, requests fail first.

        Raises:
            TandemError: A step failed on a rank of several.
            InternalError: A bug of ours; what ran on the runner is computed again.
            Exception: Any other error of a runner that is not expected, such as a ValueError; what
                ran on it is computed again, unless there are several ranks.
        """
        try:
            self._compute()
        finally:  # also what an error has ended, such as requests that are blamed for it
            self._settle()

    def suspend(self, mode: KvMode) -> None:
        """
        Release KV memory as `mode` says; `turn` must not be called until `resume`. A runner that is
        suspended stays so.

        After an error requests that ran on the runner that failed are computed again, and runners
        that this call has suspended are resumed. One whose memory is taken by now stays suspended
        until `resume`.

        Raises:
            OutOfMemory: The host has no room for the KV of the device, a step before the suspension
                ran out of memory, or the memory of another runner is taken after an error, which is
                the cause.
            TandemError, RuntimeError or MemoryError: A step before the suspension failed otherwise.
        """
        active = [worker for worker in self._workers if not worker.port.is_suspended]
        with self._lock:
            for worker in active:
                worker.port.suspend(mode, self._accord.now())
        for worker in active:
            try:
                self._suspend(worker, mode)
            except Exception as error:  # whatever it is: all or none are suspended
                self._undo_suspension(active, worker, error)
                raise

    def resume(self) -> None:
        """
        End a suspension.

        Raises:
            OutOfMemory: The memory is taken. The suspension goes on, and may be ended later.
        """
        for worker in self._workers:
            if worker.port.is_suspended:
                self._resume(worker)

    def close(self) -> None:
        """Drop the runners, and end their threads after the steps that they compute."""
        for worker in self._workers:
            worker.close(may_wait=not self._accord.has_stopped)
        self._accord.close()

    def _compute(self) -> None:
        """Plan, compute and apply steps until a result is applied or none is due."""
        while True:
            self._changed.clear()
            with self._lock:
                self._plan(self._accord.now())
            self._agree_on_plan()
            for worker in self._workers:
                worker.start()
            self._agree_on_results()
            if self._apply_due() or not any(worker.is_due for worker in self._workers):
                break
            self._changed.wait(self._patience_s())

    def _plan(self, now: float) -> None:
        """
        Plan the next step of each runner that is free; the core's lock is held.

        A runner without retries left is as if away while another has a step: the core offers what
        waits to the others. Where no runner may get on, requests fail first (see `Retries`).
        """
        self._retries.note_live(self._ledger.handles)
        able = [one for one in self._workers if self._retries.are_left(one.port.number)]
        spent = [one for one in self._workers if one not in able]
        for worker in able:
            worker.plan(now)
        if not spent or any(worker.has_step for worker in able):
            return
        if (verdict := self._retries.verdict) is not None:
            self._core.fail_handles(verdict.handles, verdict.error, now)
            self._ledger.settle(self._core, now)
            self._retries.reset()
        for worker in spent:
            worker.plan(now)

    def _agree_on_plan(self) -> None:
        """
        Agree with other ranks, if there are any, that a step is made, and on which. That comes
        before any of them computes: in a step a rank waits for the others without end.
        """
        if self._accord.is_shared:
            (worker,) = self._workers
            self._accord.meet(Meeting.STEP, (worker.num_steps, worker.port.state_hash))

    def _agree_on_results(self) -> None:
        """Agree with other ranks, if there are any, on the results that are due and on the time."""
        if not self._accord.is_shared:
            return
        (worker,) = self._workers
        try:
            results = worker.due_results()
        except Exception as error:  # noqa: BLE001  # `stop` raises it, or what it means to ranks
            self._accord.stop(error)
        else:
            drawn = [(result.slot.tolist(), result.token.tolist()) for result in results]
            self._accord.meet(Meeting.RESULTS, drawn)

    def _apply_due(self) -> bool:
        """Apply the results that are due and have arrived; return True if there were any."""
        has_applied = False
        for worker in self._workers:
            while self._try_apply(worker, worker.try_take):
                has_applied = True
                self._settle()
        return has_applied

    def _try_apply(self, worker: Worker, take: Callable[[], Taken | None]) -> bool:
        """
        Apply a runner's next result, or let it start over if its step failed or the result is none
        of its step; return False if there is no result.

        Recording what has become of the requests is left to the caller (see `_settle`): the runner
        is not at fault if that fails.
        """
        try:
            if (taken := take()) is None:
                return False
            self._apply(worker, *taken)
        except Exception as error:  # a step may fail by anything; what is not expected is raised
            self._recover(worker, error)
            if not _is_expected(error):
                raise
        return True

    def _patience_s(self) -> float | None:
        """Return how long to wait for results before an idle runner may have more to do."""
        with self._lock:
            until_s = self._core.next_deadline_s
        return None if until_s is None else max(until_s - self._accord.now(), 0.001)

    def _suspend(self, worker: Worker, mode: KvMode) -> None:
        self._apply_all(worker)
        while self._is_waiting_for_releases(worker):
            self._release(worker)
        worker.suspend(mode)
        worker.acknowledge()
        self._apply_all(worker)

    def _undo_suspension(self, workers: Sequence[Worker], failed: Worker, error: Exception) -> None:
        """
        Resume these runners after one of them could not be suspended. All are tried, also after one
        that fails.

        Raises:
            OutOfMemory: The memory of another runner is taken.
        """
        with self._lock:
            for worker in workers:
                worker.port.resume()
        self._recover(failed, error)
        failures: list[Exception] = []
        for worker in workers:
            if worker is not failed and worker.port.is_command_due:
                try:
                    self._resume(worker)
                except Exception as failure:  # noqa: BLE001  # raised once all are tried
                    failures.append(failure)
        if failures:
            raise failures[0] from error

    def _resume(self, worker: Worker) -> None:
        worker.resume()
        with self._lock:
            worker.port.resume()
            worker.port.take_command()
        worker.acknowledge()
        self._try_apply(worker, worker.take)
        self._settle()

    def _apply_all(self, worker: Worker) -> None:
        while worker.is_under_way:
            self._apply(worker, *worker.take())
            self._settle()

    def _is_waiting_for_releases(self, worker: Worker) -> bool:
        """Take the suspend command; return True if slots must be released before it."""
        with self._lock:
            return worker.port.is_command_due and worker.port.take_command() is None

    def _release(self, worker: Worker) -> None:
        """Execute the batch that releases slots, which a suspension waits for."""
        with self._lock:
            batch, state_hash = worker.port.schedule(self._accord.now()), worker.port.state_hash
        assert batch is not None
        worker.send(batch, state_hash)
        self._apply_all(worker)

    def _apply(self, worker: Worker, batch: Batch, result: StepResult) -> None:
        report = None
        with self._lock:
            self._ledger.note_margins(worker.port, result)
            worker.port.apply(result, self._accord.now())
            if self._reports.is_next_due():
                # A process among ranks has one runner, and one with several runners is no rank.
                rank = self._accord.rank + worker.port.number
                step = AppliedStep(port=worker.port, batch=batch, result=result, rank=rank)
                report = self._reports.report(step, self._core, self._config)
            if len(result.token):
                self._retries.reset()
            elif self._retries.has_failures:
                self._retries.note_computed(self._computed())
        if report is not None:
            self._reports.tell(report)

    def _settle(self) -> None:
        """Record what has become of the requests; an error of that is a bug of ours."""
        with self._lock:
            self._ledger.settle(self._core, self._accord.now())

    def _recover(self, worker: Worker, error: Exception) -> None:
        """
        Start over with an empty runner; one that cannot be cleared has itself to blame.

        Raises:
            Exception: There are other ranks, which may not have failed: see `Accord.stop`.
        """
        self._accord.stop(error)
        number = worker.port.number
        try:
            worker.start_over()
        except Exception as lasting:  # noqa: BLE001  # counts like the error of a step
            _log.warning(
                "runner_not_cleared", runner=number, error=repr(lasting), after=repr(error)
            )
            self._note_failure(worker, lasting, is_blamed=False)
            return
        if isinstance(error, OutOfMemory | MemoryError):
            self._note_out_of_memory(worker)
            return
        _log.warning("step_failed", runner=number, error=repr(error))
        has_others = len(self._workers) > 1
        self._note_failure(
            worker, error, is_blamed=has_others and not isinstance(error, SessionLost)
        )

    def _note_out_of_memory(self, worker: Worker) -> None:
        """
        Let the core make the next steps smaller, and end a request that lacks memory even when it
        runs alone; that is no failure of the runner.
        """
        with self._lock:
            # Results before that of the step that failed were applied: it is the oldest in flight.
            worker.port.executor_lost(self._accord.now(), 0, out_of_memory=True)

    def _note_failure(self, worker: Worker, error: Exception, *, is_blamed: bool) -> None:
        """
        Count a failure. Where there are other runners, the core blames it on the requests of the
        step, the oldest in flight, and tries them one at a time.
        """
        with self._lock:
            computed = self._computed()
            worker.port.executor_lost(self._accord.now(), 0 if is_blamed else None)
            self._retries.note_failure(worker.port.number, error, computed, is_blamed=is_blamed)

    def _computed(self) -> dict[int, int]:
        """Return how many tokens of each live request are computed; the core's lock is held."""
        return {handle: self._core.num_computed(handle) for handle in self._ledger.handles}
