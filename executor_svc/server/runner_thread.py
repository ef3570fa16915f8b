"""The one thread that touches the device: loads, then runs one step after another."""

from __future__ import annotations

import threading
from collections.abc import Callable

import structlog

from executor_svc.profile.profiles import Profiles
from executor_svc.server.loaded import Engine, StepRunner
from executor_svc.server.progress import Progress
from executor_svc.server.result_thread import ResultThread
from executor_svc.server.step_link import Errand, QueuedStep, SlotReset, StepLink
from tandem.errors import InternalError, SessionLost, TandemError
from tandem.link.batch import Batch
from tandem.link.codec.wire import encode_response
from tandem.link.commands import Resume, Step, Suspend
from tandem.link.refusal import refused_batch
from tandem.link.results import StepFailed, StepResult
from tandem.link.session import LossCause

_log = structlog.get_logger(__name__)


class RunnerThread(threading.Thread):
    """The runner thread, which never waits for gRPC, only for the next step."""

    def __init__(
        self,
        link: StepLink,
        progress: Progress,
        profiles: Profiles,
        *,
        boot_id: str,
        load: Callable[[], Engine],
        on_ready: Callable[[Engine], None],
        on_fatal: Callable[[TandemError], None],
    ) -> None:
        """
        Args:
            link: Source of steps and receiver of their outcomes.
            progress: Learns how long steps take.
            profiles: Records steps when asked to.
            boot_id: Id of this process, put into failures.
            load: Builds the engine; called on this thread.
            on_ready: Called on this thread once steps can run.
            on_fatal: Called on this thread when it ends because of an error.
        """
        super().__init__(name="runner", daemon=True)
        self._link = link
        self._progress = progress
        self._profiles = profiles
        self._boot_id = boot_id
        self._load = load
        self._on_ready = on_ready
        self._on_fatal = on_fatal
        self._is_sticky: Callable[[Exception], bool] = lambda _: False

    def run(self) -> None:
        """Load, then work until the link says stop or the device fails."""
        try:
            engine = self._load()
            self._is_sticky = engine.is_sticky
            self._on_ready(engine)
            self._work(engine.runner)
        except Exception as error:  # noqa: BLE001  # outermost frame of the thread: the process ends
            self._broken(error)

    def _broken(self, error: Exception) -> None:
        if not isinstance(error, TandemError):
            _log.error("runner_broken", exc_info=error)
            error = InternalError(f"the runner thread broke: {_in_words(error)}")
        self._on_fatal(error)

    def _work(self, runner: StepRunner) -> None:
        results = ResultThread(self._link, self._progress, fail=self._fail, on_broken=self._broken)
        results.start()
        try:
            while (job := self._link.next_job()) is not None:
                if isinstance(job, SlotReset):
                    results.drain()
                    runner.reset()
                    job.done.set()
                elif isinstance(job, Errand):
                    job.run()
                else:
                    self._run_step(runner, job, results)
        finally:
            self._profiles.abandon()
            results.end()

    def _run_step(self, runner: StepRunner, job: QueuedStep, results: ResultThread) -> None:
        step = job.step
        if not results.make_room(step.session_epoch):
            return
        try:
            if self._profiles.active is None:
                collect = self._launch(runner, step)
            else:
                collect = self._profiles.run_step(lambda: self._launch(runner, step))
        except SessionLost as error:
            results.drain(held=1)
            self._lose(runner, step, refused_batch(error, step.step_id))
        except Exception as error:  # noqa: BLE001  # any failure of a step is reported, typed
            results.drain(held=1)
            self._fail(step, error)
        else:
            results.put(job, collect)

    def _launch(self, runner: StepRunner, step: Step) -> Callable[[], StepResult]:
        """
        Begin one command.

        Raises:
            SessionLost: The step contradicts the slot state, or the hash after it differs.
        """
        match step.command:
            case Batch() as batch:
                collect = runner.launch(batch, step.step_id)
            case Suspend(kv_mode=kv_mode):
                runner.suspend(kv_mode)
                collect = runner.launch(Batch(), step.step_id)
            case Resume():
                runner.resume()
                collect = runner.launch(Batch(), step.step_id)
        if runner.state_hash != step.state_hash:
            raise SessionLost(
                f"after step {step.step_id} the scheduler's state hash is "
                f"{step.state_hash:#018x}, the executor's {runner.state_hash:#018x}",
                metadata=LossCause.STATE_HASH.as_metadata(),
            )
        return collect

    def _lose(self, runner: StepRunner, step: Step, error: SessionLost) -> None:
        slots = runner.slots
        live = slots.live.nonzero()[0]
        _log.error(
            "session_lost",
            why=error.message,
            session_epoch=step.session_epoch,
            step_id=step.step_id,
            slot=live.tolist(),
            generation=slots.generation[live].tolist(),
            planned=slots.planned[live].tolist(),
            blocks=[slots.blocks_of(slot).tolist() for slot in live.tolist()],
        )
        self._link.lose(step, error)

    def _fail(self, step: Step, error: Exception) -> None:
        """
        Report a failed step.

        Raises:
            TandemError: The device is lost (a sticky error); the process must end.
        """
        sticky = self._is_sticky(error)
        typed = _typed(error)
        _log.error(
            "step_failed",
            step_id=step.step_id,
            session_epoch=step.session_epoch,
            sticky=sticky,
            exc_info=error,
        )
        failure = StepFailed(
            boot_id=self._boot_id,
            step_id=step.step_id,
            reason=typed.reason,
            message=typed.message,
            sticky=sticky,
        )
        self._link.complete(step, encode_response(failure), failed=True)
        if sticky:
            raise typed


def _typed(error: Exception) -> TandemError:
    if isinstance(error, TandemError):
        return error
    return InternalError(f"a step failed: {_in_words(error)}")


def _in_words(error: Exception) -> str:
    first_line = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__
