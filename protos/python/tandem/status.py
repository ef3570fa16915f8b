"""Conversion of errors to gRPC statuses and back, the same for every server and client."""

from __future__ import annotations

import functools

import grpc
from google.protobuf import any_pb2
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from tandem.errors import ERROR_BY_REASON, InternalError, TandemError

DOMAIN = "tandem"


def to_status_proto(error: TandemError) -> status_pb2.Status:
    """
    Encode an error as `google.rpc.Status` with ErrorInfo and, if they apply, BadRequest and
    RetryInfo.
    """
    details = [
        error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=error.metadata),
    ]
    packed = [_pack(detail) for detail in details]
    if error.field is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field, description=error.message
        )
        packed.append(_pack(error_details_pb2.BadRequest(field_violations=[violation])))
    if error.retry_after_s is not None:
        delay = Duration()
        delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        packed.append(_pack(error_details_pb2.RetryInfo(retry_delay=delay)))
    code: int = grpc.StatusCode[error.code].value[0]
    return status_pb2.Status(code=code, message=error.message, details=packed)


def to_grpc_status(error: TandemError) -> grpc.Status:
    """Encode an error for `context.abort_with_status`."""
    status: grpc.Status = rpc_status.to_status(to_status_proto(error))
    return status


def from_rpc_error(error: grpc.RpcError) -> TandemError:
    """
    Rebuild the error that a peer sent. A failure without Tandem's details, such as a broken
    connection, becomes the class that its gRPC code suggests, with the code's name in
    `metadata["grpc_code"]`; that of a call for which no connection could be made has
    `metadata["connected"]` "false", and `metadata["listening"]` "false" if no server listens there.
    """
    code = error.code()
    text = error.details() or code.name
    try:
        # Every RpcError that a call raises is also a Call.
        status = rpc_status.from_call(error)  # type: ignore[arg-type]
    except ValueError:  # code or message of status and details differ: trust the status line
        status = None
    if status is not None:
        rebuilt = from_status_proto(status)
        if rebuilt is not None:
            return rebuilt
    fallback = _UNTYPED.get(code, InternalError)
    is_foreign = code is grpc.StatusCode.CANCELLED and not any(
        sign in text for sign in _CANCELLED_HERE
    )
    if is_foreign or any(sign in text for sign in _BROKEN_STREAM):
        fallback = PeerUnavailable
    metadata = {"grpc_code": code.name}
    if fallback is PeerUnavailable and any(sign in text for sign in _NEVER_CONNECTED):
        metadata["connected"] = "false"
        if any(sign in text for sign in _NOTHING_LISTENS):
            metadata["listening"] = "false"
    return fallback(text, metadata=metadata)


def from_status_proto(status: status_pb2.Status) -> TandemError | None:
    """Rebuild an error from its encoded form; return None if it has no reason of Tandem's."""
    info = error_details_pb2.ErrorInfo()
    bad_request = error_details_pb2.BadRequest()
    retry = error_details_pb2.RetryInfo()
    found_retry = False
    for detail in status.details:
        if detail.Is(info.DESCRIPTOR):
            detail.Unpack(info)
        elif detail.Is(bad_request.DESCRIPTOR):
            detail.Unpack(bad_request)
        elif detail.Is(retry.DESCRIPTOR):
            found_retry = detail.Unpack(retry)
    if info.domain != DOMAIN:
        return None
    violations = bad_request.field_violations
    error = ERROR_BY_REASON.get(info.reason) or _newer(info.reason, status.code)
    return error(
        status.message,
        field=violations[0].field if violations else None,
        retry_after_s=retry.retry_delay.ToNanoseconds() / 1e9 if found_retry else None,
        metadata=dict(info.metadata),
    )


@functools.lru_cache(maxsize=64)
def _newer(reason: str, number: int) -> type[TandemError]:
    """Return an error class, with the peer's gRPC code, for a reason that only newer peers know."""
    names = {code.value[0]: code.name for code in grpc.StatusCode}
    if not reason or names.get(number, "UNKNOWN") in {"OK", "UNKNOWN", "INTERNAL"}:
        return InternalError
    return type("NewerError", (TandemError,), {"reason": reason, "code": names[number]})


def _pack(message: object) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)  # type: ignore[arg-type]  # generated messages are untyped here
    return packed


class PeerUnavailable(TandemError):
    """
    The peer cannot be reached, or its connection broke; no typed answer came. Metadata "connected"
    is "false" if no connection could be made, so that the peer cannot have the call; "listening" is
    "false" if the reason is that no server listens at its address.
    """

    reason = "PEER_UNAVAILABLE"
    code = "UNAVAILABLE"

    @property
    def was_connected(self) -> bool:
        """True unless no connection could be made: the peer may have had the call."""
        return self.metadata.get("connected") != "false"

    @property
    def nothing_listens(self) -> bool:
        """True if no server listens at the address."""
        return self.metadata.get("listening") == "false"


class CallCancelled(TandemError):
    """The call was cancelled, or its deadline passed, on this side."""

    reason = "CALL_CANCELLED"
    code = "CANCELLED"


_BROKEN_STREAM = ("RST_STREAM", "Stream removed")
"""Texts of gRPC for a stream that the peer or a proxy dropped; the code differs between them."""

_NEVER_CONNECTED = ("failed to connect", "errors resolving", "DNS resolution failed")
"""Texts for a call that was not sent, as no connection could be made."""
_NOTHING_LISTENS = ("Connection refused", "No such file")
"""Texts of the last cause where no server listens at the address."""

_CANCELLED_HERE = (
    "Locally cancelled",
    "cancelled by the scheduler",
    "Channel closed",
    "Channel deallocated",
    "Cancelled upon garbage collection",
)
"""Texts for a call that this side cancelled; with any other text, a peer that stops did."""

_UNTYPED: dict[grpc.StatusCode, type[TandemError]] = {
    grpc.StatusCode.UNAVAILABLE: PeerUnavailable,
    grpc.StatusCode.CANCELLED: CallCancelled,
    grpc.StatusCode.DEADLINE_EXCEEDED: CallCancelled,
}
