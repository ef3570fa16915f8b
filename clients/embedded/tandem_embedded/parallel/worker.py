"""One runner of an engine, with the steps under way between it and the core."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import ParamSpec, TypeVar

from scheduler_svc.core.executor_port import ExecutorPort
from tandem.errors import InvalidConfig, SessionLost
from tandem.link.batch import Batch
from tandem.link.commands import KvMode
from tandem.link.results import StepResult
from tandem_embedded.backend import Backend, LaunchingRunner
from tandem_embedded.parallel.devices import on_device
from tandem_embedded.parallel.under_way import Computing, Launched, StepUnderWay

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")

Taken = tuple[Batch, StepResult]
"""A step's batch and result; the batch of a command is an empty one."""


class Worker:
    """
    A runner where it computes, with the core's port to it and the steps under way between them. The
    driver owns it, and guards the port with its lock.

    A runner that is alone computes on the thread that drives, another on a thread of its own. One
    whose model has several stages launches its steps, and several are under way.

    Attributes:
        port: Port of the core.
        num_steps: Number of steps that were sent to the runner.
    """

    def __init__(
        self,
        port: ExecutorPort,
        backend: Backend,
        *,
        is_alone: bool,
        on_done: Callable[[], None],
    ) -> None:
        """
        Args:
            port: Port of the core.
            backend: Runner and its device.
            is_alone: True for the only runner of an engine.
            on_done: Called after each step, on the runner's thread.

        Raises:
            InvalidConfig: A model of several stages has a runner that cannot launch steps, or is
                one of several in this process.
        """
        self.port = port
        self.num_steps = 0
        self._runner = backend.runner
        self._launching = _launching(backend, is_alone=is_alone)
        """The runner again if it launches steps; else None."""
        self._on_done = on_done
        self._device = backend.device
        self._thread = _Inline() if is_alone else _thread(port.number)
        self._planned: tuple[Batch, int] | None = None
        self._under_way: deque[tuple[Batch, StepUnderWay]] = deque()
        self._num_ahead = 0
        """Number of steps under way whose results are not due."""
        self._has_failed = False
        """True after a step failed, until `start_over`; set on the runner's thread too."""

    def plan(self, now: float) -> None:
        """Plan the next step, unless results are due first; the core's lock is held."""
        most = self.port.lookahead(0.0)
        self._num_ahead = most - 1
        if self._has_failed or len(self._under_way) >= most:
            return
        batch = self.port.schedule(now)
        if batch is None:
            self._num_ahead = 0
        else:
            self._planned = batch, self.port.state_hash

    def start(self) -> None:
        """Let the runner compute the step that was planned, if there is one."""
        planned, self._planned = self._planned, None
        if planned is not None:
            self.send(*planned)

    def send(self, batch: Batch, state_hash: int) -> None:
        """Let the runner compute a batch, after which its slots have this hash."""
        self.num_steps += 1
        if self._launching is None:
            step = self._submitted(batch, state_hash)
        else:
            step = self._launched(self._launching, batch, state_hash)
        self._under_way.append((batch, step))

    def acknowledge(self) -> None:
        """Send an empty batch: its result is that of a command, which was taken from the core."""
        self.send(Batch(), self.port.state_hash)

    @property
    def has_step(self) -> bool:
        """True while a step is planned, or has no applied result."""
        return self._planned is not None or self.is_under_way

    @property
    def is_under_way(self) -> bool:
        """True while a step that was sent has no applied result."""
        return bool(self._under_way)

    @property
    def is_due(self) -> bool:
        """True while a result must be applied before the next step is planned."""
        return self._num_due > 0

    def due_results(self) -> Sequence[StepResult]:
        """Wait for all results that are due; raises the error of a failed step."""
        return [self._result_of(step) for _, step in islice(self._under_way, self._num_due)]

    def try_take(self) -> Taken | None:
        """
        Return the next step whose result is due, or None if there is none yet; raises the error of
        a failed step.
        """
        if not self.is_due or not self._under_way[0][1].may_be_taken:
            return None
        return self.take()

    def take(self) -> Taken:
        """Wait for the oldest step and its result; raises the error of a failed step."""
        batch, step = self._under_way.popleft()
        return batch, self._result_of(step)

    def suspend(self, mode: KvMode) -> None:
        """Let the runner release KV memory after the steps under way; see `Runner.suspend`."""
        self._call(partial(self._runner.suspend, mode))

    def resume(self) -> None:
        """End a suspension of the runner; see `Runner.resume`."""
        self._call(self._runner.resume)

    def start_over(self) -> None:
        """
        Drop all steps and clear the runner.

        Raises:
            Exception: The runner cannot be cleared. Its next step fails, as it has other slots than
                the core.
        """
        self._planned = None
        self._drop_all()
        try:
            self._call(self._runner.reset)
        finally:
            self._has_failed = False

    def close(self, *, may_wait: bool) -> None:
        """
        Drop all steps and the runner, and end its thread after the step that it computes.

        Args:
            may_wait: False where other ranks may not have begun the steps that are launched. These
                are waited for otherwise, unless one failed.
        """
        if may_wait and not self._has_failed:
            self._drop_all()
        self._thread.shutdown(cancel_futures=True)
        self._under_way.clear()
        self._launching = None
        self.__dict__.pop("_runner", None)

    @property
    def _num_due(self) -> int:
        return max(0, len(self._under_way) - (0 if self._has_failed else self._num_ahead))

    def _result_of(self, step: StepUnderWay) -> StepResult:
        try:
            return step.result()
        except Exception:
            self._has_failed = True
            raise

    def _drop_all(self) -> None:
        while self._under_way:
            _, step = self._under_way.popleft()
            step.drop()

    def _call(self, function: Callable[[], None]) -> None:
        """Call a function of the runner where it computes, after the steps under way."""
        self._submit(function).result()

    def _submit(self, function: Callable[[], _Result]) -> Future[_Result]:
        return self._thread.submit(_called_on, self._device, function)

    def _submitted(self, batch: Batch, state_hash: int) -> StepUnderWay:
        future = self._submit(partial(self._compute, batch, state_hash, self.num_steps))
        future.add_done_callback(lambda _: self._on_done())
        return Computing(future)

    def _launched(self, runner: LaunchingRunner, batch: Batch, state_hash: int) -> StepUnderWay:
        try:
            collect = self._submit(partial(runner.launch, batch, self.num_steps)).result()
            self._check_hash(state_hash, self.num_steps)
        except Exception as error:  # noqa: BLE001  # raised again where its result is asked for
            self._has_failed = True
            return Launched(partial(_fail, error))
        return Launched(collect)

    def _check_hash(self, state_hash: int, step_id: int) -> None:
        if self._runner.state_hash != state_hash:
            raise SessionLost(f"scheduler and runner disagree after step {step_id}")

    def _compute(self, batch: Batch, state_hash: int, step_id: int) -> StepResult:
        if self._has_failed:
            raise SessionLost(f"the step before step {step_id} failed")
        try:
            result = self._runner.execute(batch, step_id)
            self._check_hash(state_hash, step_id)
        except Exception:
            self._has_failed = True
            raise
        return result


