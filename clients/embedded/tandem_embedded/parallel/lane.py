"""One runner of an engine, with the steps on their way between it and the core."""

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
from tandem.link.results import StepResult
from tandem_embedded.backend import Backend, LaunchingRunner
from tandem_embedded.parallel.under_way import Computing, Launched, StepUnderWay

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


class Lane:
    """
    A runner and the core's port to it; the driver owns it and guards the port with its lock.

    A runner that is alone computes on the thread that drives, another on a thread of its own. Of a
    model with several stages each has steps under way: so many of each of the core's lanes.

    Attributes:
        port: Port of the core.
        runner: Runner, which others call by `call` alone.
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
        self.runner = backend.runner
        self.num_steps = 0
        self._launching: LaunchingRunner | None = None
        """The runner again, if its model has several stages: it launches steps, in lanes."""
        if backend.num_stages > 1:
            if not isinstance(backend.runner, LaunchingRunner):
                raise InvalidConfig(
                    f"a backend of {backend.num_stages} stages needs a runner with a method launch "
                    "(LaunchingRunner)",
                    field="backend",
                )
            if not is_alone:
                raise InvalidConfig(
                    f"a backend of {backend.num_stages} stages must be the only one: start one "
                    "engine for each model",
                    field="backend",
                )
            self._launching = backend.runner
        self._on_done = on_done
        self._worker = _inline(backend.device) if is_alone else _thread(port.number, backend.device)
        self._planned: tuple[Batch, int] | None = None
        self._under_way: deque[StepUnderWay] = deque()
        self._num_ahead = 0
        """Number of steps under way whose results are not due."""
        self._has_failed = False
        """True after a step failed, until `start_over`; set on the runner's thread."""

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
        if self._launching is not None:
            self._under_way.append(self._launched(self._launching, batch, state_hash))
            return
        future = self._worker.submit(self._compute, batch, state_hash, self.num_steps)
        self._under_way.append(Computing(future))
        future.add_done_callback(lambda _: self._on_done())

    @property
    def is_due(self) -> bool:
        """True while a result must be applied before the next step is planned."""
        num_ahead = 0 if self._has_failed else self._num_ahead
        return len(self._under_way) > num_ahead

    def try_take(self) -> StepResult | None:
        """Return the next result that is due and has arrived; raises the error of a failed step."""
        if not self.is_due or not self._under_way[0].has_arrived:
            return None
        return self._under_way.popleft().result()

    def take(self) -> StepResult:
        """Wait for the oldest result; raises the error of a failed step."""
        return self._under_way.popleft().result()

    @property
    def has_step(self) -> bool:
        """True while a step is planned, or has no applied result."""
        return self._planned is not None or self.is_under_way

    @property
    def is_under_way(self) -> bool:
        """True while a step has no applied result."""
        return bool(self._under_way)

    def known(self) -> Sequence[StepResult]:
        """
        Return results that ranks compare before they apply any: the newest one, or those that are
        due where stages have newer steps under way. Raises the error of a failed step.
        """
        num_due = len(self._under_way) - self._num_ahead
        if self._launching is not None and not self._has_failed:
            return [step.result() for step in islice(self._under_way, max(0, num_due))]
        return [self._under_way[-1].result()] if self._under_way else []

    def call(
        self, function: Callable[_Given, _Result], *args: _Given.args, **named: _Given.kwargs
    ) -> _Result:
        """Call a function of the runner where it computes, after the steps under way."""
        return self._worker.submit(partial(function, *args, **named)).result()

    def start_over(self) -> None:
        """Drop all steps and clear the runner."""
        self._planned = None
        for step in self._under_way:
            step.settle()
        self._under_way.clear()
        self.call(self.runner.reset)
        self._has_failed = False

    def close(self) -> None:
        """
        Drop all steps and the runner, and end its thread after the step that it computes; steps
        that are launched are waited for.
        """
        if self._launching is not None and not self._has_failed:
            for step in self._under_way:
                step.settle()  # other stages wait until what they sent is taken
        self._worker.shutdown(cancel_futures=True)
        self._under_way.clear()
        self._launching = None
        self.__dict__.pop("runner", None)

    def _launched(self, runner: LaunchingRunner, batch: Batch, state_hash: int) -> StepUnderWay:
        try:
            collect = runner.launch(batch, self.num_steps)
            self._check_hash(state_hash, self.num_steps)
        except Exception as error:  # noqa: BLE001  # raised again where its result is asked for
            self._has_failed = True
            return Launched(partial(_fail, error))
        return Launched(collect)

    def _check_hash(self, state_hash: int, step_id: int) -> None:
        if self.runner.state_hash != state_hash:
            raise SessionLost(f"scheduler and runner disagree after step {step_id}")

    def _compute(self, batch: Batch, state_hash: int, step_id: int) -> StepResult:
        if self._has_failed:
            raise SessionLost(f"the step before step {step_id} failed")
        try:
            result = self.runner.execute(batch, step_id)
            self._check_hash(state_hash, step_id)
        except Exception:
            self._has_failed = True
            raise
        return result


def _fail(error: Exception) -> StepResult:
    raise error


class _Inline(Executor):
    """Computes at once, on the thread that submits."""

    def submit(
        self, fn: Callable[_Given, _Result], /, *args: _Given.args, **kwargs: _Given.kwargs
    ) -> Future[_Result]:
        future: Future[_Result] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001  # raised again by `Future.result`
            future.set_exception(error)
        return future


def _inline(device: str) -> Executor:
    _use_device(device)
    return _Inline()


def _thread(number: int, device: str) -> Executor:
    return ThreadPoolExecutor(
        max_workers=1,
        thread_name_prefix=f"tandem-runner-{number}",
        initializer=_use_device,
        initargs=(device,),
    )


def _use_device(device: str) -> None:
    """Let this thread's kernels run on a GPU."""
    if device.startswith("cuda"):
        import torch  # noqa: PLC0415  # the backend has imported it, if it needs it

        torch.cuda.set_device(device)
