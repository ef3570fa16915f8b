"""Conversion of errors to gRPC statuses and back, the same for every server and client."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import grpc
from google.protobuf import any_pb2
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from tandem.error_codes import ERROR_BY_CODE, Cancelled, TandemError, Unavailable
from tandem.errors import ERROR_BY_REASON, InternalError

DOMAIN = "tandem"


def to_status_proto(error: TandemError, *, request_id: str = "") -> status_pb2.Status:
    """
    Encode an error as `google.rpc.Status` with ErrorInfo and, if they apply, BadRequest, RetryInfo
    and RequestInfo.
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
    if request_id:
        packed.append(_pack(error_details_pb2.RequestInfo(request_id=request_id)))
    code: int = grpc.StatusCode[error.code].value[0]
    return status_pb2.Status(code=code, message=error.message, details=packed)


def to_grpc_status(error: TandemError, *, request_id: str = "") -> grpc.Status:
    """Encode an error for `context.abort_with_status`; see `to_status_proto`."""
    status: grpc.Status = rpc_status.to_status(to_status_proto(error, request_id=request_id))
    return status


def from_rpc_error(error: grpc.RpcError) -> TandemError:
    """
    Rebuild the error that a peer sent. A failure without Tandem's details, such as a broken
    connection or an answer of a proxy, becomes the class of its gRPC code, with the code's name in
    `metadata["grpc_code"]`; that of a call for which no connection could be made has
    `metadata["connected"]` "false", and `metadata["listening"]` "false" if no server listens there.
    """
    code = error.code()
    text = error.details() or code.name
    try:
        # Every RpcError that a call raises is also a Call.
        status = rpc_status.from_call(error)  # type: ignore[arg-type]
    except (ValueError, DecodeError):  # status and details differ: trust the status line
        status = None
    details = _Details() if status is None else _read_details(status)
    if status is not None and details.info is not None:
        return _typed(status, details)
    fallback = _UNTYPED.get(code) or ERROR_BY_CODE.get(code.name, InternalError)
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
    return fallback(text, retry_after_s=details.retry_after_s, metadata=metadata)


def from_status_proto(status: status_pb2.Status) -> TandemError | None:
    """Rebuild an error from its encoded form; return None if it has no reason of Tandem's."""
    details = _read_details(status)
    return None if details.info is None else _typed(status, details)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Details:
    """Details of a status; `info` is None if no ErrorInfo is Tandem's."""

    info: error_details_pb2.ErrorInfo | None = None
    field: str | None = None
    retry_after_s: float | None = None
    request_id: str = ""


def _read_details(status: status_pb2.Status) -> _Details:
    found = _Details()
    for detail in status.details:
        info = error_details_pb2.ErrorInfo()
        bad_request = error_details_pb2.BadRequest()
        retry = error_details_pb2.RetryInfo()
        request = error_details_pb2.RequestInfo()
        # A proxy may add an ErrorInfo of its own to ours.
        if detail.Unpack(info) and info.domain == DOMAIN:
            found = replace(found, info=info)
        elif detail.Unpack(bad_request) and bad_request.field_violations:
            found = replace(found, field=bad_request.field_violations[0].field)
        elif detail.Unpack(retry):
            found = replace(found, retry_after_s=retry.retry_delay.ToNanoseconds() / 1e9)
        elif detail.Unpack(request):
            found = replace(found, request_id=request.request_id)
    return found


def _typed(status: status_pb2.Status, details: _Details) -> TandemError:
    info = details.info
    assert info is not None
    error = ERROR_BY_REASON.get(info.reason) or _newer(info.reason, status.code)
    return error(
        status.message,
        field=details.field,
        retry_after_s=details.retry_after_s,
        metadata=dict(info.metadata),
        request_id=details.request_id,
    )


@functools.lru_cache(maxsize=64)
def _newer(reason: str, number: int) -> type[TandemError]:
    """
    Return an error class, below that of the peer's gRPC code, for a reason that only newer peers
    know.
    """
    names = {code.value[0]: code.name for code in grpc.StatusCode}
    base = ERROR_BY_CODE.get(names.get(number, "OK"))
    if base is None:
        return InternalError
    if not reason:
        return base
    facts: dict[str, object] = {"reason": reason}
    if base is Unavailable:  # the code asks for a retry, whatever the reason
        facts["default_retry_after_s"] = 1.0
    return type("NewerError", (base,), facts)


def _pack(message: object) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)  # type: ignore[arg-type]  # generated messages are untyped here
    return packed


class PeerUnavailable(Unavailable):
    """
    The peer cannot be reached, or its connection broke; no typed answer came. Metadata "connected"
    is "false" if no connection could be made, so that the peer cannot have the call; "listening" is
    "false" if the reason is that no server listens at its address.
    """

    reason = "PEER_UNAVAILABLE"

    @property
    def was_connected(self) -> bool:
        """True unless no connection could be made: the peer may have had the call."""
        return self.metadata.get("connected") != "false"

    @property
    def nothing_listens(self) -> bool:
        """True if no server listens at the address."""
        return self.metadata.get("listening") == "false"


class CallCancelled(Cancelled):
    """The call was cancelled on this side."""

    reason = "CALL_CANCELLED"


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
}
"""Classes of codes that more can be said of than the code does."""
