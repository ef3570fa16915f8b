"""
The threads that talk to one executor: connect, open a session, carry the step stream.

One thread does what the core thread tells it through `connect` and `attach`, and reports through
`take_events`, waking the core's poll. It decides nothing about steps: the session's state belongs
to the core thread (`executor_session`). Steps go through a queue that gRPC's own writer empties.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc

from scheduler_svc.executor_description import ExecutorDescription, read_description
from scheduler_svc.model_cache import ModelCache
from tandem.errors import IncompatibleExecutor, SessionHeld, SessionLost, TandemError
from tandem.executor.v1 import executor_service_pb2 as executor_pb2
from tandem.executor.v1 import session_pb2
from tandem.executor.v1.executor_service_pb2_grpc import ExecutorServiceStub
from tandem.link import PROTOCOL_VERSION
from tandem.link.batch import StepFailed, StepResult
from tandem.link.session import Attached, Heartbeat
from tandem.link.wire import MAX_MESSAGE_BYTES, decode_response
from tandem.status import PeerUnavailable, from_rpc_error

DESCRIBE_DEADLINE_S = 5.0
OPEN_DEADLINE_S = 60.0
"""Opening waits for the executor's running step."""
TOKENIZER_DEADLINE_S = 120.0
STOP_DEADLINE_S = 2.0
FIRST_BACKOFF_S = 0.1
LONGEST_BACKOFF_S = 2.0

_CHANNEL_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    # How long one attempt to connect may take, however early in the back-off: a busy peer needs it.
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", int(LONGEST_BACKOFF_S * 1000)),
    # A node that vanished closes nothing: only an unanswered ping ends its connection. What bounds
    # the wait for the answer is the ping's own timeout, a minute unless set.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.enable_retries", 0),
    # The link is private: a proxy that the environment names for the outside cannot carry it.
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
)
_EXECUTE = "/tandem.executor.v1.ExecutorService/Execute"


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOpened:
    """The executor granted a session; no stream is attached yet."""

    description: ExecutorDescription
    tokenizer_dir: Path
    session_epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectFailed:
    """An attempt to connect failed; the link goes on trying."""

    error: TandemError
    retry_in_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamMessage:
    """One message up a step stream."""

    stream: int
    message: Attached | StepResult | StepFailed | Heartbeat


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamBroken:
    """A step stream ended; nothing more comes from it."""

    stream: int
    error: TandemError


LinkEvent = SessionOpened | ConnectFailed | StreamMessage | StreamBroken


def backoff_s(num_failures: int) -> float:
    """Seconds to wait after this many failures in a row; none after none."""
    if num_failures == 0:
        return 0.0
    return float(min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2 ** min(num_failures - 1, 16)))


def _stub(channel: grpc.Channel) -> ExecutorServiceStub:
    return ExecutorServiceStub(channel)  # type: ignore[no-untyped-call]  # generated code


def _cancel(call: grpc.Call) -> None:
    call.cancel()  # type: ignore[no-untyped-call]  # grpc-stubs leave it bare


@dataclass(frozen=True, slots=True)
class _Connect:
    delay_s: float


@dataclass(frozen=True, slots=True)
class _Stream:
    number: int
    delay_s: float
    outbound: queue.SimpleQueue[bytes | None]


