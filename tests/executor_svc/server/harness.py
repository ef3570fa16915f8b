"""A real server in this process with a runner that can be held, and the scheduler's side of its wire."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc

from executor_svc.config.settings import load_settings
from executor_svc.engine import load_engine
from executor_svc.server.loaded import Engine
from executor_svc.server.server import ExecutorServer
from executor_svc.step.runner import ModelRunner
from tandem.errors import TandemError
from tandem.executor.v1 import executor_service_pb2 as executor_pb2
from tandem.executor.v1 import session_pb2
from tandem.executor.v1.executor_service_pb2_grpc import ExecutorServiceStub
from tandem.link import PROTOCOL_VERSION
from tandem.link.batch import Batch
from tandem.link.codec.wire import decode_response, encode_attach
from tandem.link.commands import Command
from tandem.link.results import StepFailed, StepResult
from tandem.link.scheduler_end import SchedulerEnd
from tandem.link.session import Attached, Heartbeat
from tandem.link.slots.slot_state import SlotState
from tandem.network.link_token import LinkToken
from tandem.status import from_rpc_error
from tests import waiting
from tests.executor_svc.stepping import Row, admission, batch
from tests.threads import NUM_THREADS

DEADLINE_S = 120.0
"""
Limit in seconds, long enough to compile the C++ kernels on a busy machine for the first time.
"""
EXECUTE = "/tandem.executor.v1.ExecutorService/Execute"

Message = Attached | StepResult | StepFailed | Heartbeat


def wait_until(condition: Callable[[], bool]) -> None:
    """Poll until the condition holds; fails after the deadline."""
    waiting.wait_until(condition, "the condition", DEADLINE_S)


class HeldRunner:
    """A ModelRunner that counts steps, stops before one while `gate` is closed, and can be told to fail once."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.gate = threading.Event()
        self.gate.set()
        self.executed: list[int] = []
        self.is_waiting = False
        self.fails_with: Exception | None = None
        self.num_resets = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._runner, name)

    def reset(self) -> None:
        self.num_resets += 1
        self._runner.reset()

    def launch(self, delta: Batch, step_id: int) -> Callable[[], StepResult]:
        self.is_waiting = True
        assert self.gate.wait(DEADLINE_S)
        self.is_waiting = False
        if self.fails_with is not None:
            error, self.fails_with = self.fails_with, None
            raise error
        self.executed.append(step_id)
        return self._runner.launch(delta, step_id)


@dataclass
class RunningServer:
    """One executor; `runner` is None until it is loaded."""

    server: ExecutorServer
    channel: grpc.Channel
    fatal: list[TandemError]
    runners: list[HeldRunner]

    @property
    def stub(self) -> ExecutorServiceStub:
        return ExecutorServiceStub(self.channel)

    @property
    def runner(self) -> HeldRunner:
        return self.runners[0]

    def describe(self) -> executor_pb2.DescribeResponse:
        return self.stub.Describe(executor_pb2.DescribeRequest(), timeout=DEADLINE_S)

    def open_session(self, scheduler_name: str = "one", **fields: object) -> int:
        return self.stub.OpenSession(
            open_request(scheduler_name, **fields), timeout=DEADLINE_S
        ).session_epoch


def open_request(scheduler_name: str = "one", **fields: object) -> session_pb2.OpenSessionRequest:
    settings = {
        "protocol_version": PROTOCOL_VERSION,
        "scheduler_incarnation": "1",
        "take_over": False,
        "lease_ms": 60_000,
    }
    return session_pb2.OpenSessionRequest(scheduler_name=scheduler_name, **{**settings, **fields})


def start_server(
    model_dir: Path,
    *flags: str,
    hold_loading: threading.Event | None = None,
    connect: Callable[[str], grpc.Channel] = grpc.insecure_channel,
) -> RunningServer:
    """Start on a free port, to be called by `connect`; waits for readiness unless loading is held."""
    settings = load_settings(
        [
            "--model",
            str(model_dir),
            "--dtype",
            "float32",
            "--num-threads",
            str(NUM_THREADS),
            "--listen",
            "127.0.0.1:0",
            *flags,
        ],
        {},
    )
    runners: list[HeldRunner] = []

    def load(boot_id: str) -> Engine:
        if hold_loading is not None:
            assert hold_loading.wait(DEADLINE_S)
        engine = load_engine(settings, boot_id)
        runners.append(HeldRunner(engine.runner))
        return replace(engine, runner=runners[0])

    fatal: list[TandemError] = []
    token_file = settings.settings.link_token_file
    server = ExecutorServer(
        load,
        fatal.append,
        tls=settings.settings.tls,
        token=None if token_file is None else LinkToken(token_file),
    )
    server.listen(settings.settings.listen)
    server.load()
    running = RunningServer(server, connect(server.address), fatal, runners)
    if hold_loading is None:
        wait_until(lambda: bool(fatal) or is_loaded(running))
    return running


