"""The methods of tandem.executor.v1.ExecutorService."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import structlog

from executor_svc.model.files.tokenizer_files import chunks
from executor_svc.profile.profiles import Profiles
from executor_svc.server.loaded import Engine
from executor_svc.server.server_call import ServerCall
from executor_svc.server.step_link import StepLink
from executor_svc.server.step_stream import StepStream, UnattachedStreams
from tandem.common.v1.profile_pb2 import ProfileProgress
from tandem.errors import (
    ExecutorLoading,
    IncompatibleExecutor,
    InternalError,
    InvalidParameter,
    ProfileUnsupported,
    SessionLost,
    TandemError,
)
from tandem.executor.v1 import executor_service_pb2 as executor_pb2
from tandem.executor.v1 import session_pb2
from tandem.link import MAX_LEASE_MS, PROTOCOL_VERSION
from tandem.link.codec.wire import decode_request
from tandem.link.session import Attach, SchedulerId
from tandem.profile import read_options

SERVICE_NAME = "tandem.executor.v1.ExecutorService"
MIN_LEASE_MS = 1000
MAX_NAME_CHARS = 256

_log = structlog.get_logger(__name__)

_POLL_S = 0.5
"""Seconds after which a call that waits for the running step checks that its caller is alive."""


class ExecutorService:
    """
    The service's methods, called on server threads; all changes of state go through the step link.

    `engine` is set once, when it is loaded; until then calls that need it are refused.
    """

    def __init__(self, link: StepLink, profiles: Profiles, boot_id: str) -> None:
        self.engine: Engine | None = None
        self._link = link
        self._profiles = profiles
        self._boot_id = boot_id
        self._unattached = UnattachedStreams()

    def handlers(self) -> grpc.GenericRpcHandler[Any, Any]:
        """
        Return the methods for a server. Execute carries bytes both ways, so a message is encoded
        once.
        """
        methods = {
            "Describe": grpc.unary_unary_rpc_method_handler(
                self.describe,
                executor_pb2.DescribeRequest.FromString,
                executor_pb2.DescribeResponse.SerializeToString,
            ),
            "OpenSession": grpc.unary_unary_rpc_method_handler(
                self.open_session,
                session_pb2.OpenSessionRequest.FromString,
                session_pb2.OpenSessionResponse.SerializeToString,
            ),
            "GetTokenizer": grpc.unary_stream_rpc_method_handler(
                self.get_tokenizer,
                executor_pb2.GetTokenizerRequest.FromString,
                executor_pb2.GetTokenizerResponse.SerializeToString,
            ),
            "Profile": grpc.unary_stream_rpc_method_handler(
                self.profile,
                executor_pb2.ProfileRequest.FromString,
                executor_pb2.ProfileResponse.SerializeToString,
            ),
            "Execute": grpc.stream_stream_rpc_method_handler(self.execute),
        }
        return grpc.method_handlers_generic_handler(SERVICE_NAME, methods)

    def describe(
        self, _request: executor_pb2.DescribeRequest, _context: grpc.ServicerContext
    ) -> executor_pb2.DescribeResponse:
        """Describe this executor."""
        return self._loaded().description

    def get_tokenizer(
        self, _request: executor_pb2.GetTokenizerRequest, _context: grpc.ServicerContext
    ) -> Iterator[executor_pb2.GetTokenizerResponse]:
        """Stream the tokenizer's files."""
        return chunks(self._loaded().tokenizer_files)

    def profile(
        self, request: executor_pb2.ProfileRequest, context: grpc.ServicerContext
    ) -> Iterator[executor_pb2.ProfileResponse]:
        """Record the next steps and stream their trace."""
        engine = self._loaded()
        options = read_options(request.options)
        if engine.recorder is None:
            raise ProfileUnsupported(
                f"this executor ({engine.description.architecture}) computes nothing that "
                "PyTorch's profiler could record"
            )
        recorder = engine.recorder(options)
        for message in self._profiles.record(recorder, options, context.is_active):
            if isinstance(message, ProfileProgress):
                yield executor_pb2.ProfileResponse(progress=message)
            else:
                yield executor_pb2.ProfileResponse(trace=message)

    def open_session(
        self, request: session_pb2.OpenSessionRequest, context: grpc.ServicerContext
    ) -> session_pb2.OpenSessionResponse:
        """Begin a session; answer once the running step has ended and all slots are reset."""
        self._loaded()
        _check_open(request)
        epoch, is_reset = self._link.open_session(
            SchedulerId(name=request.scheduler_name, incarnation=request.scheduler_incarnation),
            take_over=request.take_over,
            lease_s=request.lease_ms / 1000,
        )
        while not is_reset.wait(_POLL_S):
            if (error := self._link.stopped_by) is not None:
                raise error  # a link that has stopped resets no slots
            if not context.is_active():
                break
        self._link.grant(epoch)
        return session_pb2.OpenSessionResponse(boot_id=self._boot_id, session_epoch=epoch)

    def execute(self, _requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """
        Serve one stream of steps; this thread waits for its end.
        """
        call = ServerCall(context)
        stream = StepStream(lambda message: call.send(message, stream.outgoing.left))
        if not context.add_callback(stream.end):  # a broken connection must end the wait
            return
        context.send_initial_metadata(())
        self._unattached.add(stream)
        call.receive(lambda raw: self._receive(raw, stream))
        try:
            stream.wait()
        finally:
            self._unattached.discard(stream)
            self._link.detach(stream)
        yield from ()

    def _receive(self, raw: bytes | None, stream: StepStream) -> bool:
        """Handle a stream's next message, None at its end; return False if it cannot go on."""
        error: TandemError | None = None
        if raw is not None:
            try:
                self._take(raw, stream)
            except TandemError as refused:
                error = refused
            except Exception as broken:  # noqa: BLE001  # a call's outermost frame, as the interceptor
                _log.error("call_broken", method="Execute", exc_info=broken)
                error = InternalError("a bug in the executor: see its log")
            else:
                return True
        self._link.detach(stream)
        stream.end(error)
        return False

    def _take(self, raw: bytes, stream: StepStream) -> None:
        message = decode_request(raw)
        if isinstance(message, Attach):
            if stream.attach_id:
                raise SessionLost("Attach came twice: it is the first message of a stream only")
            self._unattached.discard(stream)
            self._link.attach(message, stream)
        elif not stream.attach_id:
            raise SessionLost("a step came before Attach: Attach is the first message of a stream")
        else:
            self._link.receive(message, raw, stream)

    def _loaded(self) -> Engine:
        if self.engine is None:
            raise ExecutorLoading("the executor is still loading its model: try again in a moment")
        return self.engine


def _check_open(request: session_pb2.OpenSessionRequest) -> None:
    if request.protocol_version != PROTOCOL_VERSION:
        raise IncompatibleExecutor(
            f"the scheduler speaks step protocol {request.protocol_version}, this executor "
            f"{PROTOCOL_VERSION}: run both from the same release"
        )
    for name in ("scheduler_name", "scheduler_incarnation"):
        if not 1 <= len(text := getattr(request, name)) <= MAX_NAME_CHARS:
            raise InvalidParameter(
                f"{name} must have 1 to {MAX_NAME_CHARS} characters, got {len(text)}", field=name
            )
    if not MIN_LEASE_MS <= request.lease_ms <= MAX_LEASE_MS:
        raise InvalidParameter(
            f"lease_ms must be in [{MIN_LEASE_MS}, {MAX_LEASE_MS}], got {request.lease_ms}",
            field="lease_ms",
        )