class ExecutorLink:
    """Connection to the executor at one address. Public methods are for the core thread."""

    def __init__(
        self,
        address: str,
        *,
        scheduler_id: str,
        lease_ms: int,
        cache: ModelCache,
        accept: Callable[[ExecutorDescription], object],
        wake: Callable[[], None],
    ) -> None:
        """
        Args:
            address: host:port of the executor.
            scheduler_id: Who we are, for the executor's logs and refusals; random per start.
            lease_ms: Silence after which another scheduler may open a session.
            cache: Where tokenizer files go.
            accept: Raises IncompatibleExecutor for an executor that must not be used; called on the
                link's thread, before a session is opened.
            wake: Called after every event; any thread.
        """
        self._address = address
        self._scheduler_id = scheduler_id
        self._lease_ms = lease_ms
        self._cache = cache
        self._accept = accept
        self._wake = wake
        self._commands: queue.SimpleQueue[_Connect | _Stream | None] = queue.SimpleQueue()
        self._events: deque[LinkEvent] = deque()
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._call: grpc.Call | None = None
        self._last_broken = 0
        """Streams up to this number are to end; they and `_call` are guarded by `_lock`."""
        self._stream = _Stream(0, 0.0, queue.SimpleQueue())
        self._thread = threading.Thread(target=self._run, name="executor-link", daemon=True)

    def start(self) -> None:
        """Start the thread; it waits for `connect`."""
        self._thread.start()

    def connect(self, delay_s: float = 0.0) -> None:
        """Open a session, however many attempts it takes; ends with a SessionOpened."""
        self._commands.put(_Connect(delay_s))

    def attach(self, raw_attach: bytes, delay_s: float = 0.0) -> int:
        """Open a step stream that starts with this message; gives the stream's number."""
        self.break_stream()
        self._stream = _Stream(self._stream.number + 1, delay_s, queue.SimpleQueue())
        self._stream.outbound.put(raw_attach)
        self._commands.put(self._stream)
        return self._stream.number

    def send(self, raw_step: bytes) -> None:
        """Queue a message on the newest stream; one that has ended drops it."""
        self._stream.outbound.put(raw_step)

    def break_stream(self) -> None:
        """End the newest stream, if it has not ended already."""
        with self._lock:
            self._last_broken = self._stream.number
            if self._call is not None:
                _cancel(self._call)

    def take_events(self) -> Iterator[LinkEvent]:
        """What happened until this call, in order; what happens meanwhile waits for the next."""
        for _ in range(len(self._events)):
            yield self._events.popleft()

    def stop(self, *, release: bool) -> None:
        """End everything; with `release` another scheduler need not wait for our whole lease."""
        self._stopping.set()
        self._stream.outbound.put(None)
        self.break_stream()
        self._commands.put(None)
        self._thread.join(timeout=STOP_DEADLINE_S)
        if release:
            self._shorten_lease()

    def _post(self, event: LinkEvent) -> None:
        self._events.append(event)
        self._wake()

    def _run(self) -> None:
        with grpc.insecure_channel(self._address, options=_CHANNEL_OPTIONS) as channel:
            while (command := self._commands.get()) is not None:
                if self._stopping.wait(command.delay_s):
                    return
                if isinstance(command, _Connect):
                    self._connect(_stub(channel))
                else:
                    self._carry(channel, command)

    def _connect(self, stub: ExecutorServiceStub) -> None:
        num_failures = 0
        while not self._stopping.is_set():
            try:
                self._post(self._open(stub))
            except grpc.RpcError as error:
                failure = from_rpc_error(error)
            except TandemError as error:
                failure = error
            else:
                return
            num_failures += 1
            wait_s = self._wait_after(failure, num_failures)
            self._post(ConnectFailed(error=failure, retry_in_s=wait_s))
            self._stopping.wait(wait_s)

    def _wait_after(self, failure: TandemError, num_failures: int) -> float:
        """Back off; a session held by another is asked for again when its lease may have ended."""
        if isinstance(failure, SessionHeld):
            age_s = float(failure.metadata.get("age_ms", "0")) / 1000
            return max(FIRST_BACKOFF_S, self._lease_ms / 1000 - age_s)
        if isinstance(failure, IncompatibleExecutor):
            return LONGEST_BACKOFF_S
        return backoff_s(num_failures)

    def _open(self, stub: ExecutorServiceStub) -> SessionOpened:
        answer = stub.Describe(executor_pb2.DescribeRequest(), timeout=DESCRIBE_DEADLINE_S)
        description = read_description(answer)
        self._accept(description)
        tokenizer_dir = self._cache.find(description.fingerprint)
        if tokenizer_dir is None:
            files = stub.GetTokenizer(
                executor_pb2.GetTokenizerRequest(), timeout=TOKENIZER_DEADLINE_S
            )
            tokenizer_dir = self._cache.store(description.fingerprint, files)
        session = stub.OpenSession(self._open_request(self._lease_ms), timeout=OPEN_DEADLINE_S)
        if session.boot_id != description.boot_id:
            raise SessionLost("the executor restarted between Describe and OpenSession")
        return SessionOpened(
            description=description,
            tokenizer_dir=tokenizer_dir,
            session_epoch=session.session_epoch,
        )

    def _open_request(self, lease_ms: int) -> session_pb2.OpenSessionRequest:
        return session_pb2.OpenSessionRequest(
            protocol_version=PROTOCOL_VERSION,
            scheduler_id=self._scheduler_id,
            take_over=False,
            lease_ms=lease_ms,
        )

    def _carry(self, channel: grpc.Channel, stream: _Stream) -> None:
        """Run one step stream to its end."""
        # No serializers: both directions carry the bytes of tandem.link.wire.
        call = channel.stream_stream(_EXECUTE, None, None)(iter(stream.outbound.get, None))
        with self._lock:
            self._call = call
            if stream.number <= self._last_broken:
                _cancel(call)
        error: TandemError = PeerUnavailable("the executor ended the step stream")
        try:
            for raw in call:
                self._post(StreamMessage(stream=stream.number, message=decode_response(raw)))
        except grpc.RpcError as broken:
            error = from_rpc_error(broken)
        except SessionLost as malformed:
            error = malformed
            _cancel(call)
        with self._lock:
            self._call = None
        stream.outbound.put(None)
        self._post(StreamBroken(stream=stream.number, error=error))

    def _shorten_lease(self) -> None:
        """Open our own session again with the shortest lease, so that it ends a second later."""
        with grpc.insecure_channel(self._address, options=_CHANNEL_OPTIONS) as channel:
            try:
                _stub(channel).OpenSession(
                    self._open_request(lease_ms=1000), timeout=DESCRIBE_DEADLINE_S
                )
            except grpc.RpcError:
                return  # An executor that cannot be reached will let our lease end by itself.
