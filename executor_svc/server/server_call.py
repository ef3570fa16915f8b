"""The server's side of one streaming call, without a thread for each direction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import structlog
from grpc._cython import cygrpc  # type: ignore[attr-defined]  # not public, see ServerCall

_NO_FLAGS = 0

_log = structlog.get_logger(__name__)


class ServerCall:
    """
    A call that receives and sends by the low-level operations under gRPC's own streams.

    grpc.server passes every message between threads: the polling thread wakes a reading thread, and
    a sending thread waits until its message is sent. At a thousand steps per second these wake-ups
    take 38 % more CPU per step at this end and 35 % more at the scheduler's (`python -m
    tests.bench.link.calls`, two cores of an AMD EPYC, Zen 3), and they compete with the runner for
    the interpreter. So here the polling
    thread handles received messages, and the thread that has a message begins to send it. The
    operations are not part of gRPC's public interface; tests cover all that is used of them. The
    call's life (metadata, status, cancellation) stays with grpc.server.
    """

    def __init__(self, context: grpc.ServicerContext) -> None:
        self._call: Any = context._rpc_event.call  # type: ignore[attr-defined]  # noqa: SLF001  # see class
        self._on_message: Callable[[bytes | None], bool] = lambda _: False

    def receive(self, on_message: Callable[[bytes | None], bool]) -> None:
        """
        Begin to receive; returns at once.

        Args:
            on_message: Called with each message in order, on the thread that polls for all calls of
                the server, and last with None when the peer has ended its side or is gone. Returns
                True to receive more.
        """
        self._on_message = on_message
        self._receive_next()

    def send(self, message: bytes, on_sent: Callable[[], None]) -> None:
        """
        Begin to send a message; the message before it must have been sent.

        Args:
            message: Encoded message.
            on_sent: Called on the polling thread when the message is sent or the call has ended; on
                this thread if the call had already ended.
        """
        operation = cygrpc.SendMessageOperation(message, _NO_FLAGS)

        def sent(_event: object) -> tuple[None, tuple[()]]:
            on_sent()
            return None, ()

        try:
            error = self._call.start_server_batch((operation,), sent)
        except ValueError:  # the call has ended
            error = True
        if error:
            on_sent()

    def _receive_next(self) -> None:
        operation = cygrpc.ReceiveMessageOperation(_NO_FLAGS)
        self._call.start_server_batch((operation,), self._received)

    def _received(self, event: Any) -> tuple[None, tuple[()]]:
        try:
            message = event.batch_operations[0].message()
            if self._on_message(message) and message is not None:
                self._receive_next()
        except Exception as error:  # noqa: BLE001  # what polls for all calls must live on
            _log.error("message_not_handled", exc_info=error)
        return None, ()
