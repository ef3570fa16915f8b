"""A small real executor in this process: gRPC, the link's executor end, and plain arithmetic."""

from __future__ import annotations

import hashlib
import queue
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import grpc

from scheduler_svc.core.request.geometry import ExecutorGeometry
from tandem.errors import Draining, SessionLost, TandemError
from tandem.executor.v1 import executor_service_pb2 as executor_pb2
from tandem.executor.v1 import session_pb2
from tandem.link import PROTOCOL_VERSION
from tandem.link.codec.wire import decode_request, encode_response
from tandem.link.commands import Step
from tandem.link.executor_end import ExecutorEnd
from tandem.link.session import Attach, SchedulerId
from tandem.status import to_grpc_status
from tests.scheduler_svc.service.fakes.arithmetic_runner import GEOMETRY, ArithmeticRunner

HEARTBEAT_S = 0.02
_PREFIX = "/tandem.executor.v1.ExecutorService/"


@dataclass(frozen=True)
class _Ending:
    """The error that ends a stream."""

    error: TandemError


@dataclass
class GrpcExecutor(grpc.GenericRpcHandler):
    """
    Attributes:
        holder: Name of a scheduler that holds the session from the start, for `holder_lease_s`.
        stopped_s: Time at which the executor's clock stands still; None while it goes.
        lead_s: Seconds added to the clock.
        computing: Lock that each step takes: a test that holds it keeps steps from being computed.
        garbage: Bytes sent before the next result.
    """

    address: str
    boot_id: str = "boot-1"
    fingerprint: str = "f" * 64
    geometry: ExecutorGeometry = GEOMETRY
    protocol_version: int = PROTOCOL_VERSION
    files: dict[str, bytes] = field(default_factory=lambda: {"tokenizer.json": b"{}"})
    sha256: str | None = None
    holder: str | None = None
    holder_lease_s: float = 0.0
    stopped_s: float | None = None
    lead_s: float = 0.0
    num_sessions: int = 0
    num_tokenizer_calls: int = 0
    garbage: bytes | None = None
    draining: Draining | None = None

    def __post_init__(self) -> None:
        self.runner = ArithmeticRunner(self.boot_id, self.geometry)
        self.end = ExecutorEnd(self.boot_id, 16)
        if self.holder is not None:
            holder = SchedulerId(name=self.holder, incarnation="0")
            self.end.open_session(holder, False, self.holder_lease_s, self.now())
        self.computing = threading.Lock()
        self._outbound: queue.SimpleQueue[bytes | TandemError | _Ending] = queue.SimpleQueue()
        self._server = grpc.server(ThreadPoolExecutor(8))
        self._server.add_generic_rpc_handlers((self,))

    def start(self) -> GrpcExecutor:
        assert self._server.add_insecure_port(self.address)
        self._server.start()
        return self

    def kill(self) -> None:
        """Stop at once; no state survives."""
        self._server.stop(grace=None).wait()

    def cut(self) -> None:
        """End the current stream as a broken connection would."""
        self._outbound.put(TandemError("cut"))

    def end_stream(self, error: TandemError) -> None:
        """
        End the current stream with an error of the executor's; refuse sessions if the error is
        Draining.
        """
        self.draining = error if isinstance(error, Draining) else None
        self._outbound.put(_Ending(error))

    def now(self) -> float:
        return (time.monotonic() if self.stopped_s is None else self.stopped_s) + self.lead_s

    def service(self, details):
        name = details.method.removeprefix(_PREFIX)
        return {
            "Describe": grpc.unary_unary_rpc_method_handler(
                self._describe, response_serializer=_serialize
            ),
            "OpenSession": grpc.unary_unary_rpc_method_handler(
                self._open_session,
                session_pb2.OpenSessionRequest.FromString,
                _serialize,
            ),
            "GetTokenizer": grpc.unary_stream_rpc_method_handler(
                self._get_tokenizer, response_serializer=_serialize
            ),
            "Execute": grpc.stream_stream_rpc_method_handler(self._execute),
        }.get(name)

    def _describe(self, _request, _context) -> executor_pb2.DescribeResponse:
        geometry = self.geometry
        return executor_pb2.DescribeResponse(
            protocol_version=self.protocol_version,
            boot_id=self.boot_id,
            model_fingerprint=self.fingerprint,
            model_name="sums",
            architecture="Arithmetic",
            dtype="float32",
            vocab_size=1000,
            max_model_len=geometry.max_model_len,
            block_size=geometry.block_size,
            num_blocks=geometry.num_blocks,
            num_slots=geometry.num_slots,
            num_host_blocks=geometry.num_host_blocks,
            max_batch_size=geometry.max_batch_size,
            max_total_tokens=geometry.max_total_tokens,
            max_inflight_steps=16,
            eos_token_ids=b"\x01\0\0\0\x02\0\0\0",
            heartbeat_interval_ms=20,
        )

    def _open_session(self, request, context) -> session_pb2.OpenSessionResponse:
        if self.draining is not None:
            context.abort_with_status(to_grpc_status(self.draining))
        with self.computing:
            try:
                epoch = self.end.open_session(
                    SchedulerId(
                        name=request.scheduler_name, incarnation=request.scheduler_incarnation
                    ),
                    request.take_over,
                    request.lease_ms / 1000,
                    self.now(),
                )
            except TandemError as error:
                context.abort_with_status(to_grpc_status(error))
            self.runner.reset()
            self.num_sessions += 1
        return session_pb2.OpenSessionResponse(boot_id=self.boot_id, session_epoch=epoch)

    def _get_tokenizer(self, _request, _context) -> Iterator[executor_pb2.GetTokenizerResponse]:
        self.num_tokenizer_calls += 1
        for name, content in self.files.items():
            half = len(content) // 2
            yield executor_pb2.GetTokenizerResponse(name=name, chunk=content[:half])
            yield executor_pb2.GetTokenizerResponse(
                name=name,
                chunk=content[half:],
                sha256=self.sha256 or hashlib.sha256(content).hexdigest(),
            )

    def _execute(self, requests: Iterator[bytes], context) -> Iterator[bytes]:
        attach = decode_request(next(requests))
        assert isinstance(attach, Attach)
        try:
            with self.computing:
                attached, results = self.end.attach(attach, self.now())
                self._outbound = outbound = queue.SimpleQueue()
        except TandemError as error:
            context.abort_with_status(to_grpc_status(error))
        yield encode_response(attached)
        yield from results
        threading.Thread(
            target=self._receive, args=(requests, attach.attach_id, outbound), daemon=True
        ).start()
        while context.is_active():
            try:
                raw = outbound.get(timeout=HEARTBEAT_S)
            except queue.Empty:
                raw = encode_response(self.end.heartbeat(self.now()))
            if isinstance(raw, _Ending):
                self.end.detach(attach.session_epoch, attach.attach_id)
                context.abort_with_status(to_grpc_status(raw.error))
            if isinstance(raw, SessionLost):
                self.end.detach(attach.session_epoch, attach.attach_id)
                context.abort_with_status(to_grpc_status(raw))
            if isinstance(raw, TandemError):
                self.end.detach(attach.session_epoch, attach.attach_id)
                context.abort(grpc.StatusCode.UNAVAILABLE, raw.message)
            yield raw
        self.end.detach(attach.session_epoch, attach.attach_id)

    def _receive(self, requests: Iterator[bytes], attach_id: int, outbound) -> None:
        try:
            for raw in requests:
                step = decode_request(raw)
                assert isinstance(step, Step)
                with self.computing:
                    self._step(step, raw, attach_id, outbound)
        except TandemError as error:
            outbound.put(error)
        except grpc.RpcError:
            return  # The stream ended.

    def _step(self, step: Step, raw: bytes, attach_id: int, outbound) -> None:
        if not self.end.receive(step, raw, attach_id, self.now()):
            return
        self.end.start(step.step_id, self.now())
        result = encode_response(self.runner.execute(step))
        if self.garbage is not None:
            outbound.put(self.garbage)
            self.garbage = None
        if self.end.complete(step.session_epoch, step.step_id, result):
            outbound.put(result)


def _serialize(message) -> bytes:
    return message.SerializeToString()
