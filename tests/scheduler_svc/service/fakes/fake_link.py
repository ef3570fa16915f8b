"""A link without threads and sockets, driven by the test."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from scheduler_svc.core.request.geometry import ExecutorGeometry
from scheduler_svc.executor_client.connection import ModelInUse
from scheduler_svc.executor_client.description import ExecutorDescription
from scheduler_svc.executor_client.link_events import (
    LinkEvent,
    SessionOpened,
    StreamBroken,
    StreamMessage,
)
from tandem.errors import SessionLost, TandemError
from tandem.link.codec.wire import decode_request, decode_response, encode_response
from tandem.link.commands import Step
from tandem.link.executor_end import ExecutorEnd
from tandem.link.refusal import refused_batch
from tandem.link.results import StepFailed, StepResult, StepTimings
from tandem.link.session import Attach, Heartbeat, SchedulerId
from tandem.sampling_params import SamplingParams
from tandem.status import PeerUnavailable
from tests.scheduler_svc.service.fakes.arithmetic_runner import GEOMETRY, ArithmeticRunner

SCHEDULER = SchedulerId(name="test", incarnation="1")


def describe(
    boot_id: str, fingerprint: str = "f" * 64, geometry: ExecutorGeometry = GEOMETRY
) -> ExecutorDescription:
    return ExecutorDescription(
        boot_id=boot_id,
        fingerprint=fingerprint,
        model_name="sums",
        architecture="Arithmetic",
        dtype="float32",
        device="cpu",
        vocab_size=1000,
        eos_token_ids=(1,),
        geometry=geometry,
        max_inflight_steps=16,
        kv_bytes_per_block=1,
        default_sampling=SamplingParams(),
        features=("suspend",),
    )


class FakeLink:
    """
    One executor that may be absent, slow (`is_holding`), cut off, or replaced by another boot.

    Attributes:
        is_holding: Steps are received but not computed until `compute`.
        is_up: Attaching works.
        is_stopped: The process receives messages, but computes and sends nothing, as under SIGSTOP.
        commands: Calls of the session, in order: "connect", "connect elsewhere", "seek",
            "seek path", "attach" and "release".
        computes_s: Seconds that results report for computing their steps.
        parts: Other times that results report for their steps.
        graph: Number of graph tokens that results report.
        num_to_drop: Number of steps that are lost on their way down, from the next one.
        num_results_to_drop: Number of results that are lost on their way up.
        required: The model that may be connected to; None for any.
    """

    def __init__(self) -> None:
        self.is_holding = False
        self.is_up = False
        self.is_stopped = False
        self.commands: list[str] = []
        self.num_replayed = 0
        self.computes_s = 0.0
        self.parts = StepTimings()
        self.graph = 0
        self.num_to_drop = 0
        self.num_results_to_drop = 0
        self.required: ModelInUse | None = None
        self._events: deque[LinkEvent] = deque()
        self._wants_session = self._is_refusing = False
        self._stream = 0
        self._attach_id = 0
        self._pending: deque[Step] = deque()
        self._waiting_attach: Attach | None = None
        self._ends: dict[str, ExecutorEnd] = {}

    # Calls of the session

    def require(self, model: ModelInUse | None) -> None:
        self.required = model

    def seek(self, *, may_move: bool) -> None:
        self.commands.append("seek" if may_move else "seek path")

    def start(self) -> None:
        """Start nothing: there is no thread."""

    def turn_with(self, turn: Callable[[], None]) -> None:
        self.turn = turn

    def connect(self, delay_s: float = 0.0, *, elsewhere: bool = False) -> None:
        self.commands.append("connect elsewhere" if elsewhere else "connect")
        self._wants_session = True
        if self.is_up:
            self._open()

    def attach(self, raw_attach: bytes, delay_s: float = 0.0) -> int:
        self.commands.append("attach")
        self._stream += 1
        attach = decode_request(raw_attach)
        assert isinstance(attach, Attach)
        self._waiting_attach = attach
        if self.is_up and not self.is_stopped:
            self._try_attach(attach)
        return self._stream

    def _try_attach(self, attach: Attach) -> None:
        self._waiting_attach = None
        try:
            attached, results = self.end.attach(attach, 0.0)
        except SessionLost as error:
            self._broken(error)
            return
        self._attach_id = attach.attach_id
        self.num_replayed += len(results)
        kept = results[self.num_results_to_drop :]
        self.num_results_to_drop = max(0, self.num_results_to_drop - len(results))
        for raw in (encode_response(attached), *kept):
            self._events.append(StreamMessage(stream=self._stream, message=decode_response(raw)))

    def send(self, raw_step: bytes) -> None:
        if self._is_refusing:
            return
        try:
            step = decode_request(raw_step)
        except SessionLost as error:
            self._refuse(error)
            return
        assert isinstance(step, Step)
        if not self.is_up:
            return
        if self.num_to_drop:
            self.num_to_drop -= 1
            return
        if self.end.receive(step, raw_step, self._attach_id, 0.0):
            self._pending.append(step)
        if not self.is_holding and not self.is_stopped:
            self.compute()

    def release(self) -> None:
        self.commands.append("release")
        self.is_up = False

    def break_stream(self) -> None:
        pass

    @property
    def has_events(self) -> bool:
        return bool(self._events)

    def take_events(self) -> Iterator[LinkEvent]:
        for _ in range(len(self._events)):
            yield self._events.popleft()

    # Actions of tests

    def boot(
        self,
        boot_id: str,
        *,
        fingerprint: str = "f" * 64,
        geometry: ExecutorGeometry = GEOMETRY,
        address: str = "fake:1",
    ) -> None:
        """
        Start an executor, or let the one with this boot id be heard again, which goes on numbering
        its sessions; answer a session that waits to be opened or a stream that waits to be attached.
        """
        self.runner = ArithmeticRunner(boot_id, geometry)
        self.end = self._ends.setdefault(boot_id, ExecutorEnd(boot_id, 16))
        self.description = describe(boot_id, fingerprint, geometry)
        self.address = address
        self._pending.clear()
        self.is_up = True
        if self._wants_session:
            self._open()
        elif self._waiting_attach is not None:
            self._try_attach(self._waiting_attach)

    def compute(self) -> None:
        """Compute every step received; results go up while a stream is attached."""
        while self._pending:
            step = self._pending.popleft()
            self.end.start(step.step_id, 0.0)
            timings = replace(self.parts, total_ns=int(self.computes_s * 1e9))
            try:
                computed = self.runner.execute(step)
            except SessionLost as error:
                self._refuse(refused_batch(error, step.step_id))
                return
            except TandemError as error:
                self._fail(step, error)
                return
            result = replace(computed, timings=timings, graph=self.graph)
            raw = encode_response(result)
            if self.end.complete(step.session_epoch, step.step_id, raw):
                result = decode_response(raw)
                assert isinstance(result, StepResult)
                if self.num_results_to_drop:
                    self.num_results_to_drop -= 1
                    continue
                self._events.append(StreamMessage(stream=self._stream, message=result))

    def beat(self, elapsed_ms: int = 0, running_step_id: int | None = None) -> None:
        """
        Send a heartbeat; its running step is the one that waits to be computed, if there is one.
        """
        if running_step_id is None:
            running_step_id = self._pending[0].step_id if self._pending else 0
        beat = Heartbeat(
            running_step_id=running_step_id,
            elapsed_ms=elapsed_ms,
            last_completed_step_id=self.end.last_completed_step_id,
        )
        self.post(StreamMessage(stream=self._stream, message=beat))

    def go_on(self) -> None:
        """Let a stopped process go on, as after SIGCONT."""
        self.is_stopped = False
        if self._waiting_attach is not None:
            self._try_attach(self._waiting_attach)
        self.compute()

    def post(self, event: LinkEvent) -> None:
        """Report an event to the session."""
        self._events.append(event)

    def cut(self, error: TandemError | None = None) -> None:
        """Break the stream; messages on their way up are lost."""
        self._events.clear()
        self.end.detach(self.end.session_epoch, self._attach_id)
        self._broken(error or PeerUnavailable("cut"))

    def kill(self) -> None:
        """End the executor process, as if it died."""
        self.cut()
        self.is_up = False

    def _refuse(self, error: SessionLost) -> None:
        """End the session for a batch that breaks its rules; later steps of it come to nothing."""
        self._is_refusing = True
        self._pending.clear()
        self.cut(error)

    def _fail(self, step: Step, error: TandemError) -> None:
        """End the session for a step that failed as a whole; later steps come to nothing."""
        self._is_refusing = True
        self._pending.clear()
        failure = StepFailed(
            boot_id=self.runner.boot_id,
            step_id=step.step_id,
            reason=error.reason,
            message=error.message,
        )
        self.post(StreamMessage(stream=self._stream, message=failure))

    def _broken(self, error: TandemError) -> None:
        self._events.append(StreamBroken(stream=self._stream, error=error))

    def _open(self) -> None:
        self._wants_session = self._is_refusing = False
        self._pending.clear()
        self.runner.reset()
        epoch = self.end.open_session(SCHEDULER, False, 1.0, 0.0)
        self._events.append(
            SessionOpened(
                description=self.description,
                tokenizer_dir=Path("/none"),
                session_epoch=epoch,
                address=self.address,
            )
        )