def _launching(backend: Backend, *, is_alone: bool) -> LaunchingRunner | None:
    """Return the runner of a model with several stages, which launches steps; None for another."""
    if backend.num_stages == 1:
        return None
    if not isinstance(backend.runner, LaunchingRunner):
        raise InvalidConfig(
            f"a backend of {backend.num_stages} stages needs a runner with a method launch "
            "(LaunchingRunner)",
            field="backend",
        )
    if not is_alone:
        raise InvalidConfig(
            f"a backend of {backend.num_stages} stages must be the only one: start one engine for "
            "each model",
            field="backend",
        )
    return backend.runner


def _fail(error: Exception) -> StepResult:
    raise error


def _called_on(device: str, function: Callable[[], _Result]) -> _Result:
    """Call a function whose kernels run on a device, on whichever thread this is."""
    with on_device(device):
        return function()


class _Inline(Executor):
    """Computes at once, on the thread that submits, of which there may be several."""

    def submit(
        self, fn: Callable[_Given, _Result], /, *args: _Given.args, **kwargs: _Given.kwargs
    ) -> Future[_Result]:
        future: Future[_Result] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001  # raised again by `Future.result`
            future.set_exception(error)
        return future


def _thread(number: int) -> Executor:
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"tandem-runner-{number}")