def is_loaded(running: RunningServer) -> bool:
    try:
        running.describe()
    except grpc.RpcError:
        return False
    return True


def refusal(call: Callable[[], object]) -> TandemError:
    """The typed error with which a call ends."""
    try:
        call()
    except grpc.RpcError as error:
        return from_rpc_error(error)
    raise AssertionError("the call was not refused")


class Stream:
    """One Execute stream from the scheduler's side; messages arrive on a thread."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.call = channel.stream_stream(EXECUTE)(iter(self._outgoing.get, None))
        self.messages: list[Message] = []
        self.error: TandemError | None = None
        self.has_ended = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        try:
            for raw in self.call:
                self.messages.append(decode_response(raw))
        except grpc.RpcError as error:
            self.error = from_rpc_error(error)
        self.has_ended.set()

    def send(self, raw: bytes) -> None:
        self._outgoing.put(raw)

    def cut(self) -> None:
        """Break the stream as a lost connection would."""
        self.call.cancel()
        assert self.has_ended.wait(DEADLINE_S)

    def end(self) -> None:
        """Half-close."""
        self._outgoing.put(None)

    def of(self, kind: type) -> list[Message]:
        return [message for message in list(self.messages) if isinstance(message, kind)]

    def ended_with(self) -> TandemError | None:
        assert self.has_ended.wait(DEADLINE_S), "the stream did not end"
        return self.error


@dataclass
class StepClient:
    """
    The scheduler's end of one session: plans tiny batches and mirrors slot state.

    One sequence lives in slot 0; `next_batch` admits it first and decodes it afterwards.
    """

    running: RunningServer
    scheduler_name: str = "one"
    end: SchedulerEnd = field(default_factory=SchedulerEnd)
    results: list[StepResult] = field(default_factory=list)

    def __post_init__(self) -> None:
        about = self.running.describe()
        self.slots = SlotState(
            about.num_slots,
            -(-about.max_model_len // about.block_size),
            about.block_size,
            about.num_blocks,
            about.num_host_blocks,
        )
        self.end.open(about.boot_id, self.running.open_session(self.scheduler_name), 64)

    def attach(self) -> Stream:
        """Open a stream and send again what the executor has not received."""
        stream = Stream(self.running.channel)
        stream.send(encode_attach(self.end.attach()))
        wait_until(lambda: bool(stream.messages) or stream.has_ended.is_set())
        for raw in self.end.on_attached(stream.messages[0]):
            stream.send(raw)
        return stream

    def next_batch(self) -> Batch:
        if not self.slots.live[0]:
            prompt = [65, 66, 67, 68]
            return batch(Row(0, 0, len(prompt)), admits=[admission(0, prompt, [1, 2, 3, 4])])
        return batch(Row(0, int(self.slots.planned[0])))

    def plan(self, command: Command | None = None) -> bytes:
        """The bytes of the next step, not yet sent."""
        command = self.next_batch() if command is None else command
        if isinstance(command, Batch):
            self.slots.apply(command)
        return self.end.send(command, self.slots.state_hash)[1]

    def step(self, stream: Stream) -> StepResult:
        """Send one step and wait for its result."""
        stream.send(self.plan())
        wanted = self.end.last_sent_step_id
        wait_until(lambda: self.apply(stream) >= wanted or stream.has_ended.is_set())
        return self.results[-1]

    def apply(self, stream: Stream) -> int:
        """Apply results that came; gives the last applied step id."""
        for result in stream.of(StepResult):
            if self.end.on_result(result):
                self.results.append(result)
        return self.end.last_applied_step_id

    def steps(self, stream: Stream, count: int) -> Iterator[StepResult]:
        for _ in range(count):
            yield self.step(stream)
