"""The one thread that touches the device: loads, then runs one step after another."""

from __future__ import annotations

import threading
from collections.abc import Callable

import structlog

from executor_svc.profile.profiles import Profiles
from executor_svc.server.loaded import ALONE, Engine, StepRunner
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

CHECK_STEPS = 64
"""Steps after which the ranks of a model compare the tokens on their devices."""

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
        self._followers = ALONE
        self._checksum: Callable[[], int] = lambda: 0
        self._compare_ranks: Callable[[], None] = lambda: None
        self._num_steps = 0

    def run(self) -> None:
        """Load, then work until the link says stop or the device fails."""
        try:
            engine = self._load()
            self._is_sticky = engine.is_sticky
            self._followers = engine.followers
            self._checksum, self._compare_ranks = engine.checksum, engine.compare_ranks
            self._followers.on_failure(self._follower_failed)
            self._on_ready(engine)
            self._work(engine)
        except Exception as error:  # noqa: BLE001  # outermost frame of the thread: the process ends
            self._broken(error)

    def _broken(self, error: Exception) -> None:
        if not isinstance(error, TandemError):
            _log.error("runner_broken", exc_info=error)
            error = InternalError(f"the runner thread broke: {_in_words(error)}")
        self._on_fatal(error)

    def _work(self, engine: Engine) -> None:
        runner = engine.runner
        results = ResultThread(
            self._link,
            self._progress,
            depth=engine.depth,
            fail=self._fail,
            on_broken=self._broken,
        )
        results.start()
        try:
            while (job := self._link.next_job()) is not None:
                if isinstance(job, SlotReset):
                    results.drain()
                    self._followers.reset()
                    runner.reset()
                    self._followers.wait()
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
            self._followers.pass_on(job.raw)
            if self._profiles.active is None:
                collect = launch(runner, step)
            else:
                collect = self._profiles.run_step(lambda: launch(runner, step))
            if self._followers.exist:
                self._keep_together(step)
        except SessionLost as error:
            results.drain(held=1)
            self._lose(runner, step, refused_batch(error, step.step_id))
        except Exception as error:  # noqa: BLE001  # any failure of a step is reported, typed
            results.drain(held=1)
            self._fail(step, error)
        else:
            results.put(job, collect)

    def _keep_together(self, step: Step) -> None:
        """Wait where other ranks must have done the command too; compare with them at times."""
        if not isinstance(step.command, Batch):
            self._followers.wait()
        self._num_steps += 1
        if self._num_steps % CHECK_STEPS == 0:
            self._followers.check(self._checksum())
            self._compare_ranks()

    def _lose(self, runner: StepRunner, step: Step, error: SessionLost) -> None:
        self._followers.lose()
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
            TandemError: The device is lost (a sticky error), or there are other ranks; the process
                must end.
        """
        error = self._followers.cause_of(error)
        self._report(step, error)
        if self._followers.exist:
            raise _end_of_ranks(error)
        if self._is_sticky(error):
            raise _typed(error)

    def _follower_failed(self, error: TandemError) -> None:
        """Report, on any thread, the running step as failed by another rank; the process ends."""
        if (step := self._link.running) is not None:
            self._report(step, error)
        self._on_fatal(_end_of_ranks(error))

    def _report(self, step: Step, error: Exception) -> None:
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


def launch(runner: StepRunner, step: Step) -> Callable[[], StepResult]:
    """
    Begin one command; every rank of a model does it alike.

    Returns:
        A function that waits for the result.

    Raises:
        SessionLost: The step contradicts the slot state, or the hash after it differs.
    """
    match step.command:
        case Batch() as batch:
            collect = runner.launch(batch, step.step_id)
        case Suspend() | Resume() as command:
            # Lines of what these do have the step's id; batches are too many for that.
            with structlog.contextvars.bound_contextvars(
                step_id=step.step_id, session_epoch=step.session_epoch
            ):
                if isinstance(command, Suspend):
                    runner.suspend(command.kv_mode)
                else:
                    runner.resume()
            collect = runner.launch(Batch(), step.step_id)
    if runner.state_hash != step.state_hash:
        raise SessionLost(
            f"after step {step.step_id} the scheduler's state hash is "
            f"{step.state_hash:#018x}, the executor's {runner.state_hash:#018x}",
            metadata=LossCause.STATE_HASH.as_metadata(),
        )
    return collect


def _end_of_ranks(error: Exception) -> InternalError:
    """
    Return the error with which the process ends after one of a step: another start may well help.
    """
    return InternalError(f"the ranks of the model end with a failed step: {_typed(error).message}")


def _typed(error: Exception) -> TandemError:
    if isinstance(error, TandemError):
        return error
    return InternalError(f"a step failed: {_in_words(error)}")


def _in_words(error: Exception) -> str:
    first_line = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__
