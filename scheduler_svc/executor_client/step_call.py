"""Scheduler's side of one Execute call, without gRPC's own threads between it and the core."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import grpc
from grpc._cython import cygrpc  # type: ignore[attr-defined]  # not public, see StepCall

from tandem.network.outgoing import OutgoingMessages

_METHOD = b"/tandem.executor.v1.ExecutorService/Execute"
_NO_FLAGS = 0
# Numbers, as an operation's type is one and a member of an enum is slower to find and compare.
_SENT = int(cygrpc.OperationType.send_message)
_RECEIVED = int(cygrpc.OperationType.receive_message)
_OVER = int(cygrpc.OperationType.receive_status_on_client)
_CODES: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}


class CallEnded(grpc.RpcError):
    """Status of a call that has ended, in the form of gRPC's own errors."""

    def __init__(
        self, code: grpc.StatusCode, details: str, metadata: tuple[tuple[str, str | bytes], ...]
    ) -> None:
        super().__init__(details)
        self._code = code
        self._details = details
        self._metadata = metadata

    def code(self) -> grpc.StatusCode:
        """Return the status code."""
        return self._code

    def details(self) -> str:
        """Return the text of the status."""
        return self._details

    def trailing_metadata(self) -> Any:
        """Return the metadata that came with the status."""
        return self._metadata


class StepCall:
    """
    Bidirectional call of bytes that needs no thread but the reader's.

    gRPC's own streams take three threads on this side. One polls and wakes a second one, which
    reads. A third one sends messages and is woken twice for each: to send it and when it has left.
    With them both ends need more CPU per step at a thousand steps per second: 35 % more here and
    38 % more at the executor (`python -m tests.bench.link.calls`, two cores of an AMD EPYC, Zen 3).
    Here the reader itself polls a completion queue of the call's own (as in gRPC's experimental
    single-threaded streams of responses), and the thread that has a message begins to send it. The
    operations are not part of gRPC's public interface; tests check all that is used of them.
    """

    def __init__(self, channel: grpc.Channel, metadata: tuple[tuple[str, str], ...] = ()) -> None:
        """Begin the call with this metadata; it waits for the connection."""
        operations = (
            (cygrpc.SendInitialMetadataOperation(metadata, _NO_FLAGS),),
            (cygrpc.ReceiveStatusOnClientOperation(_NO_FLAGS),),
            (cygrpc.ReceiveInitialMetadataOperation(_NO_FLAGS),),
        )
        inner: Any = channel._channel  # type: ignore[attr-defined]  # noqa: SLF001  # see class
        self._call: Any = inner.segregated_call(
            cygrpc.PropagationConstants.GRPC_PROPAGATE_DEFAULTS,
            _METHOD,
            None,
            None,
            (),
            None,
            tuple((batch, None) for batch in operations),
            None,
            None,
        )
        self.outgoing = OutgoingMessages(self._begin_to_send)
        self._num_due = len(operations)
        """
        Number of operations that have not completed. Guarded by `_lock`, as is beginning one: once
        it is 0, no operation may begin.
        """
        self._lock = threading.Lock()

    def messages(self) -> Iterator[bytes]:
        """
        Yield messages until the call has ended; one thread must iterate to the end.

        Raises:
            CallEnded: The call ended with a status other than OK.
        """
        end: CallEnded | None = None
        self._operate(cygrpc.ReceiveMessageOperation(_NO_FLAGS))
        while True:
            with self._lock:
                if not self._num_due:
                    break
            operations = self._call.next_event().batch_operations
            with self._lock:
                self._num_due -= 1
            for operation in operations:
                kind = operation.type()
                if kind == _SENT:
                    self.outgoing.left()
                elif kind == _RECEIVED:
                    message = operation.message()
                    if message is not None:
                        yield message
                        self._operate(cygrpc.ReceiveMessageOperation(_NO_FLAGS))
                elif kind == _OVER:
                    end = _ended(operation)
                    self.outgoing.drop()
        if end is not None and end.code() is not grpc.StatusCode.OK:
            raise end

    def cancel(self) -> None:
        """End the call; may be called from any thread."""
        self._call.cancel(cygrpc.StatusCode.cancelled, "cancelled by the scheduler")

    def _begin_to_send(self, message: bytes) -> None:
        if not self._operate(cygrpc.SendMessageOperation(message, _NO_FLAGS)):
            self.outgoing.drop()

    def _operate(self, operation: Any) -> bool:
        with self._lock:
            has_begun: bool = self._call.operate((operation,), None)
            self._num_due += has_begun
        return has_begun


def _ended(operation: Any) -> CallEnded:
    code = _CODES.get(operation.code(), grpc.StatusCode.UNKNOWN)
    details = operation.details()
    text = details.decode(errors="replace") if isinstance(details, bytes) else str(details)
    return CallEnded(code, text, tuple(operation.trailing_metadata() or ()))
